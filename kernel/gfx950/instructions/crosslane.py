"""Vector instructions that move values between lanes or between register files. Undefined values may be
moved."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.form import Builder, Form, Step
from kernel.gfx950.instructions.bits import count_ones
from kernel.gfx950.results import write32
from kernel.gfx950.wave import Wave

_LANES = np.arange(64)
_EVERY_LANE = np.ones(64, np.bool_)
_MASK_LOW = np.array([(1 << min(lane, 32)) - 1 for lane in range(64)], np.uint64).astype(np.uint32)
_MASK_HIGH = np.array([(1 << max(lane - 32, 0)) - 1 for lane in range(64)], np.uint64).astype(np.uint32)
_32 = (np.arange(32, 64), np.arange(32))
_16 = (np.r_[16:32, 48:64], np.r_[0:16, 32:48])


def _first_lane(wave: Wave) -> int:
    return int(np.argmax(wave.lanes)) if wave.exec_value else 0


def _read_lane(form: Form) -> Step:
    """v_readfirstlane_b32 and v_readlane_b32 (whose lane number is a scalar source)."""
    first = form.mnemonic == "v_readfirstlane_b32"
    operands = form.operands(2 if first else 3)
    destination = form.scalar_destination(operands[0], 1)
    register = form.vector(operands[1], accumulator=None)
    chosen = (lambda _wave: 0) if first else form.scalar_source(operands[2])

    def step(wave: Wave) -> None:
        lane = _first_lane(wave) if first else chosen(wave) & 63
        defined = wave.definedness(register)
        undefined = 0 if defined is None or defined[lane] else 0xFFFFFFFF
        wave.set_scalar(destination, int(wave.u32[register][lane]), undefined)

    return step


def _write_lane(form: Form) -> Step:
    """v_writelane_b32 writes one lane whatever exec says."""
    destination, a, lane = form.operands(3)
    register, source, chosen = form.vector(destination), form.scalar_source(a), form.scalar_source(lane)

    def step(wave: Wave) -> None:
        lanes = np.equal(_LANES, chosen(wave) & 63)
        wave.move(register, np.full(64, source(wave), np.uint32), None, lanes)

    return step


def _permlane_swap(form: Form) -> Step:
    """v_permlane32_swap and v_permlane16_swap: the upper lanes (odd rows) of the first register change
    places with the lower lanes (even rows) of the second. What they do under a partial exec is not
    implemented."""
    upper, lower = _32 if form.mnemonic == "v_permlane32_swap_b32" else _16
    a, b = form.operands(2)
    first, second = form.vector(a), form.vector(b)
    if first == second:
        raise UnsupportedInstructionError(f"{form.mnemonic} of a register with itself")

    def step(wave: Wave) -> None:
        if not wave.full:
            raise UnsupportedInstructionError(f"{form.mnemonic} with inactive lanes")
        if wave.vector_states[first] or wave.vector_states[second]:
            _swap_definedness(wave)
        x, y = wave.u32[first], wave.u32[second]
        held = x[upper]
        x[upper] = y[lower]
        y[lower] = held

    def _swap_definedness(wave: Wave) -> None:
        rows = []
        for register in (first, second):
            defined = wave.definedness(register)
            rows.append(_EVERY_LANE.copy() if defined is None else defined.copy())
        held = rows[0][upper]
        rows[0][upper] = rows[1][lower]
        rows[1][lower] = held
        for register, row in zip((first, second), rows, strict=True):
            wave.move(register, wave.u32[register].copy(), row, _EVERY_LANE)

    return step


def _swap(form: Form) -> Step:
    """v_swap_b32 under exec."""
    a, b = form.operands(2)
    first, second = form.vector(a), form.vector(b)

    def step(wave: Wave) -> None:
        held = wave.u32[first].copy()
        defined = wave.definedness(first)
        defined = None if defined is None else defined.copy()
        wave.move(first, wave.u32[second], wave.definedness(second), wave.lanes)
        wave.move(second, held, defined, wave.lanes)

    return step


def _accumulator_move(form: Form) -> Step:
    """v_accvgpr_read, v_accvgpr_write, v_accvgpr_mov between the two halves of the register file."""
    destination, source = form.operands(2)
    to_accumulator = form.mnemonic != "v_accvgpr_read_b32"
    register = form.vector(destination, accumulator=to_accumulator)
    if source.kind == "vector":
        first = form.vector(source, accumulator=form.mnemonic != "v_accvgpr_write_b32")

        def step(wave: Wave) -> None:
            wave.move(register, wave.u32[first], wave.definedness(first), wave.lanes)

        return step
    if form.mnemonic != "v_accvgpr_write_b32":
        raise UnsupportedInstructionError(f"operand {source.text} is no accumulator register")
    read, put = form.source(source, "u"), write32(register, "u")
    return lambda wave: put(wave, read(wave))


def _count_below(form: Form) -> Step:
    """v_mbcnt_lo/hi_u32_b32: how many bits of the mask belong to lanes below this one, added to the second
    source."""
    below = _MASK_LOW if form.mnemonic == "v_mbcnt_lo_u32_b32" else _MASK_HIGH
    destination, a, b = form.operands(3)
    register, mask, base = form.vector(destination), form.source(a, "u"), form.source(b, "u")
    put = write32(register, "u")
    return lambda wave: put(wave, count_ones(mask(wave) & below) + base(wave))


_PERMUTES: dict[str, Callable[[Form], Step]] = {
    "v_permlane32_swap_b32": _permlane_swap,
    "v_permlane16_swap_b32": _permlane_swap,
}
BUILDERS: dict[str, Builder] = {
    **_PERMUTES,
    "v_readfirstlane_b32": _read_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_swap_b32": _swap,
    "v_accvgpr_read_b32": _accumulator_move,
    "v_accvgpr_write_b32": _accumulator_move,
    "v_accvgpr_mov_b32": _accumulator_move,
    "v_mbcnt_lo_u32_b32": _count_below,
    "v_mbcnt_hi_u32_b32": _count_below,
}
