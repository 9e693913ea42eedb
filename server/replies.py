"""Answers to scoring calls: encoded on the device's thread, sent from the memory they are in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from indexer.case.container import Array, Buffer
from indexer.wire import ScoreReply, encode_reply
from server.limits import check_json_reply
from server.media import BINARY, Form

_CHUNK_BYTES = 1 << 20


def encoded(reply: ScoreReply, form: Form) -> list[Buffer]:
    """A reply as the buffers of a body.

    Raises:
        ProblemError: 422, it is too large for JSON.
    """
    return encode_reply(reply) if form == BINARY else [_json(reply)]


def server_timing(stages: Mapping[str, float]) -> dict[str, str]:
    """The ``Server-Timing`` header of stages in seconds; it counts in milliseconds."""
    return {"Server-Timing": ", ".join(f"{name};dur={1e3 * value:.3f}" for name, value in stages.items())}


class BuffersResponse(Response):
    """A body of several buffers.

    Args:
        buffers: the body; they must not change any more.
        form: its media type.
        headers: further headers.
        send_seconds: time for the client to take it; afterwards the connection is closed.
    """

    def __init__(
        self, buffers: Sequence[Buffer], form: Form, headers: Mapping[str, str], send_seconds: float
    ) -> None:
        length = sum(len(buffer) for buffer in buffers)
        super().__init__(b"", 200, {**headers, "content-length": str(length)}, media_type=form)
        self._buffers = buffers
        self._length = length
        self._send_seconds = send_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._length <= _CHUNK_BYTES:
            # One write that the socket's buffer takes: nothing to wait for.
            await send({"type": "http.response.body", "body": b"".join(self._buffers)})
        else:
            await asyncio.wait_for(self._send(send), self._send_seconds)

    async def _send(self, send: Send) -> None:
        for buffer in self._buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), _CHUNK_BYTES):
                chunk = view[start : start + _CHUNK_BYTES]
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _json(reply: ScoreReply) -> bytes:
    check_json_reply(reply.block_ids.size)
    content: dict[str, Any] = {
        "block_ids": reply.block_ids.tolist(),
        "num_blocks": reply.num_blocks.tolist(),
        "scores": None,
        "backend": reply.backend,
        "precision": reply.precision,
        "order": reply.order,
        "timings_seconds": dict(reply.timings),
    }
    if reply.scores is not None:
        check_json_reply(reply.scores.size)
        content["scores"] = _nullable(reply.scores)
    return json.dumps(content, allow_nan=False).encode()


def _nullable(scores: Array) -> Any:
    """Nested lists with None for ``-inf``, which JSON has no number for."""
    values = scores.astype(object)
    values[np.isneginf(scores)] = None
    return values.tolist()
