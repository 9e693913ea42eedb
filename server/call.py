"""The way of a request to the device: ready, place, body, queue, run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from server.body import read_body
from server.context import context_of
from server.engine import Engine
from server.media import JSON, Form
from server.options import check_given_once
from server.state import state_of

T = TypeVar("T")


async def run_call(request: Request, work: Callable[[Engine, str], T]) -> T:
    """Run a call without a body.

    Args:
        request: the request.
        work: what runs on the device's thread, given the engine and the request's owner.

    Raises:
        ProblemError: 503, 429, 504, or what ``work`` raises.
    """
    return await _run(request, None, lambda engine, owner, _: work(engine, owner))


async def run_body_call(request: Request, form: Form, work: Callable[[Engine, str, bytearray], T]) -> T:
    """Run a call with a body.

    Args:
        request: the request.
        form: the body's.
        work: what runs on the device's thread, given the engine, the request's owner and the body.

    Raises:
        ProblemError: 422 for an option that is given twice, 503, 429, 413, 504, or what ``work`` raises.
    """
    check_given_once(request.scope["query_string"])
    return await _run(request, form, work)


async def _run(request: Request, form: Form | None, work: Callable[[Engine, str, bytearray], T]) -> T:
    state, context = state_of(request), context_of(request.scope)
    engine = state.ready_engine()
    context.place = place = state.worker.admit()
    began = time.perf_counter()
    body = bytearray()
    if form is not None:
        settings = state.settings
        limit = settings.max_json_bytes if form == JSON else settings.max_body_bytes
        body = await read_body(request, place, limit, context.deadline)
        state.metrics.received.inc(len(body))
        context.stages["receive"] = time.perf_counter() - began
    owner = context.owner
    result, waited = await place.run(lambda: work(engine, owner, body), context.deadline, request.receive)
    context.stages["queue"] = waited
    return result
