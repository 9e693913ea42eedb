"""A connection of the web server that must send a whole request head in time."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol_of(seconds: float) -> type[H11Protocol]:
    """The web server's protocol with this time for a head.

    Args:
        seconds: counted from the connection, or from a head's first bytes on a connection that is kept.
    """
    return type("Protocol", (TimedHeadProtocol,), {"head_seconds": seconds})


class TimedHeadProtocol(H11Protocol):
    """Closes a connection whose next request's head does not end in time, however its bytes trickle in.

    The web server itself waits without end for a head, before anything of this server, tokens included, sees
    the request. A connection that waits between two requests is the web server's to close.
    """

    head_seconds: float
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; stop to wait once they hold a head."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._head_timer is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to wait."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()
