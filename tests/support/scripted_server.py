"""A transport that answers from a script: what a server does is decided by the test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

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
