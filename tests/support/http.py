"""Requests as tests make them: bodies, cases, and what an answer must be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from indexer.case.container import Array, Buffer
from indexer.wire import SequencesCall, encode_keys, encode_sequences_call

BINARY = "application/octet-stream"
PROBLEM = "application/problem+json"


def binary(buffers: list[Buffer] | bytes) -> dict[str, Any]:
    """Arguments of an httpx call with a binary body."""
    body = buffers if isinstance(buffers, bytes) else b"".join(buffers)
    return {"content": body, "headers": {"Content-Type": BINARY}}


def assert_problem(
    reply: httpx.Response, status: int, kind: str, argument: str | None = None
) -> dict[str, Any]:
    """Fail unless an answer is that problem; its members."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == PROBLEM
    problem: dict[str, Any] = reply.json()
    assert problem["type"] == f"urn:nvfp4-indexer:problem:{kind}"
    assert problem["status"] == status
    assert problem["detail"]
    assert problem["request_id"] == reply.headers["x-request-id"]
    if argument is not None:
        assert problem["argument"] == argument, problem
    return problem


def random_case(
    lengths: tuple[tuple[int, int], ...], heads: int = 4, *, seed: int = 0, topk: int = 3
) -> Case:
    """A case of float32 normals; lengths are ``(keys, queries)``."""
    generator = np.random.default_rng(seed)
    return Case(
        index_q=generator.standard_normal((sum(q for _, q in lengths), heads, 128), dtype=np.float32),
        index_k=generator.standard_normal((sum(k for k, _ in lengths), 128), dtype=np.float32),
        cu_seqlens_q=np.cumsum([0, *(q for _, q in lengths)], dtype=np.int32),
        seq_lens=np.array([k for k, _ in lengths], dtype=np.int32),
        init_blocks=0,
        local_blocks=0,
        topk=topk,
    )


def normals(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Seeded float32 normals."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def make_sequence(client: httpx.Client, keys: Array | None = None) -> str:
    """A new sequence, with keys; its id."""
    reply = client.post("/v1/sequences")
    assert reply.status_code == 201, reply.text
    sequence: str = reply.json()["id"]
    if keys is not None:
        append(client, sequence, keys)
    return sequence


def append(client: httpx.Client, sequence: str, keys: Array) -> int:
    """Append keys; the sequence's new length."""
    reply = client.post(f"/v1/sequences/{sequence}/keys", **binary(encode_keys(keys)))
    assert reply.status_code == 200, reply.text
    length: int = reply.json()["length"]
    return length


def sequences_body(query: Array, sequences: list[str], lens: list[int] | None = None) -> dict[str, Any]:
    """Arguments of an httpx call that scores sequences."""
    call = SequencesCall(query, tuple(sequences), None if lens is None else tuple(lens))
    return binary(encode_sequences_call(call))


# The least HTTP client that measures a server and not itself: one connection, requests built beforehand.


def request_bytes(method: str, path: str, buffers: list[Buffer], media_type: str) -> bytes:
    """A whole HTTP/1.1 request."""
    body = b"".join(buffers)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {media_type}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One kept-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> Connection:
        """Connect to a server."""
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24))

    async def ask(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Send a request; its status, head and body."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line[15:])
        body = await self._reader.readexactly(length) if length else b""
        return int(head[9:12]), head, body

    def send(self, part: bytes) -> None:
        """Send a part of a request."""
        self._writer.write(part)

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


# A transport that answers from a script: what a server does is decided by the test.

Step = Callable[[httpx.Request], httpx.Response]


class Script(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers requests one after another; a test fails if there are more requests than steps."""

    def __init__(self, *steps: Step) -> None:
        self._steps: Iterator[Step] = iter(steps)
        self.requests: list[httpx.Request] = []
        self.bodies: list[bytes] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a synchronous client."""
        self.bodies.append(request.read())
        return self._answer(request)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer an asynchronous client."""
        self.bodies.append(await request.aread())
        return self._answer(request)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return next(self._steps)(request)


def problem(status: int, kind: str, headers: dict[str, str] | None = None, **members: Any) -> Step:
    """A problem document."""
    content = {
        "type": f"urn:nvfp4-indexer:problem:{kind}",
        "status": status,
        "detail": "what happened; the remedy",
        "request_id": "r1",
        **members,
    }
    all_headers = {"content-type": "application/problem+json", **(headers or {})}
    return lambda _: httpx.Response(status, headers=all_headers, stream=_Stream(json.dumps(content).encode()))


def answer(
    status: int = 200,
    body: bytes | dict[str, Any] = b"",
    media_type: str = "",
    headers: dict[str, str] | None = None,
) -> Step:
    """Any answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    all_headers = {"content-type": media_type, **(headers or {})}
    return lambda _: httpx.Response(status, headers=all_headers, stream=_Stream(content))


def breaks(error: type[httpx.TransportError] = httpx.ReadError) -> Step:
    """A connection that breaks."""

    def step(request: httpx.Request) -> httpx.Response:
        raise error("broken", request=request)

    return step


class _Stream(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self) -> Iterator[bytes]:
        yield self._content

    async def __aiter__(self) -> Any:
        yield self._content
