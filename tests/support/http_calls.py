"""Requests as tests make them: bodies, cases, and what an answer must be."""

from __future__ import annotations

from typing import Any

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
