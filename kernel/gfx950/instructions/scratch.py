"""Scratch: private memory of a lane, mostly spilled registers. ``vmcnt`` counts its loads and stores."""

from __future__ import annotations

import numpy as np

from kernel.gfx950.counters import Flight
from kernel.gfx950.errors import OutOfBoundsError, UnsupportedInstructionError
from kernel.gfx950.form import Builder, Form, Step
from kernel.gfx950.wave import Wave

_DWORDS = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4}


def _scratch(form: Form) -> Step:
    """Private memory of a lane. The addresses here are constants or scalars: a lane's own offset is
    refused."""
    form.cache_policy()
    stores = "_store_" in form.mnemonic
    first, second, base = form.operands(3)
    address, register_operand = (first, second) if stores else (second, first)
    if address.kind != "off" or form.mnemonic.rsplit("_", 1)[1] not in (
        "dword",
        "dwordx2",
        "dwordx3",
        "dwordx4",
    ):
        raise UnsupportedInstructionError(f"{form.mnemonic} with operand {address.text}")
    start = (lambda _wave: 0) if base.kind == "off" else form.scalar_source(base)
    offset, line, count = form.number("offset"), form.line, _DWORDS[form.mnemonic.rsplit("_", 1)[1]]
    if not -4096 <= offset < 4096:
        raise UnsupportedInstructionError(f"offset:{offset}: a scratch offset has 13 bits")
    register = form.vector(register_operand, count, accumulator=None)
    registers = tuple(range(register, register + count))

    def place(wave: Wave) -> int:
        at = start(wave) + offset
        if at % 4 or at < 0 or at // 4 + count > wave.scratch.shape[0]:
            raise OutOfBoundsError(
                f"{4 * count} bytes of scratch at {at}: a lane has {4 * wave.scratch.shape[0]}"
            )
        return at // 4

    def store(wave: Wave) -> None:
        at = place(wave)
        for number, source in enumerate(registers):
            known = wave.definedness(source)  # a spilled register may hold undefined lanes
            np.copyto(wave.scratch_defined[at + number], True if known is None else known, where=wave.lanes)
            np.copyto(wave.scratch[at + number], wave.u32[source], where=wave.lanes)
        wave.counters.vector_memory.append(Flight(line))

    def load(wave: Wave) -> None:
        at = place(wave)
        wave.refuse_in_flight(register, count)
        for number, destination in enumerate(registers):
            np.copyto(wave.u32[destination], wave.scratch[at + number], where=wave.lanes)
        states = wave.load_states(register, count, wave.scratch_defined[at : at + count])
        flight = Flight(line, vectors=registers, vector_states=states)
        wave.depart(flight)
        wave.counters.vector_memory.append(flight)

    return store if stores else load


BUILDERS: dict[str, Builder] = {
    f"scratch_{what}_{width}": _scratch for what in ("load", "store") for width in _DWORDS
}
