"""The ASGI application of one server: routes, error handlers, and the life of its worker."""

from __future__ import annotations

import asyncio
import errno
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from kernel.errors import IndexerError
from server.engine import Engine, ServerState, prepared_engine
from server.http import Access, RequestLayer, context_of
from server.metrics import Metrics
from server.openapi import openapi_document
from server.problems import ProblemError, invalid, of_error, of_failure
from server.routes import ROUTERS
from server.settings import Settings
from server.wire import argument_name
from server.worker import Worker

_LAST_CALL_SECONDS = 5.0
"""Time for a call whose client is gone to end at shutdown."""
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_REPORT_SECONDS = 10.0
_last_report: dict[int, float] = {}
_log = structlog.get_logger("server")


def new_state(settings: Settings) -> ServerState:
    """Returns the state of a server with these settings, not started."""
    return ServerState(settings, Worker(settings.queue_places, settings.queue_bytes), Metrics())


def create_app(state: ServerState) -> ASGIApp:
    """Builds the ASGI application of a server from the state that :func:`new_state` returned."""

    access = Access(state.settings)
    state.worker.shared = access.num_owners > 1

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.worker.start()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_on_loop_error)
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGHUP, reread_tokens)
        background = asyncio.create_task(_prepare(state))
        yield
        background.cancel()
        _log.info("draining", waiting=state.worker.waiting)
        ended = await state.worker.stop(_LAST_CALL_SECONDS)
        _log.info("stopped", device_idle=ended)

    def reread_tokens() -> None:
        revoked, engine = access.reread(), state.engine
        state.worker.shared = access.num_owners > 1
        if revoked and engine is not None:
            state.worker.submit(lambda: engine.forget(revoked))

    app = FastAPI(
        title="nvfp4-indexer", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.server = state
    for router in ROUTERS:
        app.include_router(router)
    for kind in (ProblemError, IndexerError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    # Within starlette's own answer to errors, which is plain text and ends the connection.
    app.add_middleware(RequestLayer, settings=state.settings, metrics=state.metrics, access=access)
    app.openapi = cache(lambda: openapi_document(app))  # type: ignore[method-assign]
    return app


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs what no request caused. asyncio reports a lack of files once for each connection that waits."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        if loop.time() - _last_report.get(error.errno, -_REPORT_SECONDS) >= _REPORT_SECONDS:
            _last_report[error.errno] = loop.time()
            _log.error(
                "no connection can be accepted",
                reason=error.strerror,
                remedy="raise the system's limit of it",
            )
    else:
        loop.default_exception_handler(context)


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
        try:
            # A call that waits, or whose body is on its way, may name a sequence that nobody else uses.
            job = worker.submit(lambda: engine.expire(worker.oldest_arrival - seconds))
            expired, _ = await job.future
        except Exception:
            _log.exception("sequences could not be expired", remedy="tried again later")
        else:
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
        headers["Allow"] = headers.get("Allow", "").replace("GET", "GET, HEAD")
        return ProblemError(405, "method-not-allowed", f"{request.method} is not for this path", headers)
    return of_failure(error)
