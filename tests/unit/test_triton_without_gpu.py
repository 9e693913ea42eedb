"""What can be told of the Triton kernels without a GPU: their logic, interpreted, and that they compile."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kernel.backends import registry
from tests.support.process import printed_by

BESIDE = Path(sys.prefix) / "triton"
"""Where the Makefile puts the Triton of requirements-triton.lock, and a numpy that its interpreter takes."""
IS_BESIDE = (BESIDE / "triton").is_dir()

needs_triton = pytest.mark.skipif(
    not IS_BESIDE and importlib.util.find_spec("triton") is None,
    reason=f"the package triton is neither installed nor in {BESIDE}, where `make test` puts it",
)


def run_module(module: str, *words: str, **environment: str) -> str:
    """Run a module of the tests in a process of its own, with the Triton beside; return what it printed."""
    if IS_BESIDE:
        paths = [str(BESIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return printed_by("-m", module, *words, **environment)


def test_the_registry_says_why_it_cannot_run() -> None:
    """Without the package or a GPU the backend is not usable, and the reason is named."""
    status = registry.status("triton")
    if not status.usable:
        assert status.reason in ("the package triton is not installed", "torch sees no GPU")


@needs_triton
@pytest.mark.skipif(
    not IS_BESIDE and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4),
    reason="Triton 3.6's interpreter makes ints of arrays of one value, which numpy 2.4 and newer refuse",
)
def test_interpreted_kernels_agree_with_the_oracle() -> None:
    """Insert, both scorers, both top-k kernels and the selection."""
    output = run_module("tests.support.interpreted", TRITON_INTERPRET="1")
    assert "agree with the oracle" in output


SLOWEST = "many_rows_kernel"
"""It compiles for longer than all others together, and the interpreter runs it."""


@needs_triton
@pytest.mark.parametrize(
    ("target", "left_out"),
    [
        ("cuda:90", (SLOWEST,)),
        *(
            pytest.param(name, (), marks=pytest.mark.nightly)
            for name in ("cuda:80", "cuda:90", "hip:gfx942", "hip:gfx950")
        ),
    ],
)
def test_kernels_compile(target: str, left_out: tuple[str, ...]) -> None:
    """Every kernel that a device of that kind would run, without the device."""
    assert f"compiled for {target}" in run_module("tests.support.compiled", target, *left_out)
