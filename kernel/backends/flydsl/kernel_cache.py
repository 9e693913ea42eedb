"""Checks of FlyDSL's cache of compiled kernels, with errors that name a remedy; FlyDSL's own do not.

FLYDSL_RUNTIME_CACHE_DIR is the folder, FLYDSL_RUNTIME_ENABLE_CACHE=0 does without, FLYDSL_RUNTIME_RUN_ONLY=1
loads from it and never compiles.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernel.errors import DeviceUnavailableError

FOLDER = "FLYDSL_RUNTIME_CACHE_DIR"
RUN_ONLY = "FLYDSL_RUNTIME_RUN_ONLY"
ENABLE = "FLYDSL_RUNTIME_ENABLE_CACHE"
_ENTRY = "score_prefill"
"""FlyDSL keeps a folder for each launched function's name."""
_TRUE = ("1", "true", "yes", "on")


def check() -> None:
    """Checks that the cache can be used, changing nothing.

    Raises:
        DeviceUnavailableError: compiling is forbidden and no kernel is in the cache, or the cache cannot be
            written.
    """
    folder = _folder()
    if _is_set(RUN_ONLY, default=False):
        _check_filled(folder)
    if folder is None:
        return
    if _is_filled(folder):
        # FlyDSL reads a kernel under a lock file, which it opens for writing.
        for lock in (folder / _ENTRY).glob("*.lock"):
            if not os.access(lock, os.W_OK):
                raise unusable(f"{lock} cannot be written")
        return
    existing = folder / _ENTRY
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise unusable(f"{existing} is no folder")
    if not os.access(existing, os.W_OK):
        raise unusable(f"{existing} cannot be written")


def prepare() -> None:
    """Make the folder.

    Raises:
        DeviceUnavailableError: see :func:`check`.
    """
    check()
    folder = _folder()
    if folder is None or _is_filled(folder):
        return
    try:
        (folder / _ENTRY).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder / _ENTRY):
            pass
    except OSError as error:
        raise unusable(str(error)) from error


def check_named() -> None:
    """Checks that there is a cache to compile into.

    Raises:
        DeviceUnavailableError: there is none.
    """
    if _folder() is None:
        raise DeviceUnavailableError(
            f"{FOLDER} is empty: there is no cache to compile into",
            f"name a folder: `nvfp4-indexer kernel compile --cache DIR`, or unset {FOLDER}",
        )


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Context of FlyDSL's compiler that names its errors about the cache.

    Args:
        name: the kernel.

    Raises:
        DeviceUnavailableError: compiling is forbidden and this kernel is not in the cache, or the cache
            cannot be written.
    """
    try:
        yield
    except RuntimeError as error:
        if RUN_ONLY not in str(error):
            raise
        raise _missing(f"no {name} of this version and toolchain") from error
    except OSError as error:
        folder = _folder()
        if (
            folder is None
            or error.filename is None
            or folder not in Path(os.fsdecode(error.filename)).parents
        ):
            raise
        raise unusable(str(error)) from error


def unusable(reason: str) -> DeviceUnavailableError:
    """The error that the cache cannot be written."""
    return DeviceUnavailableError(
        f"{FOLDER}={_folder()}: the cache of compiled kernels cannot be used: {reason}",
        f"set {FOLDER} to a folder that can be written and has room, or {ENABLE}=0 to compile in every "
        "process",
    )


def _check_filled(folder: Path | None) -> None:
    if folder is None:
        raise DeviceUnavailableError(
            f"{RUN_ONLY}={os.environ[RUN_ONLY]} forbids compiling, and {FOLDER} is empty: there is no cache",
            f"set {FOLDER} to a folder and run `nvfp4-indexer kernel compile`, or unset {RUN_ONLY}",
        )
    if not _is_filled(folder):
        raise _missing("no kernel")


def _is_filled(folder: Path) -> bool:
    return any((folder / _ENTRY).glob("*.pkl"))


def _missing(what: str) -> DeviceUnavailableError:
    folder = _folder()
    return DeviceUnavailableError(
        f"{RUN_ONLY}={os.environ.get(RUN_ONLY, '')} forbids compiling, and {FOLDER}={folder} holds {what}",
        f"run `nvfp4-indexer kernel compile --cache {folder}`, or unset {RUN_ONLY}",
    )


def _folder() -> Path | None:
    """The cache; None where it is disabled."""
    if not _is_set(ENABLE, default=True) and not _is_set(RUN_ONLY, default=False):
        return None
    named = os.environ.get(FOLDER)
    if named is None:
        return Path.home() / ".flydsl" / "cache"
    return Path(named) if named else None


def _is_set(variable: str, *, default: bool) -> bool:
    value = os.environ.get(variable)
    return default if value is None else value.lower() in _TRUE
