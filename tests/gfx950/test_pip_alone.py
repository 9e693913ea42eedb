"""Everything that the simulated device needs comes from pip: no ROCm, no LLVM, no C compiler."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.real_cases import ROOT

BUNDLED = ("ziglang", "rocm")

PROGRAM = """
import os, shutil
from pathlib import Path

shutil.which = lambda *_args, **_kwargs: None  # nothing on the path, nothing in Debian's folders
from kernel.backends import registry
from tests.gfx950.prefill import scored
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, oracle_scores

print(registry.status("flydsl-sim").reason)
call = random_call([(150, 3)], 4)
assert_same_bits(scored(call)[0], oracle_scores(call))
print(Path(os.environ["ROCM_PATH"], "llvm", "bin", "ld.lld").read_text())
"""


@pytest.mark.skipif(Path("/opt/rocm").exists(), reason="ROCm is installed, and its tools come first")
def test_compile_and_launch_with_what_pip_installed(tmp_path: Path) -> None:
    """In a home without caches and an environment without a path: compile, build HIP, disassemble, run."""
    missing = [package for package in BUNDLED if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; pip install 'nvfp4-indexer[sim]'")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "ziglang cc" in done.stdout
    assert "librocmllvm.so" in done.stdout
    assert "ziglang/zig ld.lld" in done.stdout
