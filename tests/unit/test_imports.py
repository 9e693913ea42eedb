"""What importing the package loads."""

from __future__ import annotations

import pytest

import indexer
from kernel.backends import registry
from tests.client.conftest import TOKEN
from tests.support.cases import CUT
from tests.support.live_server import LiveServer
from tests.support.process import printed_by


@pytest.mark.parametrize("module", ["indexer", "indexer.case", "kernel.errors", "kernel.contract"])
def test_reading_a_case_file_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    printed_by("-c", code)


def test_every_public_name_is_there() -> None:
    assert set(indexer.__all__) <= set(dir(indexer))
    for name in indexer.__all__:
        assert getattr(indexer, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Scorer'"):
        indexer.Scorer  # noqa: B018


ASKED = {
    "auto": "scorer = IndexScorer(IndexerConfig(num_index_heads=1, num_pages=1))",
    "statuses": "registry.statuses()",
}


@pytest.mark.parametrize("asked", ASKED)
def test_only_the_flydsl_backends_import_flydsl_and_set_its_environment(asked: str) -> None:
    """Neither asking which backends there are nor using the default one changes the process."""
    if registry.resolve("auto") == "flydsl":
        pytest.skip("on a gfx950 the default backend is flydsl")
    code = f"""
import os, sys
before = dict(os.environ)
from indexer import IndexScorer, IndexerConfig
from kernel.backends import registry
{ASKED[asked]}
loaded = sorted(name for name in sys.modules if name.split(".")[0] == "flydsl")
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
assert not loaded, loaded
assert "libamdhip64" not in maps and "libfly" not in maps
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
"""
    printed_by("-c", code)


# Remote work needs no torch, and asking for help needs no httpx either.

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
