"""The sidecar's clients and the ``nvfp4-indexer`` command. Nothing here imports torch before it is needed.

The public names are imported on first use, so that the command's help is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from client.client import AsyncClient, Client
    from client.errors import (
        AuthError,
        BadReplyError,
        BusyError,
        DeadlineError,
        LengthConflictError,
        NotReadyError,
        ServerConnectionError,
        ServerError,
        ServerTimeoutError,
        TooManyKeysError,
        TooManySequencesError,
    )

__all__ = [
    "AsyncClient",
    "AuthError",
    "BadReplyError",
    "BusyError",
    "Client",
    "DeadlineError",
    "LengthConflictError",
    "NotReadyError",
    "ServerConnectionError",
    "ServerError",
    "ServerTimeoutError",
    "TooManyKeysError",
    "TooManySequencesError",
]

_MODULES = {
    **dict.fromkeys(__all__, "client.errors"),
    "AsyncClient": "client.client",
    "Client": "client.client",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
