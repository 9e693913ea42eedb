"""When a call is sent again, and after how long. No I/O: both clients follow it."""

from __future__ import annotations

import json
import random
from typing import Generic, TypeVar

import httpx

from client.call import Call, Reply
from client.errors import BusyError, NotReadyError, ServerConnectionError, ServerTimeoutError
from client.problem import error_of
from kernel.errors import IndexerError

T = TypeVar("T")

MAX_RESENT = 3
"""Times that a call is sent again after a lost answer: a server that drops connections may well have done its
work each time."""
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0
"""Seconds: the least wait doubles from one to the other, whatever the server hints."""
_JITTER = 0.25
"""Part of a wait by which it may be longer, so that clients that were refused together come back apart."""


class Tries(Generic[T]):
    """The attempts at one call.

    Refusals that say that nothing was done (429, 503; of a proxy with Retry-After) are waited out, as long
    as the server hints, for any call. A lost answer (the connection broke after the request was sent) leaves
    open whether the call was executed, so it is sent again only if that does no harm, and only
    :data:`MAX_RESENT` times. Nothing else is tried again.

    Args:
        call: the call.
        seconds: most time to spend waiting between attempts.
    """

    def __init__(self, call: Call[T], seconds: float) -> None:
        self._call = call
        self._left = seconds
        self._attempts = 0
        self._lost = 0
        self._results: list[T] = []

    @property
    def result(self) -> T:
        """The result, once :meth:`take` returned None."""
        return self._results[0]

    def take(self, outcome: Reply | httpx.TransportError) -> float | None:
        """Judge an attempt: None if there is a result, else the seconds to wait before the next one.

        Raises:
            IndexerError: the call failed.
        """
        self._attempts += 1
        if isinstance(outcome, httpx.TransportError):
            return self._broken(outcome)
        if 200 <= outcome.status < 300:
            self._results.append(self._call.parse(outcome.body))
            return None
        error = error_of(outcome.status, outcome.headers, outcome.body)
        if isinstance(error, (BusyError, NotReadyError)):
            return self._wait(_hint(outcome), error)
        if self._lost:
            self._results.append(self._call.after_lost(error))
            return None
        raise error

    def _broken(self, cause: httpx.TransportError) -> float:
        reason = str(cause) or type(cause).__name__
        if isinstance(cause, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)):
            raise ServerConnectionError(f"the server cannot be reached: {reason}") from cause
        if isinstance(cause, (httpx.NetworkError, httpx.RemoteProtocolError)):
            error = ServerConnectionError(f"the connection broke: {reason}; {self._executed()}")
            error.__cause__ = cause
            self._lost += 1
            if self._call.repeatable and self._lost <= MAX_RESENT:
                return self._wait(0.0, error)
            raise error
        if isinstance(cause, httpx.TimeoutException):
            raise ServerTimeoutError(f"no answer in time; {self._executed()}") from cause
        raise ServerConnectionError(f"the request was not sent: {reason}") from cause

    def _executed(self) -> str:
        changes = "" if self._call.repeatable else ", look at the server's state before sending it again"
        return f"the call may have been executed{changes}"

    def _wait(self, hint: float, error: IndexerError) -> float:
        least = min(_LONGEST_WAIT, _FIRST_WAIT * float(2 ** (self._attempts - 1)))
        wait = max(hint, least) * (1 + _JITTER * random.random())  # noqa: S311 - not a secret
        if wait > self._left:
            raise error
        self._left -= wait
        return wait


def _hint(reply: Reply) -> float:
    """Seconds that a refusal asks to wait: its body's number, which is finer than the header's."""
    try:
        hint = json.loads(reply.body)["retry_after_seconds"]
    except (ValueError, KeyError, TypeError):
        hint = reply.headers.get("retry-after", "0")
    try:
        return max(0.0, float(hint))
    except (TypeError, ValueError):
        return 0.0
