"""From the bytes of a kernel to assembly text, by whichever gfx950 disassembler this machine has.

The bytes are those that were launched: a dump may be of another compile.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel.errors import DeviceUnavailableError, IndexerError
from kernel.gfx950.hip.code_object import CodeObject, KernelCode

_OLDEST_LLVM = 20
"""The first LLVM that knows gfx950."""
_NEWEST_LLVM = 30
"""The newest Debian package name that is looked for."""
_PROGRAM = Path(__file__).with_name("llvm_disassemble.py")
_TIMEOUT_S = 60
_REMEDY = (
    "pip install rocm-llvm-python, apt install llvm-22, or put llvm-objdump of LLVM "
    f"{_OLDEST_LLVM} or newer on the path"
)
_OBJDUMP_LINE = re.compile(r"^\s+(\S.*?)\s*// ([0-9A-F]{8,16}): [0-9A-F ]{8,}", re.MULTILINE)


class DisassemblyError(IndexerError):
    """A disassembler failed on a code object; another one may not."""


@dataclass(frozen=True)
class Disassembler:
    """A way to disassemble gfx950 code."""

    source: str
    """The library or program."""
    decode: Callable[[CodeObject, KernelCode], list[tuple[int, str]]]
    """A kernel's instructions as (byte offset from its start, text); raises DisassemblyError."""


def find() -> Disassembler:
    """The disassembler of this machine.

    Order: the library of the ``rocm-llvm-python`` wheel, ROCm's llvm-objdump, an llvm-objdump on the path.

    Raises:
        DeviceUnavailableError: there is none.
    """
    for candidate in _candidates():
        return candidate
    raise DeviceUnavailableError("no disassembler for gfx950 was found", _REMEDY)


def listing(code_object: CodeObject, kernel: KernelCode) -> str:
    """The kernel's assembly text: its name, then an instruction a line with its byte offset behind it.

    A disassembler that fails (an LLVM that is too old, a library that does not load) gives way to the next.

    Raises:
        DeviceUnavailableError: no disassembler, or each fails on these bytes.
    """
    failures = []
    for candidate in _candidates():
        try:
            rows = candidate.decode(code_object, kernel)
        except DisassemblyError as error:
            failures.append(str(error))
        else:
            lines = (f"\t{text} // {offset:012X}:\n" for offset, text in rows)
            return f"{kernel.metadata.name}:\n" + "".join(lines)
    reasons = "; ".join(failures) or "no disassembler for gfx950 was found"
    raise DeviceUnavailableError(f"{kernel.metadata.name} cannot be disassembled: {reasons}", _REMEDY)


def _candidates() -> Iterator[Disassembler]:
    wheel = importlib.util.find_spec("rocm")
    for folder in (wheel.submodule_search_locations or []) if wheel else []:
        library = Path(folder, "llvm", "librocmllvm.so")
        if library.is_file():
            yield Disassembler(str(library), functools.partial(_by_library, str(library)))
    names = [str(Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "llvm", "bin", "llvm-objdump"))]
    names += [f"llvm-objdump-{version}" for version in range(_NEWEST_LLVM, _OLDEST_LLVM - 1, -1)]
    for name in (*names, "llvm-objdump"):
        program = shutil.which(name)
        if program is not None and _llvm_version(program) >= _OLDEST_LLVM:
            yield Disassembler(program, functools.partial(_by_objdump, program))


@functools.cache
def _llvm_version(program: str) -> int:
    try:
        shown = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    version = re.search(r"LLVM version (\d+)", shown)
    return int(version[1]) if version else 0


def _run(command: list[str], stdin: bytes | None = None) -> str:
    try:
        return subprocess.run(
            command, input=stdin, check=True, capture_output=True, timeout=_TIMEOUT_S
        ).stdout.decode()
    except subprocess.CalledProcessError as error:
        raise DisassemblyError(
            f"{' '.join(command)} failed with status {error.returncode}: {error.stderr.decode().strip()}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DisassemblyError(f"{' '.join(command)} failed: {error}") from error


def _by_library(library: str, _code_object: CodeObject, kernel: KernelCode) -> list[tuple[int, str]]:
    shown = _run([sys.executable, "-I", "-S", str(_PROGRAM), library], kernel.code)
    rows = (line.split("\t", 1) for line in shown.splitlines())
    return [(int(offset), text) for offset, text in rows]


def _by_objdump(program: str, code_object: CodeObject, kernel: KernelCode) -> list[tuple[int, str]]:
    with tempfile.NamedTemporaryFile(suffix=".hsaco") as file:
        file.write(code_object.image)
        file.flush()
        shown = _run([program, "-d", f"--disassemble-symbols={kernel.metadata.name}", file.name])
    rows = [(int(address, 16) - kernel.entry_address, text) for text, address in _OBJDUMP_LINE.findall(shown)]
    rows = [(offset, text) for offset, text in rows if offset < len(kernel.code)]  # behind it is padding
    if not rows:
        raise DisassemblyError(f"{program} shows no instruction of {kernel.metadata.name}")
    return rows
