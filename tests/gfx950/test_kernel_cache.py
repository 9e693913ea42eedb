"""What FlyDSL's cache lacks or refuses is named, with the variable, its value and the remedy."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from kernel.backends import flydsl
from kernel.backends.flydsl import geometry, toolchain
from kernel.errors import DeviceUnavailableError
from tests.support.cases import CUT
from tests.support.process import call, spawn

VERIFY = ("verify", CUT, "--backend", "flydsl-sim", "--json")


@pytest.fixture(autouse=True)
def _default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (toolchain.CACHE_FOLDER, toolchain.RUN_ONLY, toolchain.CACHE_ENABLE):
        monkeypatch.delenv(variable, raising=False)


def verify(**environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which has compiled nothing."""
    return spawn(*VERIFY, **environment)


@pytest.fixture
def no_folder(tmp_path: Path) -> Path:
    """A place where no folder can be made, whoever asks."""
    file = tmp_path / "file"
    file.touch()
    return file / "cache"


def test_run_only_without_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the backend is made, and in what ``doctor`` says."""
    monkeypatch.setenv(toolchain.CACHE_FOLDER, str(tmp_path))
    monkeypatch.setenv(toolchain.RUN_ONLY, "1")
    message = (
        f"FLYDSL_RUNTIME_RUN_ONLY=1 forbids compiling, and FLYDSL_RUNTIME_CACHE_DIR={tmp_path} holds no "
        f"kernel; run `nvfp4-indexer kernel compile --cache {tmp_path}`, or unset FLYDSL_RUNTIME_RUN_ONLY"
    )
    assert flydsl.probe_simulated() == (False, message)
    with pytest.raises(DeviceUnavailableError) as caught:
        flydsl.create_simulated(None, "exact")
    assert str(caught.value) == message
    done = call(*VERIFY)
    assert done.exit_code == 2
    assert "holds no kernel" in json.loads(done.stderr)["message"]


def test_run_only_with_the_kernels_of_another_version(tmp_path: Path) -> None:
    """Found at the first call: only tracing tells which kernel is needed."""
    (tmp_path / "score_prefill").mkdir()
    (tmp_path / "score_prefill" / "another.pkl").touch()
    done = verify(FLYDSL_RUNTIME_CACHE_DIR=str(tmp_path), FLYDSL_RUNTIME_RUN_ONLY="1")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    error = json.loads(line)
    assert error["error"] == "DeviceUnavailableError"
    assert f"FLYDSL_RUNTIME_CACHE_DIR={tmp_path} holds no insert_bf16 of this version" in error["reason"]
    assert f"kernel compile --cache {tmp_path}" in error["remedy"]


def test_run_only_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.CACHE_FOLDER, "")
    monkeypatch.setenv(toolchain.RUN_ONLY, "1")
    with pytest.raises(DeviceUnavailableError, match="FLYDSL_RUNTIME_CACHE_DIR is empty: there is no cache"):
        toolchain.check_cache()


def test_a_folder_that_cannot_be_made(no_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.CACHE_FOLDER, str(no_folder))
    for attempt in (
        toolchain.check_cache,
        toolchain.prepare_cache,
        lambda: flydsl.create_simulated(None, "exact"),
    ):
        with pytest.raises(DeviceUnavailableError) as caught:
            attempt()
        assert str(caught.value).startswith(f"FLYDSL_RUNTIME_CACHE_DIR={no_folder}: the cache of compiled")
        assert str(no_folder.parent) in caught.value.reason
        assert "set FLYDSL_RUNTIME_CACHE_DIR to a folder that can be written" in caught.value.remedy
    monkeypatch.setenv(toolchain.CACHE_ENABLE, "0")
    toolchain.prepare_cache()


def test_compiling_into_a_folder_that_cannot_be_made(no_folder: Path) -> None:
    done = call("kernel", "compile", "--cache", str(no_folder), "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"FLYDSL_RUNTIME_CACHE_DIR={no_folder}: " in json.loads(line)["message"]


def test_a_folder_that_another_user_may_write_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-only to this process, which a test that runs as root must pretend."""
    folder = tmp_path / "score_prefill"
    folder.mkdir()
    monkeypatch.setenv(toolchain.CACHE_FOLDER, str(tmp_path))
    refused: list[Path] = [folder]
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) not in refused)
    with pytest.raises(DeviceUnavailableError, match=f"{folder} cannot be written"):
        toolchain.check_cache()
    (folder / "kernel.pkl").touch()
    toolchain.check_cache()  # reading is enough
    lock = folder / "kernel.lock"
    lock.touch()
    refused.append(lock)
    with pytest.raises(DeviceUnavailableError, match=f"{lock} cannot be written"):
        toolchain.check_cache()


def test_a_folder_that_is_gone_when_the_compiler_comes(
    no_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(toolchain.CACHE_FOLDER, str(no_folder))
    with (
        pytest.raises(DeviceUnavailableError, match=f"FLYDSL_RUNTIME_CACHE_DIR={no_folder}: "),
        toolchain.compiling("score_prefill_h4"),
    ):
        (no_folder / "score_prefill").mkdir(parents=True)
    with pytest.raises(FileNotFoundError), toolchain.compiling("score_prefill_h4"):
        Path("/nonexistent/elsewhere").read_text()
    with pytest.raises(RuntimeError, match="another error"), toolchain.compiling("score_prefill_h4"):
        raise RuntimeError("another error")


def test_compiling_ahead_compiles_whatever_processes_may_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(toolchain.RUN_ONLY, "1")
    monkeypatch.setenv(toolchain.CACHE_ENABLE, "0")
    monkeypatch.setattr(geometry, "kernel_names", lambda: ("insert_bf16",))
    toolchain.compile_kernels(tmp_path)
    assert list(tmp_path.rglob("*.pkl"))


def test_compiling_ahead_onto_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlyDSL only logs that it kept nothing; who compiles ahead must be told."""
    toolchain.prepare()
    from flydsl.compiler.jit_function import JitCacheManager

    def full(_file: Path, _kernel: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JitCacheManager, "_write_cache_file", staticmethod(full))
    monkeypatch.setattr(geometry, "kernel_names", lambda: ("insert_bf16",))
    with pytest.raises(DeviceUnavailableError) as caught:
        toolchain.compile_kernels(tmp_path)
    assert f"FLYDSL_RUNTIME_CACHE_DIR={tmp_path}: " in caught.value.reason
    assert "No space left on device" in caught.value.reason
    assert "has room" in caught.value.remedy


def test_compiling_ahead_into_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set to nothing is FlyDSL's way to do without."""
    monkeypatch.setenv(toolchain.CACHE_FOLDER, "")
    done = call("kernel", "compile")
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "FLYDSL_RUNTIME_CACHE_DIR is empty" in line
    assert "--cache DIR" in line
