"""What importing the package loads."""

from __future__ import annotations

import pytest

import indexer
from kernel.backends import registry
from tests.support.process import printed_by


def test_reading_a_case_file_needs_no_torch() -> None:
    code = (
        "import sys, kernel.errors, kernel.contract, indexer, indexer.case; sys.exit('torch' in sys.modules)"
    )
    printed_by("-c", code)


def test_every_public_name_is_there() -> None:
    assert set(indexer.__all__) <= set(dir(indexer))
    for name in indexer.__all__:
        assert getattr(indexer, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Scorer'"):
        indexer.Scorer  # noqa: B018


def test_only_the_flydsl_backends_import_flydsl_and_set_its_environment() -> None:
    """Neither asking which backends there are nor using the default one changes the process."""
    if registry.resolve("auto") == "flydsl":
        pytest.skip("on a gfx950 the default backend is flydsl")
    code = """
import os, sys
before = dict(os.environ)
from indexer import IndexScorer, IndexerConfig
from kernel.backends import registry
for ask in (registry.statuses, lambda: IndexScorer(IndexerConfig(num_index_heads=1, num_pages=1))):
    ask()
    loaded = sorted(name for name in sys.modules if name.split(".")[0] == "flydsl")
    maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
    assert not loaded, loaded
    assert "libamdhip64" not in maps and "libfly" not in maps
    assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
"""
    printed_by("-c", code)


def test_help_imports_no_http_client() -> None:
    printed_by("-c", "import sys, client, client.cli; sys.exit('httpx' in sys.modules)")


def test_the_trace_of_a_profile_imports_nothing_large() -> None:
    """A sidecar would answer nobody meanwhile: torch.profiler brings Inductor, some 800 modules."""
    code = """
import sys
from indexer import IndexerConfig, IndexScorer
from indexer.case import read_case
from indexer.profile import profile_case
from indexer.replay import CaseScorer
scorer = CaseScorer(IndexScorer(IndexerConfig(num_index_heads=4, num_pages=1, backend="cpu")))
trace = profile_case(scorer, read_case("tests/data/ragged_l15_cut.safetensors"), repeats=1, trace=True).trace
assert any(event["name"] == "aten::mm" for event in trace["traceEvents"])
assert "torch._inductor" not in sys.modules
"""
    printed_by("-c", code)
