"""The application: routes, layers, and the life of the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import cast

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from kernel.errors import IndexerError
from server.engine import Engine, ServerState, prepared_engine
from server.http import AuthLayer, ConnectionsLayer, ContextLayer, context_of
from server.metrics import Metrics
from server.openapi import openapi_document
from server.problems import ProblemError, internal, invalid, of_error
from server.routes import router
from server.settings import Settings
from server.wire import argument_name
from server.worker import Worker

_LAST_CALL_SECONDS = 5.0
_log = structlog.get_logger("server")


def new_state(settings: Settings) -> ServerState:
    """The state of a server with these settings that was not started."""
    return ServerState(settings, Worker(settings.queue_places, settings.queue_bytes), Metrics())


def create_app(state: ServerState) -> ASGIApp:
    """The ASGI application of one server.

    Args:
        state: of :func:`new_state`.
    """
    settings = state.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.worker.start()
        background = asyncio.create_task(_prepare(state))
        yield
        background.cancel()
        _log.info("draining", waiting=state.worker.waiting)
        # Requests had their time before this; only a call whose client is gone can still run.
        ended = await state.worker.stop(_LAST_CALL_SECONDS)
        _log.info("stopped", device_idle=ended)

    app = FastAPI(title="nvfp4-indexer", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = state
    app.include_router(router)
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(IndexerError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.openapi = cache(lambda: openapi_document(app))  # type: ignore[method-assign]
    tokens = settings.all_tokens()
    secured = AuthLayer(app, tokens, only_local=settings.is_loopback and not tokens)
    open_to_some = ConnectionsLayer(secured, settings.max_connections)
    return ContextLayer(open_to_some, state.metrics, settings.deadline_seconds, settings.drain_seconds)


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


async def _on_problem(request: Request, error: Exception) -> Response:
    return cast("ProblemError", error).response(context_of(request.scope).request_id)


async def _on_error(request: Request, error: Exception) -> Response:
    problem = of_error(cast("IndexerError", error))
    if problem.status >= 500:
        _log.error("failed", request_id=context_of(request.scope).request_id, exc_info=error)
    return await _on_problem(request, problem)


async def _on_validation(request: Request, error: Exception) -> Response:
    first = cast("RequestValidationError", error).errors()[0]
    argument = argument_name(first["loc"][1:])
    return await _on_problem(
        request, invalid(argument, str(first["input"])[:100], first["msg"], "see /openapi.json")
    )


async def _on_http(request: Request, error: Exception) -> Response:
    found = cast("HTTPException", error)
    if found.status_code == 404:
        problem = ProblemError(404, "not-found", "no such path; see /openapi.json")
    elif found.status_code == 405:
        headers = dict(found.headers or {})
        problem = ProblemError(405, "method-not-allowed", f"{request.method} is not for this path", headers)
    else:
        problem = internal()
    return await _on_problem(request, problem)
