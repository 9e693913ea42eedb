"""How a client reaches its server: checked URL, headers, timeouts. Shared by both clients."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import httpx

from kernel.errors import InvalidArgumentError

DEFAULT_URL = "http://127.0.0.1:8421"
"""Where a server listens that was told nothing else."""
DEFAULT_TIMEOUT = 60.0
"""Seconds without any progress after which a call is given up."""
DEFAULT_RETRY_SECONDS = 30.0
"""Most seconds that a call waits for a busy server."""
CONNECT_SECONDS = 5.0
"""Seconds to connect."""
_MAX_PORT = 65535


@dataclass(frozen=True, repr=False)
class Connection:
    """Where to, as whom, and for how long.

    Args:
        url: the server's root, ``http`` or ``https``; a path is the prefix that a proxy serves it under.
        token: bearer token.
        timeout: seconds without any progress after which a call is given up.
        retry_seconds: most seconds that a call waits for a busy server; 0: it is asked once.

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
        """Refuse to use a client that was closed.

        Raises:
            InvalidArgumentError: it was.
        """
        if closed:
            limit = "must be open: close() and the end of a with block end it"
            raise InvalidArgumentError("client", "closed", limit, "make another one")

    def options(self) -> dict[str, Any]:
        """Arguments of an httpx client."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "nvfp4-indexer"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        return {
            "base_url": self.url,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout, connect=min(CONNECT_SECONDS, self.timeout)),
            "follow_redirects": False,  # a token goes nowhere but where it was meant for
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
