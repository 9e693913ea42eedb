"""Mutants that compute the same, and why.

Most are shown by a program: an analysis of every path says so, or launches in which the mutant's effect is
followed. Where the reason lies in what a row or a work item may hold there are lists, reviewed one by one
(``*_equivalents.py``): an entry names the change between its neighbours, and what a compare does in the
launches, and is asked only about a mutant that survived them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel.gfx950 import (
    HazardError,
    Instruction,
    InterpreterError,
    Kernel,
    UndefinedReadError,
    check_hazards,
)
from kernel.gfx950.hazards import Register, register_use, successors
from kernel.gfx950.isa import row_of
from kernel.gfx950.isa.form import Step, Stop
from kernel.gfx950.launch import decode, decode_with
from kernel.gfx950.program import EXEC
from kernel.gfx950.wave import DEFINED, IN_FLIGHT, UNDEFINED, Flight, Wave
from tests.mutation.launch import Launch
from tests.mutation.mutants import NOP_SHORTENED, Mutant, mutated

# Whether anything depends on the result of an instruction: it is poisoned, and the poison is followed.
#
# The kernel runs as it is, with its own values, but whatever the instruction writes counts as undefined. The
# interpreter follows undefined lanes and bits through moves, arithmetic and selections; here they also go
# through scalar arithmetic, loads, LDS and matrix multiplications. Where they would decide a branch, exec, a
# store or an address in LDS, the run ends with an UndefinedReadError: the result is used. A run that ends
# well would have written the same bytes by the same path with any other result.

_LENIENT = ("salu", "smem", "vmem_load", "lds_read")
"""What only computes, or reads memory: from undefined values comes an undefined result."""
_POISONABLE = ("valu", "mfma", "lds_write", *_LENIENT)
_EVERY_LANE = np.ones(64, np.bool_)

Lanes = npt.NDArray[np.bool_]


def can_be_poisoned(instruction: Instruction) -> bool:
    """Whether all that an instruction does is its result: in registers, scc or bytes of LDS."""
    row, written = row_of(instruction), register_use(instruction).writes
    has_result = bool(written) or row.sets_scc or row.kind == "lds_write"
    return row.kind in _POISONABLE and has_result and not _writes_exec(instruction)


def _writes_exec(instruction: Instruction) -> bool:
    return ("s", EXEC) in register_use(instruction).writes


def poisoned(kernel: Kernel, index: int) -> Kernel:
    """The kernel with the result of instruction ``index`` undefined."""
    steps: dict[int, Step] = {}
    for at, (instruction, step) in enumerate(zip(kernel.instructions, decode(kernel).steps, strict=True)):
        if isinstance(step, Stop):
            continue
        kind = row_of(instruction).kind
        if kind == "lds_write":
            step = steps[at] = _undefined_to_lds(instruction, step)
        elif kind == "mfma":
            step = steps[at] = _undefined_to_tile(instruction, step)
        elif kind in _LENIENT and not _writes_exec(instruction):
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
    row = row_of(instruction)
    if row.kind == "lds_write":
        granules = wave.counters.lds[-1].lds_granules
        if granules is not None:
            wave.lds.defined[granules] = False
    if row.sets_scc:
        wave.set_scc(None)
    lanes = _EVERY_LANE if row.kind == "mfma" or row.hazard == "lane swap" else wave.lanes
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


# Whether a mutant changes only what the causal mask hides: products that lose every max.
#
# A mask is the start value of a product, 0 or at most -2^27, and a product of finite 8-bit values adds less
# than 2^25. So a cell that starts below ``_HIDDEN`` in both kernels stays below every score in both. Compared
# are all matrix multiplications of a run, in order: their start values are equal or hidden in both, and so
# are their operands unless all their cells are hidden.

_HIDDEN = np.float32(-(2.0**26))
_EVERY_CELL_AT_0 = np.zeros((4, 64), np.float32)


@dataclass(frozen=True)
class _Product:
    """One multiplication: its operands' bytes, its format, and ``[4, 64]`` start values."""

    instruction: int
    operands: tuple[bytes, bytes]
    formats: tuple[object, object]
    start: npt.NDArray[np.float32]


def changes_hidden_products_only(kernel: Kernel, mutant: Mutant, launches: Iterable[Launch]) -> bool:
    """Whether some products differ, and those of every launch are the same, or hidden in both."""
    changed = mutated(kernel, mutant)
    any_differs = False
    for launch in launches:
        ours, theirs = _products(launch, kernel), _products(launch, changed)
        if len(ours) != len(theirs):
            return False
        for one, two in zip(ours, theirs, strict=True):
            same_start = one.start.view(np.uint32) == two.start.view(np.uint32)
            hidden = (one.start <= _HIDDEN) & (two.start <= _HIDDEN)
            same_operands = one.operands == two.operands
            if (one.instruction, one.formats) != (two.instruction, two.formats):
                return False
            if not (same_start | hidden).all() or not (same_operands or hidden.all()):
                return False
            any_differs = any_differs or not same_operands or not same_start.all()
    return any_differs


def _products(launch: Launch, kernel: Kernel) -> list[_Product]:
    found: list[_Product] = []
    steps: dict[int, Step] = {}
    for at, (instruction, step) in enumerate(zip(kernel.instructions, decode(kernel).steps, strict=True)):
        if row_of(instruction).kind == "mfma" and not isinstance(step, Stop):
            steps[at] = _recording(at, instruction, step, found)
    launch.run(decode_with(kernel, steps))
    return found


def _recording(at: int, instruction: Instruction, step: Step, found: list[_Product]) -> Step:
    a, b, c = instruction.operands[1:]
    formats = (instruction.modifiers.get("cbsz"), instruction.modifiers.get("blgp"))

    def multiply(wave: Wave) -> None:
        operands = [wave.vectors[one.index : one.index + one.count].tobytes() for one in (a, b)]
        start = _EVERY_CELL_AT_0 + np.float32(c.number)
        if c.is_register:
            start = wave.vectors[c.index : c.index + c.count].view(np.float32).copy()
        found.append(_Product(at, (operands[0], operands[1]), formats, start))
        step(wave)

    return multiply


# Proof that an instruction writes what its registers hold already, on every path.
#
# Register allocation leaves such copies where paths meet. A copy makes its two registers equal, and any
# instruction of ``_PURE`` makes its result equal to that text, until one of the registers that it names is
# written. What holds at the end of every way that leads to an instruction holds there.

_COPIES = {"v_mov_b32": 1, "v_mov_b64": 2, "s_mov_b32": 1, "s_mov_b64": 2}
"""Registers that each copies."""
_PURE = ("v_readfirstlane_b32",)

Fact = tuple[str, frozenset[Register]]
"""What holds, and the registers that it is about."""


def writes_what_is_there(kernel: Kernel, index: int) -> bool:
    """Whether every path comes to the instruction with its result in place."""
    wanted = frozenset(_facts(kernel.instructions[index]))
    return bool(wanted) and wanted <= _held(kernel)[index]


def _held(kernel: Kernel) -> list[frozenset[Fact]]:
    """The facts in front of each instruction; of one that no path reaches, none."""
    held: list[frozenset[Fact] | None] = [None] * len(kernel.instructions)
    held[0] = frozenset()
    due = [0]
    while due:
        at = due.pop()
        before = held[at]
        assert before is not None
        after = _behind(kernel.instructions[at], before)
        for following in successors(kernel, at):
            known = held[following]
            joined = after if known is None else known & after
            if joined != known:
                held[following] = joined
                due.append(following)
    return [facts or frozenset() for facts in held]


def _behind(instruction: Instruction, before: frozenset[Fact]) -> frozenset[Fact]:
    written = register_use(instruction).writes
    if ("s", EXEC) in written:  # lanes that a fact was not made for may come back
        return frozenset()
    return frozenset(fact for fact in before if not fact[1] & written) | frozenset(_facts(instruction))


def _facts(instruction: Instruction) -> Iterator[Fact]:
    name, operands = instruction.mnemonic, instruction.operands
    if instruction.modifiers or instruction.encoding in ("dpp", "sdwa"):
        return
    count = _COPIES.get(name)
    if count is not None and all(operand.is_register and not operand.modified for operand in operands):
        target, source = operands
        for at in range(count):
            pair = [("v" if one.kind == "vector" else "s", one.index + at) for one in (target, source)]
            yield "equal", frozenset(pair)
    if name in _PURE:
        use = register_use(instruction)
        if not use.reads & use.writes:
            yield " ".join(instruction.text.split()), use.reads | use.writes


# Proof that a kernel waits for every memory operation before it touches what the operation reads or writes.
#
# The interpreter finds a missing wait on the paths that it runs; this looks at every path. An operation is in
# flight until an ``s_waitcnt`` covers it: with ``cnt(n)``, when n younger ones of its counter are in flight
# on every path (scalar loads return in any order, so only ``lgkmcnt(0)`` covers one). Until then nothing may
# touch its registers, and no barrier may be passed with an LDS operation in flight. A kernel that this
# accepts needs no other wait.

_SCALAR_LOAD, _LDS, _VECTOR = "scalar load", "LDS", "vector memory"
_COUNTERS = {
    "smem": _SCALAR_LOAD, "lds_read": _LDS, "lds_write": _LDS, "vmem_load": _VECTOR, "vmem_store": _VECTOR,
}  # fmt: skip
_BARRIER = "the barrier"

InFlight = dict[tuple[str, Register | str], int]
"""By (counter, what may not be touched): the fewest younger operations of that counter, over all paths."""


@dataclass(frozen=True)
class MissingWait:
    """``user`` touches what an operation in flight on some path reads or writes."""

    user: Instruction
    resource: Register | str


def missing_waits(kernel: Kernel) -> list[MissingWait]:
    """Every instruction that some path reaches too early, in the order of the kernel."""
    entry: list[InFlight | None] = [None] * len(kernel.instructions)
    entry[0] = {}
    due = [0]
    found: dict[int, MissingWait] = {}
    while due:
        at = due.pop()
        before = entry[at]
        instruction = kernel.instructions[at]
        if before is None:
            continue
        resource = _touched(instruction, before)
        if resource is not None:
            found[at] = MissingWait(instruction, resource)
        after = _after(instruction, before)
        for following in successors(kernel, at):
            joined = _join(entry[following], after)
            if joined != entry[following]:
                entry[following] = joined
                due.append(following)
    return [found[at] for at in sorted(found)]


def _counter(instruction: Instruction) -> str | None:
    return _COUNTERS.get(row_of(instruction).kind)


def _touched(instruction: Instruction, in_flight: InFlight) -> Register | str | None:
    use = register_use(instruction)
    touched: set[Register | str] = {*use.reads, *use.writes}
    if row_of(instruction).kind == "barrier":
        touched.add(_BARRIER)
    # Vector memory loads write in order, so one may load what an earlier one is still to write.
    in_order: frozenset[Register] = frozenset()
    if _counter(instruction) == _VECTOR:
        in_order = use.writes - use.reads
    return next(
        (
            resource
            for counter, resource in in_flight
            if resource in touched and not (counter == _VECTOR and resource in in_order)
        ),
        None,
    )


def _after(instruction: Instruction, before: InFlight) -> InFlight:
    if row_of(instruction).kind == "wait":
        return {key: younger for key, younger in before.items() if not _covered(instruction, key[0], younger)}
    counter = _counter(instruction)
    if counter is None:
        return before
    after = {key: younger + (key[0] == counter) for key, younger in before.items()}
    # what a store or a write still has to read was taken at the issue
    resources: set[Register | str] = set(register_use(instruction).writes)
    if counter == _LDS:
        resources.add(_BARRIER)
    return after | {(counter, resource): 0 for resource in resources}


def _covered(wait: Instruction, counter: str, younger: int) -> bool:
    if counter == _VECTOR:
        return younger >= int(str(wait.modifiers.get("vmcnt", 63)))
    left = int(str(wait.modifiers.get("lgkmcnt", 15)))
    return left == 0 if counter == _SCALAR_LOAD else left < 15 and younger >= left


def _join(one: InFlight | None, two: InFlight) -> InFlight:
    if one is None:
        return two
    return {
        key: min(one.get(key, two.get(key, 0)), two.get(key, one.get(key, 0))) for key in one.keys() | two
    }


@dataclass(frozen=True)
class Equivalent:
    """``change`` is a pattern within ``description``, ``reason`` says why no launch can tell.

    ``differs`` says of a compare whether the changed one ever decides otherwise: both ways are then taken,
    and lead to the same bytes and the same work; else the two values that it compares are never equal.
    ``None``: not asked, as of what is no compare.
    """

    reason: str
    change: str
    differs: bool | None = None


def proof(kernel: Kernel, mutant: Mutant) -> str:
    """Why a mutant changes nothing on any path, whatever the launch; "" if that is not so."""
    if mutant.operator == NOP_SHORTENED:
        try:
            check_hazards(mutated(kernel, mutant))
        except HazardError:
            return ""
        return "enough wait states on every path"
    if row_of(kernel.instructions[mutant.index]).kind == "wait" and not missing_waits(
        mutated(kernel, mutant)
    ):
        return "another wait covers it on every path"
    if mutant.operator == "deleted" and writes_what_is_there(kernel, mutant.index):
        return "its result is there already on every path"
    return ""


def has_no_use(kernel: Kernel, mutant: Mutant, launches: Sequence[Launch]) -> bool:
    """Whether nothing in the launches depends on what the changed instruction writes."""
    old, new = kernel.instructions[mutant.index], mutated(kernel, mutant).instructions[mutant.index]
    same_place = (
        register_use(new).writes <= register_use(old).writes and row_of(new).sets_scc <= row_of(old).sets_scc
    )
    if row_of(old).kind == "lds_write":
        same_place = mutant.operator == "deleted"
    if not same_place or not can_be_poisoned(old):
        return False
    changed = poisoned(kernel, mutant.index)
    try:
        for launch in launches:
            launch.run(changed)
    except InterpreterError:  # a read of the undefined result, or what came of it, an address for one
        return False
    return True


def is_hidden(kernel: Kernel, mutant: Mutant, launches: Sequence[Launch]) -> bool:
    """Whether the changed instruction computes, and all that comes of it loses every max."""
    changed = kernel.instructions[mutant.index]
    computes = row_of(changed).kind in ("valu", "mfma") and not changed.mnemonic.startswith("v_cmp")
    multiplies = any(row_of(one).kind == "mfma" for one in kernel.instructions)
    return computes and multiplies and changes_hidden_products_only(kernel, mutant, launches)


def reviewed(entries: Sequence[Equivalent], kernel: Kernel, mutant: Mutant, differs: bool | None) -> str:
    """The reason of the first entry that a mutant fits, "" without one. ``differs``: whether a changed
    compare was seen to decide otherwise."""
    text = description(kernel, mutant)
    fitting = (one for one in entries if one.differs in (None, differs) and re.search(one.change, text))
    return next((one.reason for one in fitting), "")


def description(kernel: Kernel, mutant: Mutant) -> str:
    """The change between its neighbours, without the numbers of registers.

    "before; operator: old -> new; after", with three instructions on either side.
    """
    at = mutant.index
    before = _shapes(kernel.instructions[max(at - 3, 0) : at])
    after = _shapes(kernel.instructions[at + 1 : at + 4])
    old = _shape(kernel.instructions[at].text)
    return f"{before}; {mutant.operator}: {old} -> {_shape(mutant.text)}; {after}"


def _shapes(instructions: Sequence[Instruction]) -> str:
    return "; ".join(_shape(instruction.text) for instruction in instructions)


def _shape(text: str) -> str:
    return re.sub(r"\b([sva])(\d+|\[\d+:\d+\])", r"\1", re.sub(r"\s+", " ", text.strip()))
