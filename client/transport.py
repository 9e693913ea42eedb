"""What both clients share apart from I/O: the checked connection settings, and the retry policy."""

from __future__ import annotations

import ipaddress
import json
import math
import random
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, TypeVar

import httpx

from client.calls import Call, Reply
from client.errors import BusyError, NotReadyError, ServerConnectionError, ServerTimeoutError, error_of
from kernel.errors import IndexerError, InvalidArgumentError

DEFAULT_URL = "http://127.0.0.1:8421"
"""Where a server listens by default."""
DEFAULT_TIMEOUT = 60.0
"""Seconds without progress after which a call fails."""
DEFAULT_RETRY_SECONDS = 30.0
"""Longest time that a call waits for a busy server, seconds."""
CONNECT_SECONDS = 5.0
"""Seconds to connect."""
MAX_RESENT = 3
"""Times that a call is resent after a lost answer: a server that drops connections may have executed it each
time."""
_MAX_PORT = 65535
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0
"""Bounds of the exponential backoff, seconds, whatever the server hints."""
_JITTER = 0.25
"""Largest random part added to a wait, so that clients refused together come back apart."""

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Connection:
    """URL, token and timeouts of a client, checked.

    Args:
        url: the server's root, ``http`` or ``https``; a path is the prefix that a proxy serves it under.
        token: bearer token.
        timeout: seconds without progress after which a call fails.
        retry_seconds: longest time that a call waits for a busy server; 0: no retries.

    Raises:
        InvalidArgumentError: one of them cannot be used.
    """

    url: str
    token: str | None
    timeout: float
    retry_seconds: float

    def __post_init__(self) -> None:
        for name, least in (("timeout", "above 0"), ("retry_seconds", "0 or more")):
            value = getattr(self, name)
            if (
                not isinstance(value, Real)
                or isinstance(value, bool)
                or not math.isfinite(value)
                or value < 0
                or (name == "timeout" and value == 0)
            ):
                raise InvalidArgumentError(
                    name, repr(value)[:60], f"must be {least} and finite", "give seconds"
                )
        url = self._parsed()
        problem = None
        if url.scheme not in ("http", "https") or not url.host:
            problem = "must be http://HOST:PORT or https://HOST"
        elif url.userinfo or url.query or url.fragment:
            problem = "must have no user, query or fragment"
        elif url.port is not None and not 1 <= url.port <= _MAX_PORT:
            problem = f"must have a port of 1 to {_MAX_PORT}"
        if problem:
            shown = str(url.copy_with(userinfo=None)) if url.host else self.url
            raise InvalidArgumentError("url", shown, problem, "give the server's root, and the token apart")
        token = self.token
        if token is not None and not (
            isinstance(token, str) and token and token.isascii() and token.isprintable() and " " not in token
        ):
            raise InvalidArgumentError(
                "token",
                "(not shown)",
                "must be a str of printable ASCII without spaces",
                "pass the server's token",
            )

    @staticmethod
    def check_open(closed: bool) -> None:
        """Refuses the use of a closed client.

        Raises:
            InvalidArgumentError: it is closed.
        """
        if closed:
            limit = "must be open: close() and the end of a with block end it"
            raise InvalidArgumentError("client", "closed", limit, "make another one")

    def options(self) -> dict[str, Any]:
        """Returns the arguments of an httpx client."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "nvfp4-indexer"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        return {
            "base_url": self.url,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout, connect=min(CONNECT_SECONDS, self.timeout)),
            "follow_redirects": False,  # the token goes to no other host
            "trust_env": not self._is_loopback,  # no proxy can reach this machine's loopback
        }

    @property
    def _is_loopback(self) -> bool:
        host = self._parsed().host
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def _parsed(self) -> httpx.URL:
        try:
            return httpx.URL(self.url)
        except (httpx.InvalidURL, TypeError) as error:
            raise InvalidArgumentError(
                "url", repr(self.url)[:100], f"must be a URL ({error})", "give the server's root"
            ) from error


class RetryPolicy(Generic[T]):
    """Decides after each attempt at a call: result, error, or another attempt. No I/O.

    Refusals without effect (429, 503; from a proxy with Retry-After) are retried after the time that the
    server hints, for any call. After a lost answer (the connection broke once the request was sent) a call
    may have been executed: only a repeatable one is resent, at most :data:`MAX_RESENT` times. Nothing else is
    retried.

    Args:
        call: the call.
        seconds: longest time to wait between attempts, all of them together.
    """

    def __init__(self, call: Call[T], seconds: float) -> None:
        self._call = call
        self._left = seconds
        self._attempts = 0
        self._lost = 0
        self._results: list[T] = []

    @property
    def result(self) -> T:
        """The result, once :meth:`wait_after` returned None."""
        return self._results[0]

    def wait_after(self, outcome: Reply | httpx.TransportError) -> float | None:
        """Returns the seconds to wait before the next attempt, or None if this one gave the result.

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
    """Returns the wait that a refusal hints, seconds; its body is finer than its header."""
    try:
        hint = json.loads(reply.body)["retry_after_seconds"]
    except (ValueError, KeyError, TypeError):
        hint = reply.headers.get("retry-after", "0")
    try:
        return max(0.0, float(hint))
    except (TypeError, ValueError):
        return 0.0
