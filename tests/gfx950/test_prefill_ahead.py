"""Compiling ahead of time: ``nvfp4-indexer kernel compile`` fills a cache that later processes load from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kernel.backends.flydsl import toolchain
from kernel.errors import DeviceUnavailableError
from tests.support.process import printed_by

LAUNCH = """
from tests.gfx950.prefill import scored
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, oracle_scores
call = random_call([(150, 3)], 4)
assert_same_bits(scored(call)[0], oracle_scores(call))
"""


def test_a_compiled_kernel_runs_without_a_compiler(tmp_path: Path) -> None:
    """The command, in a process of its own; then a launch that may only load from the cache."""
    words = ("kernel", "compile", "--json", "--cache", tmp_path)
    result = json.loads(printed_by("-m", "client.cli", *words))
    assert result["kernels"][:6] == [
        f"score_{kind}_h{h}" for kind in ("prefill", "decode") for h in (1, 2, 4)
    ]
    assert result["cache"] == str(tmp_path)
    printed_by("-c", LAUNCH, FLYDSL_RUNTIME_RUN_ONLY="1", FLYDSL_RUNTIME_CACHE_DIR=str(tmp_path))


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYDSL_GPU_ARCH", "gfx942")
    with pytest.raises(DeviceUnavailableError, match="FLYDSL_GPU_ARCH=gfx942"):
        toolchain.prepare()


def test_compiling_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not COMPILE_ONLY: with it every later launch of the process would do nothing."""
    monkeypatch.delenv("COMPILE_ONLY", raising=False)
    monkeypatch.delenv("FLYDSL_RUNTIME_CACHE_DIR", raising=False)
    monkeypatch.setattr(toolchain, "SUPPORTED_HEADS", (4,))
    assert toolchain.compile_kernels(tmp_path)[:2] == ["score_prefill_h4", "score_decode_h4"]
    assert "COMPILE_ONLY" not in os.environ
    assert "FLYDSL_RUNTIME_CACHE_DIR" not in os.environ
    assert list(tmp_path.rglob("*.pkl"))
