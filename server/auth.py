"""Who may ask: bearer tokens, and without them only this machine."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from server.context import context_of
from server.problems import ProblemError

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
