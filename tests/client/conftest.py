"""What several test files share: a live server that nothing special is needed of, and a wrong case."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from client import Client
from tests.support.live_server import LiveServer
from tests.support.process import wrong_expectation

NUM_PAGES = 64
MAX_BODY_BYTES = 4 << 20
TOKEN, OTHER_TOKEN = (f"token-of-{name}" for name in ("this-test", "another-test"))


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """A server with two tokens."""
    flags = ("--backend=cpu", f"--num-pages={NUM_PAGES}", f"--max-body-bytes={MAX_BODY_BYTES}")
    tokens = {"NVFP4_INDEXER_TOKENS": f"{TOKEN},{OTHER_TOKEN}"}
    with LiveServer(*flags, environment=tokens, forked=True) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    """A client of it, whose sequences are gone afterwards."""
    with Client(server.url, token=TOKEN) as found:
        yield found
        for sequence in found.cache().sequences:
            found.free_sequence(sequence.id)


@pytest.fixture
def wrong_case(tmp_path: Path) -> Path:
    """A case whose expected ids are wrong in one row."""
    return wrong_expectation(tmp_path)
