"""The linker that FlyDSL's compiler runs: ``$ROCM_PATH/llvm/bin/ld.lld``, without which no kernel compiles.

A ROCm image has it there. Elsewhere any LLD does: a folder of that shape is made in the user's cache, and
ROCM_PATH points to it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from kernel.errors import DeviceUnavailableError

_OLDEST_LLVM = 19
"""The oldest LLD that is known to link code objects of version 6, which FlyDSL makes."""
_NEWEST_LLVM = 30
"""The newest Debian package name that is looked for."""
_IN_TOOLKIT = Path("llvm", "bin", "ld.lld")


def check() -> str:
    """The linker that :func:`prepare` will have FlyDSL run, for people; changes nothing.

    Raises:
        DeviceUnavailableError: none was found.
    """
    root = _rocm()
    return str(Path(root, _IN_TOOLKIT)) if root else shlex.join(command())


def prepare() -> None:
    """Set ROCM_PATH to a folder that has a linker.

    Raises:
        DeviceUnavailableError: no linker was found, or the cache folder cannot be written.
    """
    os.environ["ROCM_PATH"] = _rocm() or str(_toolkit(command()))


def _rocm() -> str | None:
    """A ROCm installation with a linker."""
    roots = (os.environ.get("ROCM_PATH"), "/opt/rocm")
    return next((root for root in roots if root and Path(root, _IN_TOOLKIT).is_file()), None)


def command() -> list[str]:
    """The command of an LLD outside ROCm: on the path, in Debian's folders, in the ``ziglang`` package.

    Raises:
        DeviceUnavailableError: there is none.
    """
    versions = range(_NEWEST_LLVM, _OLDEST_LLVM - 1, -1)
    for name in ("ld.lld", *(f"/usr/lib/llvm-{version}/bin/ld.lld" for version in versions)):
        path = shutil.which(name)
        if path is not None and _lld_version(path) >= _OLDEST_LLVM:
            return [path]
    zig = importlib.util.find_spec("ziglang")
    for folder in (zig.submodule_search_locations or []) if zig else []:
        if Path(folder, "zig").is_file():
            return [str(Path(folder, "zig")), "ld.lld"]
    raise DeviceUnavailableError(
        f"FlyDSL needs ld.lld of LLVM {_OLDEST_LLVM} or newer: none is in $ROCM_PATH/llvm/bin or on the path",
        "pip install ziglang, apt install lld-19, or set ROCM_PATH to a ROCm installation",
    )


def _lld_version(program: str) -> int:
    try:
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    version = re.search(r"LLD (\d+)", shown)
    return int(version[1]) if version else 0


def _toolkit(linker: list[str]) -> Path:
    """A folder with ``llvm/bin/ld.lld``, a script that runs ``linker``."""
    cache = os.environ.get("XDG_CACHE_HOME")
    key = hashlib.sha256(shlex.join(linker).encode()).hexdigest()[:16]
    root = Path(cache if cache else Path.home() / ".cache") / "nvfp4-indexer" / "rocm-toolkit" / key
    script = root / _IN_TOOLKIT
    if not script.is_file():
        try:
            script.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=script.parent) as scratch:
                written = Path(scratch, script.name)
                written.write_text(f'#!/bin/sh\nexec {shlex.join(linker)} "$@"\n')
                written.chmod(0o700)
                written.replace(script)  # atomic: a process that looks meanwhile sees all of it or nothing
        except OSError as error:
            raise DeviceUnavailableError(
                f"the folder {root} for FlyDSL's linker cannot be made: {error}",
                "set XDG_CACHE_HOME to a folder that can be written",
            ) from error
    return root
