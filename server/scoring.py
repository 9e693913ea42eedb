"""What the two scoring routes share: body to call, call to reply, reply to answer, each of them timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request, Response

from indexer.case.container import Buffer
from indexer.wire import ScoreReply
from server.call import run_body_call
from server.context import context_of
from server.engine import Engine
from server.media import BINARY, form_of_body, form_of_reply
from server.replies import BuffersResponse, encoded, server_timing
from server.state import state_of

C = TypeVar("C")


async def answer_scores(
    request: Request,
    from_binary: Callable[[bytearray], C],
    from_json: Callable[[bytearray], C],
    score: Callable[[Engine, str, C], ScoreReply],
) -> Response:
    """Answer a scoring request.

    Args:
        request: the request.
        from_binary: decodes a safetensors body.
        from_json: decodes a JSON body.
        score: scores what was decoded, given the engine and the request's owner.

    Raises:
        ProblemError: see :func:`server.call.run_body_call`; 415 and 406 for the body's and the answer's form.
    """
    form = form_of_body(request)
    reply_form = form_of_reply(request, form)
    decode = from_binary if form == BINARY else from_json

    def work(engine: Engine, owner: str, body: bytearray) -> tuple[list[Buffer], dict[str, float]]:
        began = time.perf_counter()
        call = decode(body)
        decoded = time.perf_counter()
        reply = score(engine, owner, call)
        scored = time.perf_counter()
        buffers = encoded(reply, reply_form)
        encode = time.perf_counter() - scored
        return buffers, {"decode": decoded - began, **reply.timings, "encode": encode}

    buffers, stages = await run_body_call(request, form, work)
    context = context_of(request.scope)
    context.stages.update(stages)
    seconds = state_of(request).settings.deadline_seconds
    return BuffersResponse(buffers, reply_form, server_timing(context.stages), seconds)
