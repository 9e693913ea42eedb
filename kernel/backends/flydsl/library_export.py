"""Makes the kernel library: kernels exported by FlyDSL, linked into one shared library. Needs no GPU."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kernel.backends.flydsl import geometry, kernel_library, toolchain
from kernel.backends.flydsl.kernel_library import FILE_NAME
from kernel.errors import DeviceUnavailableError, InvalidArgumentError
from kernel.gfx950.hip import standin

_LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-Wl,--strip-all")
_SYSTEM = ("-lpthread", "-ldl")
_TIMEOUT_S = 600
_TOOLS = (("ld.lld", "ld"), ("llvm-objcopy", "objcopy"))
"""Tools that FlyDSL runs to make objects: one of each, on the path."""
_INSTALL_TOOLS = "install binutils, or put ROCm's llvm/bin on the path"


def check() -> None:
    """Checks what exporting needs beyond compiling.

    Raises:
        DeviceUnavailableError: something is missing; names all of it, with remedies.
    """
    missing = []
    for find in (toolchain.check, standin.compiler):
        try:
            find()
        except DeviceUnavailableError as error:
            missing.append((error.reason, error.remedy))
    absent = [" or ".join(names) for names in _TOOLS if not any(map(shutil.which, names))]
    if absent:
        missing.append((f"FlyDSL's export needs {' and '.join(absent)} on the path", _INSTALL_TOOLS))
    if missing:
        reasons, remedies = zip(*missing)
        raise DeviceUnavailableError(f"kernels cannot be exported: {', '.join(reasons)}", ", ".join(remedies))


def export_library(folder: Path, kernels: Iterable[str] | None = None) -> tuple[Path, list[str]]:
    """Compile kernels and link them.

    Args:
        folder: where the library goes, made if missing; a library there is replaced at once, so processes
            that have loaded it keep theirs.
        kernels: symbols of the kernels, one or more; all when None. A library of named ones is marked
            partial, and only such a one may lack a kernel where it is loaded.

    Returns:
        The library, and its kernels' symbols.

    Raises:
        InvalidArgumentError: there is no such kernel.
        DeviceUnavailableError: something that compiling or linking needs is missing or fails, or the folder
            cannot be written; a library there stays.
    """
    wanted = _checked(kernels)
    check()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as scratch:
            objects = Path(scratch)
            names = toolchain.export_kernels(objects, wanted)
            linked = objects / FILE_NAME
            _link([objects / f"{name}.o" for name in names], linked)
            counts = {name: _num_arguments(objects / f"{name}.h") for name in names}
            sealed = objects / f"{FILE_NAME}.sealed"
            partial = kernels is not None
            sealed.write_bytes(kernel_library.sealed(linked.read_bytes(), counts, partial=partial))
            sealed.replace(folder / FILE_NAME)
    except OSError as error:
        raise DeviceUnavailableError(
            f"the kernel library cannot be made in {folder}: {error}",
            "name a folder that can be written and has room for some megabytes",
        ) from error
    return folder / FILE_NAME, names


def _checked(kernels: Iterable[str] | None) -> tuple[str, ...]:
    every = geometry.kernel_names()
    if kernels is None:
        return every
    wanted = tuple(kernels)
    unknown = sorted(set(wanted) - set(every))
    if unknown or not wanted:
        raise InvalidArgumentError(
            "kernels",
            ", ".join(map(repr, unknown)) or "none",
            f"must be some of {', '.join(every)}",
            "name some of them, or leave it out for all",
        )
    return wanted


def _num_arguments(header: Path) -> int:
    found = re.search(r"_NUM_ARGS (\d+)", header.read_text())
    if found is None:
        raise DeviceUnavailableError(
            f"FlyDSL's {header.name} has no number of arguments",
            "pip install --force-reinstall flydsl==0.5.0",
        )
    return int(found[1])


def _link(objects: list[Path], library: Path) -> None:
    # The stand-in has the library name and symbol versions of ROCm 7's HIP, which is all that linking takes.
    command = [
        *standin.compiler(),
        *_LINK_FLAGS,
        "-o",
        str(library),
        *map(str, objects),
        str(standin.library()),
    ]
    try:
        subprocess.run([*command, *_SYSTEM], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip() or f"exit code {error.returncode}"
        raise DeviceUnavailableError(
            f"{shlex.join(command[:2])} ... failed: {reason}",
            f"set CC to a working C compiler, and see that {library.parent.parent} has room",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DeviceUnavailableError(
            f"linking took over {_TIMEOUT_S} s", "set CC to a working C compiler"
        ) from error
