"""The HTTP layer around the application: connection limits and timeouts, request context, access, bodies.

The protocol class limits connections, and the time that a peer takes to send and to read. Every request then
passes one ASGI layer, :class:`RequestLayer`, which gives it an id and a deadline, refuses it on a connection
beyond the limit or without access, logs and counts it, and frees its queue slot.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote

import h11
import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from indexer.wire import PROBLEM
from server.metrics import Metrics
from server.problems import ProblemError, of_failure
from server.settings import Settings, is_loopback
from server.worker import Deadline, QueueSlot

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/openapi.json"})
"""Paths that show nothing of anyone's calls and need no token."""
_PROBES = frozenset({"/healthz", "/readyz", "/metrics", "/v1/activity", "/v1/cache"})
"""Routes polled so often that their log lines would hide the others."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_CROWDED = "connections"
"""Key in the state of a request on a connection beyond the limit: the number of connections."""
FURTHER_CONNECTIONS = 256
"""Connections beyond the limit that are told so; further ones are reset."""
_CROWDED_SECONDS = 1.0
"""Header timeout of a request that is refused anyway."""
_LOOK_SECONDS = 0.1
_ABORT = "abort"
"""Key in the state of a request: what aborts its connection."""
_SAME_SITE = frozenset({b"same-origin", b"none"})
_log = structlog.get_logger("server")


# ---- Connections ----


def protocol_of(
    seconds: float, max_connections: int, further_connections: int = FURTHER_CONNECTIONS
) -> type[H11Protocol]:
    """Returns the web server's protocol within these limits.

    Args:
        seconds: header timeout, from the connection, or from the first bytes on a connection that is kept
            alive; the timeout of the rest of a body, from the answer; and that of reading an answer.
        max_connections: open connections; requests on further ones are refused.
        further_connections: how many of those there may be; more are reset.
    """
    members = {
        "timeout_seconds": seconds,
        "max_connections": max_connections,
        "further_connections": further_connections,
    }
    return type("Protocol", (LimitedProtocol,), members)


class _StrictConnection(h11.Connection):
    """Refuses a request with two framings (RFC 9112, 6.1 and 6.3): a proxy may have gone by the other one."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("Transfer-Encoding beside Content-Length, or in HTTP/1.0")
        return event


class LimitedProtocol(H11Protocol):
    """Adds timeouts for a head, for the rest of a body that was answered early, and for reading an answer.

    uvicorn waits without end for all three, before tokens are checked, however slowly the bytes trickle. An
    idle connection between two requests is left to uvicorn's keep-alive timeout. The next of several
    pipelined requests is answered once the system has taken the whole answer before it. A peer that ends its
    side of the connection still gets the answers that it waits for.
    """

    timeout_seconds: float
    max_connections: int
    further_connections: int
    _timer: asyncio.TimerHandle | None = None
    _timed: type[object] | None = None
    """What the timer runs for, see :meth:`_due`."""
    _unread: asyncio.TimerHandle | None = None
    """Runs from when an answer first waits for its reader until all of it is taken."""
    _half_closed: bool = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the header timeout."""
        super().connection_made(transport)
        self.conn = _StrictConnection(h11.SERVER)
        transport.set_write_buffer_limits(high=0)  # writing is paused as long as any byte waits here
        self.app_state = {**self.app_state, _ABORT: self.abort}
        if len(self.connections) > self.max_connections + self.further_connections:
            self.abort()
        elif len(self.connections) > self.max_connections:
            self.app_state = {**self.app_state, _CROWDED: len(self.connections)}
            self.timeout_seconds = min(self.timeout_seconds, _CROWDED_SECONDS)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        """Stops the timer once the bytes complete what is due."""
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        """Starts the timeout of the rest of a body that nobody will read."""
        super().on_response_complete()
        self._update_unread()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()  # no further request had come before its end
        if self._due() is h11.SEND_BODY:
            self._update_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection of a peer that ended its side and waits for an answer."""
        self._half_closed = True
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        if self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version == b"1.1":
            # One that is gone altogether looks alike until something is sent; its system then says so.
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(event) or b"")
            self._look_for_peer()
        return True

    def _look_for_peer(self) -> None:
        connection: socket.socket = self.transport.get_extra_info("socket")
        if self.transport.is_closing():
            return
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_SECONDS, self._look_for_peer)

    def pause_writing(self) -> None:
        """Starts the timeout of an answer that waits for its reader."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.timeout_seconds, self._on_unread)

    def resume_writing(self) -> None:
        """Stops that timeout once the whole answer is taken."""
        super().resume_writing()
        self._update_unread()

    def abort(self) -> None:
        """Ends the connection, and drops what waits for its reader, in the system's buffer, too."""
        connection: socket.socket = self.transport.get_extra_info("socket")
        with suppress(OSError):  # it may have ended by itself
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        self._stop_timer()
        super().connection_lost(exc)
        self._stop_unread()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP with a problem, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = secrets.token_hex(8)
            _log.info("malformed", request_id=request_id)
            reason = str(sys.exc_info()[1] or msg)[:100]
            response = ProblemError(400, "malformed", f"{reason}; nothing was done").response(request_id)
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

    def _due(self) -> type[object] | None:
        """Returns the peer's state if bytes are due: ``IDLE``, a head, or ``SEND_BODY``, an answered body."""
        state = self.conn.their_state
        answered = state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        return state if state is h11.IDLE or answered else None

    def _update_timer(self) -> None:
        due = self._due()
        if due is self._timed:
            return  # the timer runs on, however many bytes came
        self._stop_timer()
        if due is not None and not self.transport.is_closing():
            self._timed = due
            self._timer = self.loop.call_later(self.timeout_seconds, self._on_timeout)

    def _stop_timer(self) -> None:
        self._timed = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _update_unread(self) -> None:
        if not self.flow.write_paused and self.conn.our_state is not h11.SEND_BODY:
            self._stop_unread()

    def _on_unread(self) -> None:
        _log.warning("answer not taken", seconds=self.timeout_seconds)
        self.abort()

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self._due() is self._timed:
            self.transport.close()
        self._timed = None


# ---- Requests ----


@dataclass(eq=False)
class RequestContext:
    """What a request carries to its route.

    Attributes:
        deadline: until when its call must have begun.
        owner: whose sequences it sees.
        slot: its slot of the admission queue.
        stages: seconds of each stage of its call.
    """

    request_id: str
    deadline: Deadline
    owner: str = ""
    slot: QueueSlot | None = None
    stages: dict[str, float] = field(default_factory=dict)


def context_of(scope: Scope) -> RequestContext:
    """Returns the context of a request."""
    context: RequestContext = scope["state"]["context"]
    return context


class _Replies:
    """Answers that wait for their readers. They hold no place in the queue, but memory: the oldest make room.

    Args:
        max_bytes: what they may take together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._sent: dict[RequestContext, tuple[int, Callable[[], None]]] = {}

    def add(self, context: RequestContext, message: Message, abort: Callable[[], None]) -> None:
        """Counts an answer that begins, and aborts the oldest ones beyond the limit."""
        lengths = [value for name, value in message.get("headers", ()) if name == b"content-length"]
        size = int(lengths[0]) if lengths else 0
        while self._sent and self._bytes + size > self._max_bytes:
            oldest = next(iter(self._sent))
            _log.warning("answer makes room", request_id=oldest.request_id)
            self._sent[oldest][1]()
            self.remove(oldest)
        self._sent[context] = size, abort
        self._bytes += size

    def remove(self, context: RequestContext) -> None:
        """Forgets an answer that ended."""
        self._bytes -= self._sent.pop(context, (0, None))[0]


class RequestLayer:
    """The one ASGI layer around the routes.

    Requests on connections beyond the limit are refused and the connection is closed. Liveness is answered
    all the same: a crowded server must not be taken for a dead one.

    Args:
        app: the application.
        settings: the server's.
        metrics: where requests are counted.
        access: who may ask.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics, access: Access) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._access = access
        self._replies = _Replies(settings.queue_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        method, scope = scope["method"], _served_as(scope)
        context = RequestContext(_request_id(scope), Deadline(self._settings.deadline_seconds))
        state = scope.setdefault("state", {})
        state["context"] = context
        added = [(b"x-request-id", context.request_id.encode())]
        if _CROWDED in state:
            added.append((b"connection", b"close"))
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if context.slot is not None:
                    context.slot.release()
                self._replies.add(context, message, state.get(_ABORT, lambda: None))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        try:
            try:
                if _CROWDED in state and scope["path"] != "/healthz":
                    raise self._crowded(state[_CROWDED])
                context.owner = self._access.owner(scope)
                await self._app(scope, receive, send_with_headers)
            except ProblemError as problem:
                if status:
                    raise
                await problem.response(context.request_id)(scope, receive, send_with_headers)
            except asyncio.CancelledError:
                # The time to drain is over: uvicorn cancels what is left.
                if not status:
                    ended = ProblemError(
                        503,
                        "stopping",
                        "the server was shut down before the call ended",
                        argument="drain_seconds",
                        limit=self._settings.drain_seconds,
                    )
                    await ended.response(context.request_id)(scope, receive, send_with_headers)
            except Exception as error:
                _log.exception("failed", request_id=context.request_id, path=scope["path"])
                if status:
                    raise
                await of_failure(error).response(context.request_id)(scope, receive, send_with_headers)
        finally:
            self._replies.remove(context)
            if context.slot is not None:
                context.slot.release()
            self._finish(method, scope, context, status, time.perf_counter() - began)

    def _crowded(self, connections: int) -> ProblemError:
        limit = self._settings.max_connections
        return ProblemError(
            503,
            "crowded",
            f"{connections} connections are open, {limit} may be; nothing was done, try again after the time "
            "given",
            {"Retry-After": "1"},
            argument="max_connections",
            value=connections,
            limit=limit,
        )

    def _finish(
        self, method: str, scope: Scope, context: RequestContext, status: int, seconds: float
    ) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.request(route, method, status, seconds, context.stages)
        log = _log.debug if route in _PROBES else _log.info
        log(
            "request",
            request_id=context.request_id,
            method=method,
            path=scope["path"],
            status=status,
            seconds=round(seconds, 6),
            owner=context.owner[:8],
            **{f"{name}_seconds": round(value, 6) for name, value in context.stages.items()},
        )


def _served_as(scope: Scope) -> Scope:
    """Returns what is served for a request: GET for HEAD, whose body the web server leaves out, and for a
    target in absolute form its path and host (RFC 9112, 3.2.2)."""
    served = {**scope, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
    scheme, found, rest = (scope.get("raw_path") or b"").partition(b"://")
    if found and scheme.lower() in (b"http", b"https"):
        host, slash, path = rest.partition(b"/")
        served["raw_path"] = b"/" + path if slash else b"/"
        served["path"] = unquote(served["raw_path"].decode("ascii"))
        served["headers"] = [(b"host", host), *(pair for pair in scope["headers"] if pair[0] != b"host")]
    return served


def _request_id(scope: Scope) -> str:
    given = (value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id")
    return next(filter(_REQUEST_ID.fullmatch, given), None) or secrets.token_hex(8)


# ---- Access ----


def owner_of(token: str) -> str:
    """Returns the name under which a token's sequences are kept: never the token itself."""
    return hashlib.sha256(token.encode()).hexdigest()


class Access:
    """Who may ask: bearer tokens, and without them only this machine.

    Without tokens the server is bound to loopback; then a page of another site, opened in a browser of this
    machine, must not reach it, neither directly nor through a name that resolves here.

    Args:
        settings: the server's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._owners = tuple(map(owner_of, settings.all_tokens()))
        self._warn_of_readers()
        self._only_local = is_loopback(settings.host)

    @property
    def num_owners(self) -> int:
        """Number of tokens."""
        return len(set(self._owners))

    def reread(self) -> list[str]:
        """Takes the tokens that the token file holds now; a file that cannot be used changes nothing.

        Returns:
            The owners whose tokens are gone.
        """
        try:
            self._settings = self._settings.with_tokens_reread()
        except (OSError, ValueError) as error:
            _log.error("tokens not reread", reason=str(error), remedy="mend the file and send SIGHUP again")
            return []
        before, self._owners = self._owners, tuple(map(owner_of, self._settings.all_tokens()))
        revoked = [owner for owner in before if owner not in self._owners]
        self._warn_of_readers()
        _log.info("tokens reread", tokens=len(self._owners), revoked=len(revoked))
        return revoked

    def _warn_of_readers(self) -> None:
        file = self._settings.token_file
        if file is not None and file.exists() and file.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            _log.warning("every user can read or write the tokens", file=str(file), remedy="chmod 600")

    def owner(self, scope: Scope) -> str:
        """Returns the owner that a request's token stands for; empty without one.

        Raises:
            ProblemError: 401 or 403, the request has no access.
        """
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            headers[name] = headers[name] + b", " + value if name in headers else value
        is_open = scope["path"] in OPEN_PATHS
        if self._owners:
            owner = self._owner(headers.get(b"authorization", b""))
            if owner is None and not is_open:
                raise ProblemError(
                    401,
                    "unauthorized",
                    "no valid token; send Authorization: Bearer TOKEN",
                    {"WWW-Authenticate": "Bearer"},
                    argument="Authorization",
                )
            return owner or ""
        if not is_open and _is_of_another_site(headers):
            raise ProblemError(403, "forbidden-origin", "a page of another site may not use this server")
        if self._only_local and not _is_this_machine(headers.get(b"host", b"")):
            raise ProblemError(
                403,
                "forbidden-origin",
                "the Host header does not name this machine; use localhost, or serve with a token",
                argument="Host",
            )
        return ""

    def _owner(self, authorization: bytes) -> str | None:
        scheme, _, token = authorization.decode("latin-1").partition(" ")
        given = owner_of(token.strip())
        found = None
        for owner in self._owners:  # all of them: constant time
            if hmac.compare_digest(owner, given):
                found = owner
        return found if scheme.lower() == "bearer" else None


def _is_of_another_site(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser says so. A browser without Sec-Fetch-Site still sends Origin with what changes state;
    a page from another server of this machine has another origin, too."""
    if headers.get(b"sec-fetch-site", b"none") not in _SAME_SITE:
        return True
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower()


def _is_this_machine(host: bytes) -> bool:
    """Whether a Host header names the loopback."""
    text = host.decode("latin-1").lower()
    name = text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0]
    return is_loopback(name)


# ---- Bodies ----


async def read_body(request: Request, slot: QueueSlot, max_bytes: int) -> bytearray:
    """Receives the whole body into one buffer.

    Args:
        request: its body was not read.
        slot: the request's; it counts the body's bytes, and its deadline is the body's.
        max_bytes: length limit.

    Raises:
        ProblemError: 413, too long, before any of it is read if it has a ``Content-Length``; 429, no memory
            for it now; 504, too slow; or the client disconnected.
    """
    length = int(request.headers.get("content-length", "0"))
    if length > max_bytes:
        raise _too_large(length, max_bytes)
    slot.check_room(length)
    try:
        return await asyncio.wait_for(_receive(request, slot, max_bytes), slot.deadline.left())
    except asyncio.TimeoutError as error:
        raise slot.deadline.problem(
            "the deadline passed before the body was here; nothing was done"
        ) from error


async def _receive(request: Request, slot: QueueSlot, max_bytes: int) -> bytearray:
    body = bytearray()  # grows as bytes arrive: a length that is only announced costs nothing
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ProblemError(499, "disconnected", "the client went away before its body was here")
        chunk = message.get("body", b"")
        if len(body) + len(chunk) > max_bytes:
            raise _too_large(len(body) + len(chunk), max_bytes)
        slot.reserve(len(chunk))
        body += chunk
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
