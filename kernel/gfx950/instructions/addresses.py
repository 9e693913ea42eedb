"""Where a vector memory instruction goes: buffer and global addresses of its active lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.form import Form
from kernel.gfx950.operands import Operand
from kernel.gfx950.wave import Wave


@dataclass(frozen=True)
class Target:
    """Where an instruction goes: the lanes that access memory, and their byte addresses."""

    lanes: npt.NDArray[np.intp]
    addresses: npt.NDArray[np.int64]
    dwords: npt.NDArray[np.int64] | None = None
    """Of a load that the end of a buffer cuts: how many of each lane's dwords lie inside."""


AddressSource = Callable[[Wave], Target]


_FORMAT_32 = 4
"""A descriptor's data format that LLVM sets for raw buffers: one of 0 is invalid."""


def buffer_address(
    form: Form, address: Operand, resource: Operand, scalar_offset: Operand, size: int, *, cut: bool = False
) -> AddressSource:
    """Raw buffers: stride 0. What begins at or after ``num_records`` is not accessed (loads give 0).

    The hardware checks each dword of a longer access by itself. With ``cut`` an access of aligned dwords may
    therefore cross the end (LLVM AMDGPU guide, "Relaxed Buffer OOB Mode"); every other crossing is refused.
    """
    if form.flag("idxen"):
        raise UnsupportedInstructionError("buffer access with idxen")
    if resource.kind != "scalar" or resource.count != 4 or resource.modified:
        raise UnsupportedInstructionError(f"operand {resource.text} is no buffer descriptor")
    descriptor, constant = resource.index, form.number("offset")
    if not 0 <= constant < 4096:
        raise UnsupportedInstructionError(f"offset:{constant}: a buffer offset has 12 bits")
    soffset = form.scalar_source(scalar_offset)
    if form.flag("offen"):
        per_lane = form.address(address, "u")
    elif address.kind == "off":
        per_lane = _no_lane_offset
    else:
        raise UnsupportedInstructionError(f"operand {address.text} is no buffer address")

    def find(wave: Wave) -> Target:
        base = wave.scalar64(descriptor)
        records, flags = wave.scalar(descriptor + 2), wave.scalar(descriptor + 3)
        if base >> 48 or flags & 1 << 23:
            raise UnsupportedInstructionError(
                "a buffer with a stride, a swizzle or the lane's number in its address"
            )
        if flags >> 15 & 15 != _FORMAT_32:
            raise UnsupportedInstructionError(f"a buffer of data format {flags >> 15 & 15}, not of dwords")
        moved = soffset(wave)
        offsets = np.broadcast_to(per_lane(wave), 64).astype(np.int64) + constant
        lanes = np.flatnonzero(wave.lanes & (offsets + moved < records))
        inside = offsets[lanes]
        if lanes.size and int(inside.max()) + moved + size > records:
            if cut and not (records % 4 or np.any((inside + moved) % 4)):
                dwords = np.minimum((records - moved - inside) // 4, size // 4)
                return Target(lanes, inside + (base + moved), dwords)
            at = int(np.argmax(inside + moved + size > records))
            raise UnsupportedInstructionError(
                f"{size} bytes at offset {int(inside[at]) + moved} cross the end of a buffer of {records}",
                lane=int(lanes[at]),
            )
        return Target(lanes, inside + (base + moved))

    return find


def _no_lane_offset(_wave: Wave) -> np.uint32:
    zero: np.uint32 = np.uint32(0)
    return zero


def global_address(form: Form, address: Operand, base: Operand) -> AddressSource:
    """A 64-bit address a lane, or a scalar base and an unsigned 32-bit offset a lane."""
    constant = form.number("offset")
    if not -4096 <= constant < 4096:
        raise UnsupportedInstructionError(f"offset:{constant}: a global offset has 13 bits")
    if base.kind == "off":
        pair = form.address(address, "U")
        if address.kind != "vector":
            raise UnsupportedInstructionError(f"operand {address.text} is no vector address")
        return lambda wave: _active(wave, pair(wave).view(np.int64) + constant)
    start, per_lane = form.scalar_source64(base), form.address(address, "u")
    if address.kind != "vector" or base.kind != "scalar":
        raise UnsupportedInstructionError(f"operands {address.text}, {base.text} are no global address")
    return lambda wave: _active(wave, per_lane(wave).astype(np.int64) + (start(wave) + constant))


def _active(wave: Wave, addresses: npt.NDArray[np.int64]) -> Target:
    lanes = np.flatnonzero(wave.lanes)
    return Target(lanes, addresses[lanes])
