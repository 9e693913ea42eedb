"""What the command does in a sidecar. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from client.sync_client import Client


@contextmanager
def remote_client(url: str, token: str | None, backend: str, precision: str) -> Iterator[Client]:
    """A client of the sidecar that a command names.

    Args:
        url: the sidecar's root.
        token: its token.
        backend: the command's ``--backend``, which the sidecar chose when it started.
        precision: the command's ``--precision``, likewise.

    Raises:
        InvalidArgumentError: a backend or precision is asked for, too, or the URL cannot be used.
    """
    from client.sync_client import Client

    for option, value, default in (("--backend", backend, "auto"), ("--precision", precision, "exact")):
        if value != default:
            raise InvalidArgumentError(
                option, value, "the sidecar chose its own", f"leave out {option}, or --url"
            )
    with Client(url, token=token or None) as client:
        yield client
