"""One live server for the tests that need nothing special of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.live_server import LiveServer

NUM_PAGES = 64
MAX_BODY_BYTES = 4 << 20
FLAGS = (
    "--backend=cpu",
    f"--num-pages={NUM_PAGES}",
    f"--max-body-bytes={MAX_BODY_BYTES}",
    "--max-json-bytes=262144",
    "--max-call-bytes=67108864",
)


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """A server without tokens."""
    with LiveServer(*FLAGS, forked=True) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    """A client of it, and none of the sequences that earlier tests left."""
    with server.client() as found:
        for sequence in found.get("/v1/cache").json()["sequences"]:
            found.delete(f"/v1/sequences/{sequence['id']}")
        yield found
