"""How an instruction's result reaches its registers: under exec, and undefined where a source was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernel.gfx950.form import Value
from kernel.gfx950.wave import Wave


def write32(register: int, letter: str) -> Callable[[Wave, Value], None]:
    """Writes a 32-bit result under exec; ``letter`` is the type of the value."""

    def write(wave: Wave, value: Value) -> None:
        if wave.taint is not None:
            wave.write_tainted(register, np.asarray(value), wave.taint)
            return
        if wave.vector_states[register]:
            wave.before_write(register)
        row = (
            wave.f32[register]
            if letter == "f"
            else wave.i32[register]
            if letter == "i"
            else wave.u32[register]
        )
        if wave.full:
            row[:] = value
        else:
            np.copyto(row, value, where=wave.lanes)

    return write


def write64(register: int) -> Callable[[Wave, Value], None]:
    """Writes a 64-bit result to a register pair under exec."""
    low, high = write32(register, "u"), write32(register + 1, "u")

    def write(wave: Wave, value: Value) -> None:
        bits = np.asarray(value).view(np.uint64)
        low(wave, (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        high(wave, (bits >> np.uint64(32)).astype(np.uint32))

    return write
