"""Builds the stand-in ``libamdhip64.so.7`` on first use, into the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel.errors import DeviceUnavailableError

LIBRARY_NAME = "libamdhip64.so.7"

SOURCE = Path(__file__).with_name("standin.c")
"""The library, its functions marked by EXPORT."""
_VERSIONS = Path(__file__).with_name("standin.map")
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,defs")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 600  # a first zig cc builds its C library too, on a busy machine in over a minute


def compiler() -> list[str]:
    """The command of a C compiler: ``$CC``, else the first of cc, gcc, clang, the ``ziglang`` package.

    Raises:
        DeviceUnavailableError: there is none.
    """
    asked = os.environ.get("CC")
    if asked:
        command = shlex.split(asked)
        if not command or shutil.which(command[0]) is None:
            raise DeviceUnavailableError(f"CC={asked} is not a command", "unset CC or set it to a C compiler")
        return command
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise DeviceUnavailableError(
        f"no C compiler ({', '.join(_COMPILERS)}) is on the path",
        "install gcc or clang, pip install ziglang, or set CC",
    )


def library() -> Path:
    """The built library: from the cache, or compiled now.

    Raises:
        DeviceUnavailableError: no compiler, it fails, or the cache folder cannot be written.
    """
    path = library_path()
    if not is_built():
        _compile(path)
    return path


def library_path() -> Path:
    """Where the library is, once it is built."""
    return (_cache_folder() / _build_key() / LIBRARY_NAME).resolve()


def is_built() -> bool:
    """Whether :func:`library` needs no compiler any more."""
    return library_path().is_file()


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root if root else Path.home() / ".cache") / "nvfp4-indexer" / "hip-standin"


def _build_key() -> str:
    content = b"\0".join([SOURCE.read_bytes(), _VERSIONS.read_bytes(), *(flag.encode() for flag in _FLAGS)])
    return hashlib.sha256(content).hexdigest()[:16]


def _compile(path: Path) -> None:
    command = compiler()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A folder beside the result: the rename is atomic, and processes that build at once do not meet.
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            built = Path(scratch, LIBRARY_NAME)
            _run_compiler([
                *command, *_FLAGS, f"-Wl,-soname,{LIBRARY_NAME}", f"-Wl,--version-script={_VERSIONS}",
                "-o", str(built), str(SOURCE), "-lpthread",
            ])  # fmt: skip
            built.replace(path)
    except OSError as error:
        raise DeviceUnavailableError(
            f"the stand-in HIP cannot be built in {path.parent}: {error}",
            "set XDG_CACHE_HOME to a folder that can be written",
        ) from error


def _run_compiler(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise DeviceUnavailableError(
            f"{shlex.join(command)} failed: {error.stderr.strip()}",
            "set CC to a working C compiler for Linux",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DeviceUnavailableError(
            f"{shlex.join(command)} took over {_TIMEOUT_S} s", "set CC to a working C compiler for Linux"
        ) from error
