"""Whether anything depends on the result of an instruction: it is poisoned, and the poison is followed.

The kernel runs as it is, with its own values, but whatever the instruction writes counts as undefined. The
interpreter follows undefined lanes and bits through moves, arithmetic and selections; here they also go
through scalar arithmetic, loads, LDS and matrix multiplications. Where they would decide a branch, exec, a
store or an address in LDS, the run ends with an UndefinedReadError: the result is used. A run that ends well
would have written the same bytes by the same path with any other result.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kernel.gfx950 import Instruction, Kernel, UndefinedReadError
from kernel.gfx950.hazards import Register, register_use
from kernel.gfx950.isa.decode import Stop, decode, decode_with
from kernel.gfx950.isa.form import Step
from kernel.gfx950.parse import EXEC
from kernel.gfx950.wave import DEFINED, IN_FLIGHT, UNDEFINED, Flight, Wave

_LENIENT = ("s_add", "s_sub", "s_min", "s_max", "s_mul", "s_lsh", "s_ashr", "s_cmp", "s_load", "buffer_load",
            "global_load", "ds_read")  # fmt: skip
"""What only computes, or reads memory: from undefined values comes an undefined result."""
_SETS_SCC = ("s_add", "s_sub", "s_min", "s_max", "s_lsh", "s_ashr", "s_cmp", "s_and", "s_or", "s_xor",
             "s_not", "s_bfe", "s_nor", "s_nand", "s_xnor")  # fmt: skip
_POISONABLE = ("v_", "s_mov", "s_cselect", "ds_write", *_LENIENT, *_SETS_SCC)
_EVERY_LANE = np.ones(64, np.bool_)

Lanes = npt.NDArray[np.bool_]


def can_be_poisoned(instruction: Instruction) -> bool:
    """Whether all that an instruction does is its result: in registers, scc or bytes of LDS."""
    return (
        instruction.mnemonic.startswith(_POISONABLE)
        and ("s", EXEC) not in register_use(instruction).writes
        and "lds" not in instruction.modifiers
    )


def sets_scc(instruction: Instruction) -> bool:
    """Whether an instruction writes scc too."""
    return instruction.mnemonic.startswith(_SETS_SCC)


def poisoned(kernel: Kernel, index: int) -> Kernel:
    """The kernel with the result of instruction ``index`` undefined."""
    steps: dict[int, Step] = {}
    for at, (instruction, step) in enumerate(zip(kernel.instructions, decode(kernel).steps, strict=True)):
        if isinstance(step, Stop):
            continue
        name = instruction.mnemonic
        if name.startswith("ds_write"):
            step = steps[at] = _undefined_to_lds(instruction, step)
        elif name.startswith("v_mfma"):
            step = steps[at] = _undefined_to_tile(instruction, step)
        elif name.startswith(_LENIENT):
            step = steps[at] = _undefined_to_all(instruction, step)
        if at == index:
            steps[at] = _poisoning(instruction, step)
    return decode_with(kernel, steps)


def _poisoning(instruction: Instruction, step: Step) -> Step:
    def poison(wave: Wave) -> None:
        step(wave)
        wave.taint, wave.taint_written = None, False  # the result is undefined as a whole, not in some lanes
        _poison_results(wave, instruction)

    return poison


def _poison_results(wave: Wave, instruction: Instruction) -> None:
    if instruction.mnemonic.startswith("ds_write"):
        granules = wave.counters.lds[-1].lds_granules
        if granules is not None:
            wave.lds.defined[granules] = False
    if sets_scc(instruction):
        wave.set_scc(None)
    lanes = _EVERY_LANE if instruction.mnemonic.startswith(("v_mfma", "v_permlane")) else wave.lanes
    for register in register_use(instruction).writes:
        _poison_register(wave, register, lanes)


def _poison_register(wave: Wave, register: Register, lanes: Lanes) -> None:
    file, at = register
    states = wave.vector_states if file == "v" else wave.scalar_states
    if file == "s":
        wave.scalar_undefined[at] = 0xFFFFFFFF
    else:
        if states[at] == DEFINED:
            wave.defined[at][:] = True
        wave.defined[at][lanes] = False
    if states[at] == IN_FLIGHT:
        _lands_undefined(wave.counters.in_flight(), register)
    else:
        states[at] = UNDEFINED


def _lands_undefined(flights: list[Flight], register: Register) -> None:
    file, at = register
    for flight in flights:
        if at in (flight.vectors if file == "v" else flight.scalars):
            if file == "v":
                flight.vector_states = _undefined_at(flight.vectors, flight.vector_states, at)
            else:
                flight.scalar_states = _undefined_at(flight.scalars, flight.scalar_states, at)


def _undefined_at(registers: tuple[int, ...], states: tuple[int, ...], at: int) -> tuple[int, ...]:
    return tuple(UNDEFINED if one == at else state for one, state in zip(registers, states, strict=True))


def _undefined_to_all(instruction: Instruction, step: Step) -> Step:
    """Undefined sources make the whole result undefined, where the step itself would refuse them."""
    reads = register_use(instruction).reads

    def lenient(wave: Wave) -> None:
        try:
            step(wave)
            if wave.taint is not None:
                wave.settle()
        except UndefinedReadError:
            wave.taint, wave.taint_written = None, False
        else:
            return
        held = [_state(wave, register) for register in reads]
        scc_defined = wave.scc_defined
        _set_states(wave, reads, [DEFINED if state == UNDEFINED else state for state in held])
        wave.scc_defined = True
        step(wave)
        wave.scc_defined = scc_defined
        written = register_use(instruction).writes
        left = [(one, state) for one, state in zip(reads, held, strict=True) if one not in written]
        for register, state in left:
            _set_states(wave, [register], [state])
        _poison_results(wave, instruction)

    return lenient


def _undefined_to_lds(instruction: Instruction, step: Step) -> Step:
    """Undefined data becomes undefined bytes of LDS."""
    parts = [operand for operand in instruction.operands[1:] if operand.kind == "vector"]
    data = [("v", operand.index + at) for operand in parts for at in range(operand.count)]

    def write(wave: Wave) -> None:
        held = [_state(wave, register) for register in data]
        if UNDEFINED not in held:
            step(wave)
            return
        _set_states(wave, data, [DEFINED if state == UNDEFINED else state for state in held])
        step(wave)
        _set_states(wave, data, held)
        granules = wave.counters.lds[-1].lds_granules
        if granules is not None:
            known = [_defined_lanes(wave, at, state) for (_, at), state in zip(data, held, strict=True)]
            wave.lds.defined[granules] = np.array(known)[:, wave.lanes]

    return write


def _undefined_to_tile(instruction: Instruction, step: Step) -> Step:
    """A product is undefined in the rows, columns and cells in which A, B and C are."""
    result, a, b, c = instruction.operands
    rows, columns, start = ([("v", one.index + at) for at in range(one.count)] for one in (a, b, c))
    if c.kind != "vector":
        start = []
    sources = [*rows, *columns, *start]

    def multiply(wave: Wave) -> None:
        held = {register: _state(wave, register) for register in sources}
        if UNDEFINED not in held.values():
            step(wave)
            return
        known = {one: _defined_lanes(wave, one[1], state) for one, state in held.items()}
        a_rows = np.logical_and.reduce([known[one] for one in rows]).reshape(4, 16).all(0)
        b_columns = np.logical_and.reduce([known[one] for one in columns]).reshape(4, 16).all(0)
        cells = [known[one] for one in start] or [_EVERY_LANE] * 4
        _set_states(wave, sources, [DEFINED if state == UNDEFINED else state for state in held.values()])
        step(wave)
        _set_states(wave, sources, list(held.values()))
        for i in range(4):
            # lane 16 g + n holds row 4 g + i, column n in register i
            of_lane = np.repeat(a_rows.reshape(4, 4)[:, i], 16) & np.tile(b_columns, 4) & cells[i]
            wave.vector_states[result.index + i] = DEFINED
            wave.move(result.index + i, wave.u32[result.index + i].copy(), of_lane, _EVERY_LANE)

    return multiply


def _state(wave: Wave, register: Register) -> int:
    return (wave.vector_states if register[0] == "v" else wave.scalar_states)[register[1]]


def _set_states(wave: Wave, registers: Iterable[Register], states: list[int]) -> None:
    for (file, at), state in zip(registers, states, strict=True):
        (wave.vector_states if file == "v" else wave.scalar_states)[at] = state


def _defined_lanes(wave: Wave, register: int, state: int) -> Lanes:
    defined: Lanes = _EVERY_LANE if state == DEFINED else wave.defined[register].copy()
    return defined
