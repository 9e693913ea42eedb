"""What a gfx950 code object says about its kernels.

Source of the layout: the user guide of LLVM's AMDGPU back end (ELF code object, code object V5 metadata,
kernel descriptor).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from kernel.gfx950.hip import message_pack
from kernel.gfx950.metadata import KernelArgument, KernelMetadata, from_descriptor

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
                    return cast("dict[str, object]", message_pack.decode(descriptor))
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
