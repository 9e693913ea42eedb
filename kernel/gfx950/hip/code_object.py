"""Reads gfx950 code objects: metadata, kernel descriptors, kernel arguments and disassembly.

Source of the layout: the user guide of LLVM's AMDGPU back end (ELF code object, code object V5 metadata,
kernel descriptor).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from kernel.errors import DeviceUnavailableError, IndexerError
from kernel.gfx950.parse import from_descriptor
from kernel.gfx950.program import KernelArgument, KernelMetadata

# ---- MessagePack, as far as metadata uses it ----

Value: TypeAlias = "bool | int | str | list[Value] | dict[str, Value] | None"

_CONSTANTS: dict[int, bool | None] = {0xC0: None, 0xC2: False, 0xC3: True}


def decode(encoded: bytes) -> Value:
    """The first value of ``encoded``; bytes after it are padding.

    Raises:
        ValueError: it ends early, or holds a type that metadata does not use (floats, binary, extensions).
    """
    return _Reader(encoded).value()


class _Reader:
    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded
        self._at = 0

    def _take(self, size: int) -> bytes:
        taken = self._encoded[self._at : self._at + size]
        if len(taken) < size:
            raise ValueError(
                f"MessagePack ends at byte {len(self._encoded)}, {size} more are due at {self._at}"
            )
        self._at += size
        return taken

    def _number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "big", signed=signed)

    def _text(self, size: int) -> str:
        return self._take(size).decode()

    def _array(self, size: int) -> Value:
        return [self.value() for _ in range(size)]

    def _map(self, size: int) -> Value:
        return {self._key(): self.value() for _ in range(size)}

    def _key(self) -> str:
        key = self.value()
        if not isinstance(key, str):
            raise ValueError(  # noqa: TRY004  it is the file that is wrong, not an argument
                f"MessagePack map key of type {type(key).__name__} at byte {self._at}"
            )
        return key

    def value(self) -> Value:
        tag = self._take(1)[0]
        if tag < 0x80:
            return tag
        if tag < 0x90:
            return self._map(tag & 0x0F)
        if tag < 0xA0:
            return self._array(tag & 0x0F)
        if tag < 0xC0:
            return self._text(tag & 0x1F)
        if tag >= 0xE0:
            return tag - 0x100
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if 0xCC <= tag <= 0xCF:
            return self._number(1 << (tag - 0xCC))
        if 0xD0 <= tag <= 0xD3:
            return self._number(1 << (tag - 0xD0), signed=True)
        if 0xD9 <= tag <= 0xDB:
            return self._text(self._number(1 << (tag - 0xD9)))
        if tag in (0xDC, 0xDD):
            return self._array(self._number(2 << (tag - 0xDC)))
        if tag in (0xDE, 0xDF):
            return self._map(self._number(2 << (tag - 0xDE)))
        raise ValueError(f"MessagePack type {tag:#x} at byte {self._at - 1}")


# ---- ELF, metadata and kernel descriptors ----

_SHT_NOTE, _SHT_DYNSYM = 7, 11
_NT_AMDGPU_METADATA = 32
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_SECTION = struct.Struct(
    "<IIQQQQIIQQ"
)  # name, type, flags, address, offset, size, link, info, align, entry size
_NOTE = struct.Struct("<III")  # name size, descriptor size, type
_DESCRIPTOR_SIZE = 64
_DESCRIPTOR_ENTRY = 16  # 64 bits: the first instruction, relative to the descriptor


@dataclass(frozen=True)
class KernelCode:
    """One kernel of a code object."""

    metadata: KernelMetadata
    max_block: int
    """Threads of the largest workgroup it may be launched with."""
    required_block: tuple[int, int, int] | None
    """The only workgroup size it may be launched with, if it was compiled for one."""
    entry_address: int
    code: bytes
    """Its instructions."""


@dataclass(frozen=True)
class CodeObject:
    """A code object that was loaded."""

    image: bytes
    target: str
    kernels: dict[str, KernelCode]


def parse(image: bytes) -> CodeObject:
    """Read a code object.

    Raises:
        ValueError: not a code object, or one whose metadata is missing or malformed.
        UnsupportedInstructionError: a kernel's descriptor asks for a mode that is not simulated.
    """
    try:
        return _parse(image)
    except (struct.error, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"malformed code object of {len(image)} bytes: {error!r}") from error


def _parse(image: bytes) -> CodeObject:
    if image[:4] != b"\x7fELF":
        raise ValueError(f"not an ELF file: starts with {image[:4]!r}")
    sections = _sections(image)
    symbols = _symbols(image, sections)
    metadata = _metadata(image, sections)
    kernels = {}
    for entry in cast("list[dict[str, object]]", metadata["amdhsa.kernels"]):
        kernels[str(entry[".name"])] = _kernel(image, sections, symbols, entry)
    return CodeObject(image, str(metadata["amdhsa.target"]), kernels)


@dataclass(frozen=True)
class _Section:
    kind: int
    address: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class _Symbol:
    section: int
    address: int
    size: int


def _sections(image: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", image, 40)
    entry_size, count = struct.unpack_from("<HH", image, 58)
    rows = (_SECTION.unpack_from(image, table + i * entry_size) for i in range(count))
    return [_Section(row[1], row[3], row[4], row[5], row[6]) for row in rows]


def _symbols(image: bytes, sections: list[_Section]) -> dict[str, _Symbol]:
    symbols = {}
    for section in sections:
        if section.kind != _SHT_DYNSYM:
            continue
        strings = sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, _SYMBOL.size):
            name, _, _, index, address, size = _SYMBOL.unpack_from(image, at)
            end = image.index(b"\0", strings + name)
            symbols[image[strings + name : end].decode()] = _Symbol(index, address, size)
    return symbols


def _notes(image: bytes, section: _Section) -> Iterator[tuple[bytes, int, bytes]]:
    at = section.offset
    while at < section.offset + section.size:
        name_size, size, kind = _NOTE.unpack_from(image, at)
        at += _NOTE.size
        name = image[at : at + name_size].rstrip(b"\0")
        at += -(-name_size // 4) * 4
        yield name, kind, image[at : at + size]
        at += -(-size // 4) * 4


def _metadata(image: bytes, sections: list[_Section]) -> dict[str, object]:
    for section in sections:
        if section.kind == _SHT_NOTE:
            for name, kind, descriptor in _notes(image, section):
                if (name, kind) == (b"AMDGPU", _NT_AMDGPU_METADATA):
                    return cast("dict[str, object]", decode(descriptor))
    raise ValueError("the code object has no AMDGPU metadata note")


def _file_range(image: bytes, sections: list[_Section], section: int, address: int, size: int) -> bytes:
    start = address - sections[section].address + sections[section].offset
    return image[start : start + size]


def _kernel(
    image: bytes, sections: list[_Section], symbols: dict[str, _Symbol], entry: dict[str, object]
) -> KernelCode:
    name = str(entry[".name"])
    symbol = symbols[str(entry[".symbol"])]
    descriptor = _file_range(image, sections, symbol.section, symbol.address, _DESCRIPTOR_SIZE)
    (entry_offset,) = struct.unpack_from("<q", descriptor, _DESCRIPTOR_ENTRY)
    body = symbols[name]
    arguments = tuple(
        KernelArgument(
            int(cast("int", argument[".offset"])),
            int(cast("int", argument[".size"])),
            str(argument[".value_kind"]),
        )
        for argument in cast("list[dict[str, object]]", entry.get(".args", []))
    )
    notes = {key.lstrip("."): value for key, value in entry.items() if type(value) is int}
    required = cast("list[int] | None", entry.get(".reqd_workgroup_size"))
    return KernelCode(
        metadata=from_descriptor(name, descriptor, arguments, notes),
        max_block=notes["max_flat_workgroup_size"],
        required_block=(required[0], required[1], required[2]) if required else None,
        entry_address=symbol.address + entry_offset,
        code=_file_range(image, sections, body.section, body.address, body.size),
    )


# ---- Kernel argument segment, built from ``kernelParams`` as hipModuleLaunchKernel does ----

_POINTER_SIZE = ctypes.sizeof(ctypes.c_void_p)


def kernarg_segment(
    metadata: KernelMetadata, kernel_params: int, grid: tuple[int, int, int], block: tuple[int, int, int]
) -> bytes:
    """The bytes of the segment: explicit arguments copied, hidden ones filled in.

    Args:
        metadata: where each argument lies.
        kernel_params: host address of an array with the address of each explicit argument, in order.
        grid: workgroups.
        block: threads of a workgroup.

    Other hidden arguments (buffers of the runtime, offsets) are zero: this device has no such buffers, and a
    kernel that follows such a pointer goes out of bounds.
    """
    hidden = {"hidden_grid_dims": 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1}
    for axis, workgroups, threads in zip("xyz", grid, block):
        hidden[f"hidden_block_count_{axis}"] = workgroups
        hidden[f"hidden_group_size_{axis}"] = threads
    segment = bytearray(metadata.kernarg_bytes)
    explicit = 0
    for argument in metadata.arguments:
        if argument.value_kind.startswith("hidden_"):
            content = hidden.get(argument.value_kind, 0).to_bytes(argument.size, "little")
        else:
            address = ctypes.c_void_p.from_address(kernel_params + explicit * _POINTER_SIZE).value
            if address is None:
                raise ValueError(
                    f"kernelParams[{explicit}] of {metadata.name} is null: too few arguments were given"
                )
            content = ctypes.string_at(address, argument.size)
            explicit += 1
        segment[argument.offset : argument.offset + argument.size] = content
    return bytes(segment)


# ---- Disassembly, by whichever gfx950 disassembler this machine has ----
#
# The bytes are those that were launched: a dump may be of another compile.

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
