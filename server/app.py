"""The ASGI application of one server: routes, error handlers, and the life of its worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from kernel.errors import IndexerError
from server.engine import Engine, ServerState, prepared_engine
from server.http import RequestLayer, context_of
from server.metrics import Metrics
from server.openapi import openapi_document
from server.problems import ProblemError, internal, invalid, of_error
from server.routes import ROUTERS
from server.settings import Settings
from server.wire import argument_name
from server.worker import Worker

_LAST_CALL_SECONDS = 5.0
"""Time for a call whose client is gone to end at shutdown."""
_log = structlog.get_logger("server")


def new_state(settings: Settings) -> ServerState:
    """Returns the state of a server with these settings, not started."""
    return ServerState(settings, Worker(settings.queue_places, settings.queue_bytes), Metrics())


def create_app(state: ServerState) -> ASGIApp:
    """Builds the ASGI application of a server from the state that :func:`new_state` returned."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.worker.start()
        background = asyncio.create_task(_prepare(state))
        yield
        background.cancel()
        _log.info("draining", waiting=state.worker.waiting)
        ended = await state.worker.stop(_LAST_CALL_SECONDS)
        _log.info("stopped", device_idle=ended)

    app = FastAPI(title="nvfp4-indexer", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = state
    for router in ROUTERS:
        app.include_router(router)
    for kind in (ProblemError, IndexerError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.openapi = cache(lambda: openapi_document(app))  # type: ignore[method-assign]
    return RequestLayer(app, state.settings, state.metrics)


async def _prepare(state: ServerState) -> None:
    job = state.worker.submit(lambda: prepared_engine(state.settings))
    try:
        state.engine, _ = await job.future
    except Exception as error:
        _log.exception("self-test failed", reason=str(error), remedy="the server ends with exit code 1")
        state.failed = True
        state.end()
    else:
        scorer = state.engine.scorer
        _log.info("ready", backend=scorer.backend, device=str(scorer.device))
        if state.settings.sequence_ttl_seconds is not None:
            await _expire(state.worker, state.engine, state.settings.sequence_ttl_seconds)


async def _expire(worker: Worker, engine: Engine, seconds: float) -> None:
    while True:
        await asyncio.sleep(min(seconds / 10, 60))
        expired, _ = await worker.submit(lambda: engine.expire(seconds)).future
        if expired:
            _log.info("expired", sequences=expired)


async def _on_error(request: Request, error: Exception) -> Response:
    request_id = context_of(request.scope).request_id
    problem = _problem_of(request, error)
    if isinstance(error, IndexerError) and problem.status >= 500:
        _log.error("failed", request_id=request_id, exc_info=error)
    return problem.response(request_id)


def _problem_of(request: Request, error: Exception) -> ProblemError:
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, IndexerError):
        return of_error(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        argument = argument_name(first["loc"][1:])
        return invalid(argument, str(first["input"])[:100], first["msg"], "see /openapi.json")
    if isinstance(error, HTTPException) and error.status_code == 404:
        return ProblemError(404, "not-found", "no such path; see /openapi.json")
    if isinstance(error, HTTPException) and error.status_code == 405:
        headers = dict(error.headers or {})
        return ProblemError(405, "method-not-allowed", f"{request.method} is not for this path", headers)
    return internal()
