"""FlyDSL's linker is found wherever it is, and missing by name."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kernel.backends.flydsl import toolchain
from kernel.errors import DeviceUnavailableError


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "no-rocm"))  # and restored, whatever prepare() sets
    return tmp_path


def program(path: Path, shown: str) -> Path:
    """A program that shows ``shown`` whatever it is asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{shown}' \"$@\"\n")
    path.chmod(0o755)
    return path


def only_on_the_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing installed on this machine is found."""
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: which(name) if "/" not in name else None)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


def test_rocm_comes_first(own_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rocm = own_environment / "rocm"
    program(rocm / "llvm" / "bin" / "ld.lld", "AMD LLD 20.0.0")
    monkeypatch.setenv("ROCM_PATH", str(rocm))
    toolchain.prepare_linker()
    assert os.environ["ROCM_PATH"] == str(rocm)


def test_any_lld_is_wrapped(own_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/opt/rocm/llvm/bin/ld.lld").exists():
        pytest.skip("ROCm is installed, and comes first")
    folder = own_environment / "bin with spaces"
    program(folder / "ld.lld", "LLD 19.1.7")
    only_on_the_path(folder, monkeypatch)
    toolchain.prepare_linker()
    wrapper = Path(os.environ["ROCM_PATH"], "llvm", "bin", "ld.lld")
    shown = subprocess.run([wrapper, "-o", "a b"], capture_output=True, text=True, check=True).stdout
    assert shown == "LLD 19.1.7 -o a b\n"
    assert list(wrapper.parent.iterdir()) == [wrapper]


@pytest.mark.parametrize("shown", ["LLD 14.0.6 (compatible with GNU linkers)", "GNU ld 2.40"])
def test_what_cannot_link_code_objects_is_not_taken(
    shown: str, own_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(own_environment / "bin" / "ld.lld", shown)
    only_on_the_path(own_environment / "bin", monkeypatch)
    with pytest.raises(
        DeviceUnavailableError, match=r"needs ld\.lld of LLVM 19 or newer.*pip install ziglang"
    ):
        toolchain.linker_command()


def test_cache_that_cannot_be_written(own_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/opt/rocm/llvm/bin/ld.lld").exists():
        pytest.skip("ROCm is installed, and comes first")
    program(own_environment / "bin" / "ld.lld", "LLD 19.1.7")
    only_on_the_path(own_environment / "bin", monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    with pytest.raises(DeviceUnavailableError, match="set XDG_CACHE_HOME"):
        toolchain.prepare_linker()
