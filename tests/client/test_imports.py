"""Remote work needs no torch, and asking for help needs no httpx either."""

from __future__ import annotations

import pytest

from tests.client.conftest import TOKEN
from tests.support.live_server import LiveServer
from tests.support.process import printed_by
from tests.support.real_cases import CUT

USE = """
import sys
import numpy as np
from client import AsyncClient, Client
from indexer.case import read_case

with Client(sys.argv[1], token=sys.argv[2]) as client:
    sequence = client.add_sequence()
    client.append_keys(sequence, np.ones((200, 128), np.float32))
    assert client.score(np.ones((2, 4, 128), np.float32), [sequence]).scores.shape == (4, 2, 2)
    client.free_sequence(sequence)
    assert client.score_case(read_case(sys.argv[3])).block_ids.shape == (4, 27, 3)
    client.profile(read_case(sys.argv[3]), repeats=1)
    client.info(), client.cache(), client.ready(), client.health()
assert "torch" not in sys.modules
"""
COMMAND = """
import sys
from client.cli import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end.code
assert "torch" not in sys.modules
"""


def test_a_client_imports_no_torch(server: LiveServer) -> None:
    printed_by("-c", USE, server.url, TOKEN, CUT)


@pytest.mark.parametrize("words", [["score"], ["profile", "--repeats=1"], ["bench", "--seconds=0.1"]])
def test_remote_commands_import_no_torch(words: list[str], server: LiveServer) -> None:
    assert printed_by("-c", COMMAND, *words, CUT, "--url", server.url, "--token", TOKEN)


def test_help_imports_no_http_client() -> None:
    printed_by("-c", "import sys, client, client.cli; sys.exit('httpx' in sys.modules)")
