"""The stand-in HIP library builds on first use, once, and says what is missing when it cannot."""

from __future__ import annotations

import importlib.util
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernel.errors import DeviceUnavailableError
from kernel.gfx950.hip import standin


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_builds_once_into_the_users_cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = standin.library()
    assert path.name == "libamdhip64.so.7"
    assert empty_cache in path.parents
    assert list(path.parent.iterdir()) == [path], "nothing of the build is left beside the library"
    built = path.stat().st_mtime_ns
    monkeypatch.setenv("CC", "false")
    assert standin.library() == path
    assert path.stat().st_mtime_ns == built


def test_processes_that_build_at_once_do_not_meet(empty_cache: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: standin.library(), range(3)))
    path = paths.pop()
    assert not paths
    assert list(path.parent.iterdir()) == [path]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DeviceUnavailableError, match=r"no C compiler .*; install gcc or clang"):
        standin.library()


def test_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(DeviceUnavailableError, match="CC=no-such-compiler -m64 is not a command; unset CC"):
        standin.library()


def test_compiler_that_fails_leaves_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = empty_cache / "broken-cc"
    script.write_text("#!/bin/sh\necho no such target >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(DeviceUnavailableError, match="no such target"):
        standin.library()
    assert not list(empty_cache.rglob("libamdhip64*"))


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    with pytest.raises(DeviceUnavailableError, match="set XDG_CACHE_HOME"):
        standin.library()


@pytest.mark.nightly  # test_toolchain.py builds with it, too
def test_the_ziglang_package_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("the package ziglang is not installed")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert standin.library().is_file()
