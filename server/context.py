"""The outermost layer of every request: its id, its log line, its metrics, and the end of its place."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import dataclass, field

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.deadline import Deadline
from server.metrics import Metrics
from server.problems import ProblemError, internal
from server.worker import Place

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_PROBES = frozenset({"/healthz", "/readyz", "/metrics", "/v1/activity", "/v1/cache"})
"""Routes that are asked so often that their log lines would hide the others."""
_log = structlog.get_logger("server")


@dataclass
class RequestContext:
    """What a request carries through the layers."""

    request_id: str
    deadline: Deadline
    """Until when its call must have begun."""
    owner: str = ""
    """Whose sequences it sees."""
    place: Place | None = None
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage of its call."""


def context_of(scope: Scope) -> RequestContext:
    """The context of a request."""
    context: RequestContext = scope["state"]["context"]
    return context


class ContextLayer:
    """Wraps the application.

    Args:
        app: what is inside.
        metrics: where requests are counted.
        deadline_seconds: time a request has to reach the device.
        drain_seconds: time it has to end once the server is told to.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, deadline_seconds: float, drain_seconds: float) -> None:
        self._app = app
        self._metrics = metrics
        self._deadline_seconds = deadline_seconds
        self._drain_seconds = drain_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        context = RequestContext(_request_id(scope), Deadline(self._deadline_seconds))
        scope.setdefault("state", {})["context"] = context
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", context.request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            try:
                await self._app(scope, receive, send_with_id)
            except ProblemError as problem:
                if status:
                    raise
                await problem.response(context.request_id)(scope, receive, send_with_id)
            except asyncio.CancelledError:
                # The time to drain is over. Only the web server cancels requests, and this one ends here.
                if not status:
                    ended = ProblemError(
                        503,
                        "stopping",
                        "the server was shut down before the call ended",
                        argument="drain_seconds",
                        limit=self._drain_seconds,
                    )
                    await ended.response(context.request_id)(scope, receive, send_with_id)
            except Exception:
                _log.exception("failed", request_id=context.request_id, path=scope["path"])
                if status:
                    raise
                await internal().response(context.request_id)(scope, receive, send_with_id)
        finally:
            if context.place is not None:
                context.place.release()
            self._finish(scope, context, status, time.perf_counter() - began)

    def _finish(self, scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.request(route, scope["method"], status, seconds, context.stages)
        log = _log.debug if route in _PROBES else _log.info
        log(
            "request",
            request_id=context.request_id,
            method=scope["method"],
            path=scope["path"],
            status=status,
            seconds=round(seconds, 6),
            owner=context.owner[:8],
            **{f"{name}_seconds": round(value, 6) for name, value in context.stages.items()},
        )


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(given):
                return str(given)
    return secrets.token_hex(8)
