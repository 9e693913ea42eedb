"""Connections of the web server: so many at a time, and each must send in time what it owes.

That is a request's head, and the rest of a body that was answered before it was complete.
"""

from __future__ import annotations

import asyncio
import secrets

import h11
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.problems import MEDIA_TYPE, ProblemError

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
            head = [("content-type", MEDIA_TYPE), ("content-length", str(len(body)))]
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
