"""Receives a request's body within its limits: of bytes, of the server's memory, and of time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from server.deadline import Deadline
from server.problems import ProblemError
from server.worker import Place


async def read_body(request: Request, place: Place, max_bytes: int, deadline: Deadline) -> bytearray:
    """The whole body, received into one buffer.

    Args:
        request: whose body nobody has read.
        place: what the body's bytes are counted on.
        max_bytes: longest body.
        deadline: until when the body must be there.

    Raises:
        ProblemError: 413, longer than that, before any of it is read where ``Content-Length`` tells; 429, no
            memory for it now; 504, too slow; or the client went away.
    """
    stated = request.headers.get("content-length")
    length = int(stated) if stated is not None else None
    if length is not None:
        if length > max_bytes:
            raise _too_large(length, max_bytes)
        place.reserve(length)
    try:
        return await asyncio.wait_for(_receive(request, place, length, max_bytes), deadline.left())
    except asyncio.TimeoutError as error:
        raise deadline.problem("the deadline passed before the body was here; nothing was done") from error


async def _receive(request: Request, place: Place, length: int | None, max_bytes: int) -> bytearray:
    body = bytearray(length or 0)
    received = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ProblemError(499, "disconnected", "the client went away before its body was here")
        chunk = message.get("body", b"")
        end = received + len(chunk)
        if end > max_bytes:
            raise _too_large(end, max_bytes)
        if length is None:
            place.reserve(len(chunk))
        body[received:end] = chunk
        received = end
        if not message.get("more_body", False):
            return body


def _too_large(length: int, max_bytes: int) -> ProblemError:
    return ProblemError(
        413,
        "too-large",
        f"body = {length} bytes or more: may be {max_bytes}; send less at a time, or raise the limit",
        argument="body",
        value=length,
        limit=max_bytes,
    )
