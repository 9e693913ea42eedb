"""Scalar loads. They return in any order, so only ``lgkmcnt(0)`` covers one."""

from __future__ import annotations

import numpy as np

from kernel.gfx950.counters import Flight
from kernel.gfx950.errors import OutOfBoundsError, UnsupportedInstructionError
from kernel.gfx950.form import Builder, Form, IntegerSource, Step
from kernel.gfx950.machine import Request
from kernel.gfx950.wave import DEFINED, IN_FLIGHT, UNDEFINED, Wave

_DWORDS = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}
_ONE_LANE = np.zeros(1, np.intp)


def _load(form: Form) -> Step:
    buffer = form.mnemonic.startswith("s_buffer_load")
    count = _DWORDS[form.mnemonic.rsplit("_", 1)[1]]
    destination, base, offset_operand = form.operands(3)
    first = form.scalar_destination(destination, count)
    if base.kind != "scalar" or base.count != (4 if buffer else 2) or base.modified:
        raise UnsupportedInstructionError(f"operand {base.text} is no base of a scalar load")
    base_register = base.index
    offset: IntegerSource = form.scalar_source(offset_operand)
    extra = form.number("offset")
    if offset_operand.is_constant and extra:
        raise UnsupportedInstructionError("a scalar load with two constant offsets")
    signed = offset_operand.is_constant and not buffer  # 21 bits, sign-extended
    constant = int(offset_operand.number) if signed else 0
    registers = tuple(range(first, first + count))
    line = form.line

    def step(wave: Wave) -> None:
        start = wave.scalar64(base_register)
        at = (constant if signed else offset(wave)) + extra
        limit = None
        if buffer:
            start, limit = _buffer(wave, base_register)
        for register in registers:
            if wave.scalar_states[register] == IN_FLIGHT:
                wave.scalar(register)
        address = start + at
        if address & 3:
            raise OutOfBoundsError(f"scalar load at {address:#x}, which is not a multiple of 4")
        inside = count if limit is None else max(0, min(count, (limit - at) // 4))
        states = [DEFINED] * count
        request = Request(wave.index, wave.epoch, line, scalar=True)
        for register in registers:
            wave.scalars[register] = 0  # what a buffer load gives beyond the end of its buffer
        if inside:
            values, defined = wave.machine.load(np.array([address], np.int64), 4 * inside, _ONE_LANE, request)
            for at_dword in range(inside):
                wave.scalars[first + at_dword] = int(values[at_dword, 0])
                if defined is not None and not defined[at_dword, 0]:
                    states[at_dword] = UNDEFINED
                    wave.scalar_undefined[first + at_dword] = 0xFFFFFFFF
        flight = Flight(line, scalars=registers, scalar_states=tuple(states), accesses=request.accesses)
        wave.depart(flight)
        wave.counters.scalar.append(flight)

    return step


def _buffer(wave: Wave, register: int) -> tuple[int, int]:
    """Base address and bytes of the raw buffer that the four scalars at ``register`` describe."""
    base = wave.scalar64(register)
    if base >> 48 & 0x3FFF:
        raise UnsupportedInstructionError("a scalar load from a buffer with a stride")
    return base & 0xFFFFFFFFFFFF, wave.scalar(register + 2)


BUILDERS: dict[str, Builder] = {
    f"{head}_{width}": _load for head in ("s_load", "s_buffer_load") for width in _DWORDS
}
