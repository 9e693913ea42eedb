"""Data-parallel primitives: the first source comes from another lane of the wave (LLVM AMDGPU guide, "DPP").

A lane whose source lane does not exist or is inactive reads 0 under ``bound_ctrl``, and is not written
without it. ``row_mask`` and ``bank_mask`` leave whole rows of 16 and banks of 4 lanes unwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.form import Form, Step, Value, ValueSource
from kernel.gfx950.operands import Operand
from kernel.gfx950.registers import LaneMask, vector_name
from kernel.gfx950.wave import Wave

_LANES = np.arange(64)
_ROW, _IN_ROW = _LANES & ~15, _LANES & 15


def lane_map(form: Form) -> tuple[npt.NDArray[np.intp], LaneMask]:
    """The lane that each lane reads, and whether that lane exists."""
    everywhere = np.ones(64, np.bool_)
    if form.has("quad_perm"):
        pick = np.array(form.bits("quad_perm", (0, 1, 2, 3)))
        if pick.min() < 0 or pick.max() > 3:
            raise UnsupportedInstructionError(f"quad_perm:{pick.tolist()}: lanes of a quad are 0 to 3")
        return (_LANES & ~3) + pick[_LANES & 3], everywhere
    if form.flag("row_mirror"):
        return _ROW + 15 - _IN_ROW, everywhere
    if form.flag("row_half_mirror"):
        return (_LANES & ~7) + 7 - (_LANES & 7), everywhere
    for name, low, high in (
        ("row_shl", 1, 15),
        ("row_shr", 1, 15),
        ("row_ror", 1, 15),
        ("row_newbcast", 0, 15),
    ):
        if form.has(name):
            count = form.number(name)
            if not low <= count <= high:
                raise UnsupportedInstructionError(f"{name}:{count}: from {low} to {high}")
            if name == "row_ror":
                return _ROW + (_IN_ROW - count) % 16, everywhere
            if name == "row_newbcast":
                return _ROW + count, everywhere
            at = _IN_ROW + count if name == "row_shl" else _IN_ROW - count
            return _ROW + np.clip(at, 0, 15), (at >= 0) & (at <= 15)
    if form.has("row_bcast"):
        count = form.number("row_bcast")
        if count == 15:  # lane 15 of a row to the whole next row
            return np.maximum(_ROW - 1, 0), _LANES >= 16
        if count == 31:  # lane 31 to the upper half
            return np.full(64, 31), _LANES >= 32
    raise UnsupportedInstructionError(f"{form.mnemonic}: this dpp control")


def dpp_step(
    form: Form,
    operands: Sequence[Operand],
    letters: str,
    result: str,
    function: Callable[..., Value],
    sources: Sequence[ValueSource],
) -> Step:
    """``function`` of ``sources``, the first of which is replaced by its lanes moved."""
    form.allow_encoding("dpp")
    if result in ("U", "I") or letters[0] not in ("u", "i", "f"):
        raise UnsupportedInstructionError(f"{form.mnemonic} with dpp")
    register = form.vector(operands[0])
    moved = operands[1]
    if moved.kind != "vector" or moved.is_accumulator or moved.count != 1:
        raise UnsupportedInstructionError(f"operand {moved.text}: dpp moves a vector register")
    if moved.modified:
        raise UnsupportedInstructionError(f"operand {moved.text}: a source modifier with dpp")
    origin, letter, rest = moved.index, letters[0], list(sources[1:])
    lanes, exists = lane_map(form)
    rows, banks = form.number("row_mask", 15), form.number("bank_mask", 15)
    if not (0 <= rows < 16 and 0 <= banks < 16):
        raise UnsupportedInstructionError(f"row_mask:{rows:#x} bank_mask:{banks:#x}: masks have 4 bits")
    zero_outside = form.has("bound_ctrl")
    if zero_outside and form.number("bound_ctrl") not in (0, 1):
        raise UnsupportedInstructionError("bound_ctrl: 0 and 1 both set the bit, leaving it out clears it")
    enabled = ((rows >> (_LANES >> 4)) & 1 == 1) & ((banks >> ((_LANES & 15) >> 2)) & 1 == 1)
    cast = {"u": np.uint32, "i": np.int32, "f": np.float32}[letter]

    def step(wave: Wave) -> None:
        valid = exists if wave.full else exists & wave.lanes[lanes]
        written = enabled & wave.lanes if zero_outside else enabled & wave.lanes & valid
        defined = wave.definedness(origin)
        if defined is not None:
            wave.add_taint(written & valid & ~defined[lanes], vector_name(origin))
        value = np.where(valid, wave.u32[origin][lanes], np.uint32(0)).view(cast)
        out = np.asarray(function(value, *[source(wave) for source in rest]))
        known = None if wave.taint is None else ~wave.taint
        wave.taint_written = True
        wave.move(register, np.broadcast_to(out, 64).view(np.uint32), known, written)

    return step
