"""Connections of the web server: so many at a time, and each must send in time what it owes.

That is a request's head, and the rest of a body that was answered before it was complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from dataclasses import dataclass, field

import h11
import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from indexer.wire import PROBLEM
from server.metrics import Metrics
from server.problems import ProblemError, internal
from server.worker import Deadline, QueueSlot

_CROWDED = "connections"
"""The state of a request on a connection beyond the limit: how many there were."""
_CROWDED_SECONDS = 1.0
"""Time for the head of a request that is refused anyway."""
_log = structlog.get_logger("server")


def protocol_of(seconds: float, max_connections: int) -> type[H11Protocol]:
    """The web server's protocol within these limits.

    Args:
        seconds: time for a head, from the connection, or from its first bytes on a connection that is kept;
            and for the rest of a body, from the answer.
        max_connections: open connections; see :class:`ConnectionsLayer`.
    """
    members = {"owed_seconds": seconds, "max_connections": max_connections}
    return type("Protocol", (LimitedProtocol,), members)


class LimitedProtocol(H11Protocol):
    """Closes a connection whose next request's head does not end in time, however its bytes trickle in, or
    the rest of a body that was answered early: refused by its head, say.

    The web server itself waits without end for a head, before anything of this server, tokens included, sees
    the request, and for such a rest once a byte of it has come. A connection that waits between two requests
    is the web server's to close.
    """

    owed_seconds: float
    max_connections: int
    _timer: asyncio.TimerHandle | None = None
    _awaited: type[object] | None = None
    """What the timer runs for, see :meth:`_owed`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.app_state = {**self.app_state, _CROWDED: len(self.connections)}
            self.owed_seconds = min(self.owed_seconds, _CROWDED_SECONDS)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take bytes; stop to wait once they hold what was owed."""
        super().data_received(data)
        self._wait()

    def on_response_complete(self) -> None:
        """Begin to wait for the rest of a body that nobody will read."""
        super().on_response_complete()
        if self._owed() is h11.SEND_BODY:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to wait."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with a problem, as everything else, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = secrets.token_hex(8)
            _log.info("malformed", request_id=request_id)
            response = ProblemError(400, "malformed", f"{msg} Nothing was done").response(request_id)
            body = bytes(response.body)
            head = [("content-type", PROBLEM), ("content-length", str(len(body)))]
            head += [("x-request-id", request_id), ("connection", "close")]
            for event in (
                h11.Response(status_code=400, headers=head, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _owed(self) -> type[object] | None:
        """The peer's state if bytes are due from it: ``IDLE``, a head, or ``SEND_BODY``, an answered body."""
        state = self.conn.their_state
        answered = state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        return state if state is h11.IDLE or answered else None

    def _wait(self) -> None:
        owed = self._owed()
        if owed is self._awaited:
            return  # the time runs on, however many bytes came
        self._stop_waiting()
        if owed is not None and not self.transport.is_closing():
            self._awaited = owed
            self._timer = self.loop.call_later(self.owed_seconds, self._give_up)

    def _stop_waiting(self) -> None:
        self._awaited = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._owed() is self._awaited:
            self.transport.close()
        self._awaited = None


class ConnectionsLayer:
    """Refuses requests on connections beyond the limit and has them closed. Liveness is answered all the
    same: a crowded server must not be taken for a dead one.

    Args:
        app: what is inside.
        max_connections: the limit, for the answer.
    """

    def __init__(self, app: ASGIApp, max_connections: int) -> None:
        self._app = app
        self._max_connections = max_connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        crowd = scope.get("state", {}).get(_CROWDED)
        if crowd is None:
            await self._app(scope, receive, send)
            return

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if scope["path"] == "/healthz":
            await self._app(scope, receive, send_and_close)
            return
        raise ProblemError(
            503,
            "crowded",
            f"{crowd} connections are open, {self._max_connections} may be; nothing was done, try again "
            "after the time given",
            {"Retry-After": "1", "Connection": "close"},
            argument="max_connections",
            value=crowd,
            limit=self._max_connections,
        )


# The outermost layer of every request: its id, its log line, its metrics, and the end of its place.

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_PROBES = frozenset({"/healthz", "/readyz", "/metrics", "/v1/activity", "/v1/cache"})
"""Routes that are asked so often that their log lines would hide the others."""


@dataclass
class RequestContext:
    """What a request carries through the layers."""

    request_id: str
    deadline: Deadline
    """Until when its call must have begun."""
    owner: str = ""
    """Whose sequences it sees."""
    slot: QueueSlot | None = None
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
            if context.slot is not None:
                context.slot.release()
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


# Who may ask: bearer tokens, and without them only this machine.

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/openapi.json"})
"""Paths that show nothing of anyone's calls and need no token."""
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_SAME_SITE = frozenset({b"same-origin", b"none"})


def owner_of(token: str) -> str:
    """The name under which a token's sequences are kept: never the token itself."""
    return hashlib.sha256(token.encode()).hexdigest()


class AuthLayer:
    """Lets a request in and notes its owner.

    Without tokens the server is bound to loopback; then a page of another site, opened in a browser of this
    machine, must not reach it, neither directly nor through a name that resolves here.

    Args:
        app: what is inside.
        tokens: accepted tokens; none: no token is asked for.
        only_local: whether requests must name this machine as their host.
    """

    def __init__(self, app: ASGIApp, tokens: tuple[str, ...], only_local: bool) -> None:
        self._app = app
        self._owners = tuple(owner_of(token) for token in tokens)
        self._only_local = only_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._admit(scope)
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self._owners:
            owner = self._owner(headers.get(b"authorization", b""))
            if owner is None and scope["path"] not in OPEN_PATHS:
                raise ProblemError(
                    401,
                    "unauthorized",
                    "no valid token; send Authorization: Bearer TOKEN",
                    {"WWW-Authenticate": "Bearer"},
                    argument="Authorization",
                )
            context_of(scope).owner = owner or ""
        elif scope["path"] not in OPEN_PATHS and _is_of_another_site(headers):
            raise ProblemError(403, "forbidden-origin", "a page of another site may not use this server")
        elif self._only_local and not _is_this_machine(headers.get(b"host", b"")):
            raise ProblemError(
                403,
                "forbidden-origin",
                "the Host header does not name this machine; use localhost, or serve with a token",
                argument="Host",
            )

    def _owner(self, authorization: bytes) -> str | None:
        scheme, _, token = authorization.decode("latin-1").partition(" ")
        given = owner_of(token.strip())
        found = None
        for owner in self._owners:  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(owner, given):
                found = owner
        return found if scheme.lower() == "bearer" else None


def _is_of_another_site(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser says so. One that knows no Sec-Fetch-Site still sends Origin with whatever changes
    something; a page that another server of this machine serves is of another origin, too."""
    if headers.get(b"sec-fetch-site", b"none") not in _SAME_SITE:
        return True
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower()


def _is_this_machine(host: bytes) -> bool:
    """Whether a Host header has a name or address that can be no other machine's."""
    text = host.decode("latin-1").lower()
    name = text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0]
    return name in _LOOPBACK_NAMES or _is_loopback(name)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


# Receives a request's body within its limits: of bytes, of the server's memory, and of time.


async def read_body(request: Request, slot: QueueSlot, max_bytes: int) -> bytearray:
    """The whole body, received into one buffer.

    Args:
        request: whose body nobody has read.
        slot: what the body's bytes are counted on; its deadline is the body's.
        max_bytes: longest body.

    Raises:
        ProblemError: 413, longer than that, before any of it is read where ``Content-Length`` tells; 429, no
            memory for it now; 504, too slow; or the client went away.
    """
    stated = request.headers.get("content-length")
    length = int(stated) if stated is not None else None
    if length is not None:
        if length > max_bytes:
            raise _too_large(length, max_bytes)
        slot.reserve(length)
    try:
        return await asyncio.wait_for(_receive(request, slot, length, max_bytes), slot.deadline.left())
    except asyncio.TimeoutError as error:
        raise slot.deadline.problem(
            "the deadline passed before the body was here; nothing was done"
        ) from error


async def _receive(request: Request, slot: QueueSlot, length: int | None, max_bytes: int) -> bytearray:
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
            slot.reserve(len(chunk))
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
