"""Wait states between dependent instructions, over every path of a kernel.

One instruction is one wait state, ``s_nop n`` is n + 1. Which pairs need how many: ``KINDS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from kernel.gfx950.errors import HazardError
from kernel.gfx950.isa import is_dma, row_of, table
from kernel.gfx950.isa.table import Row
from kernel.gfx950.program import EXEC, M0, Instruction, Kernel, Operand

# ---- Registers read and written, and control flow: for analyses that execute nothing ----

Register = tuple[str, int]
"""("v", 0-511, accumulators from 256 on) or ("s", 0-127)."""
Registers = frozenset[Register]
_NOTHING: Registers = frozenset()


@dataclass(frozen=True)
class RegisterUse:
    reads: Registers
    writes: Registers


def registers_of(operand: Operand) -> Registers:
    if not operand.is_register:
        return _NOTHING
    return _registers("v" if operand.kind == "vector" else "s", operand.index, operand.count)


@cache
def _registers(file: str, first: int, count: int) -> Registers:
    return frozenset((file, first + at) for at in range(count))


def register_use(instruction: Instruction) -> RegisterUse:
    """exec, which every vector instruction reads, is left out of ``reads``; scc is no register here."""
    row, operands, dma = row_of(instruction), instruction.operands, is_dma(instruction)
    count = 0 if dma else row.destinations
    writes = Registers().union(*(registers_of(o) for o in operands[:count]))
    reads = Registers().union(*(registers_of(o) for o in operands[count:]))
    if row.keeps or instruction.encoding == "dpp" or _keeps_a_part(instruction):
        reads |= writes
    if row.writes_exec:
        writes |= {("s", EXEC), ("s", EXEC + 1)}
    if dma:
        reads |= {("s", M0)}
    return RegisterUse(reads, writes)


def _keeps_a_part(instruction: Instruction) -> bool:
    """Whether sdwa writes a part of its result's register and keeps the rest, as it does unless told."""
    if instruction.encoding != "sdwa" or instruction.modifiers.get("dst_sel", "DWORD") == "DWORD":
        return False
    return instruction.modifiers.get("dst_unused", "UNUSED_PRESERVE") == "UNUSED_PRESERVE"


def successors(kernel: Kernel, at: int) -> Iterator[int]:
    """Indices of the instructions that may follow instruction ``at``."""
    instruction = kernel.instructions[at]
    row = row_of(instruction)
    if row.falls_through and at + 1 < len(kernel.instructions):
        yield at + 1
    if row.kind == "branch":
        yield kernel.target(instruction)


# ---- The kinds of dependence that gfx950 does not check, and the wait states that each needs ----
#
# The hardware leaves these distances to the compiler. What each kind needs was measured with LLVM 22's hazard
# recogniser for gfx950, one instruction pair at a time; ``v_mfma_f32_16x16x128_f8f6f4`` of 8-bit operands
# counts as 8 passes there. One kind LLVM 22 lacks: a gfx950 was seen to write overwritten data where a wide
# buffer store has a scalar offset (llvm-project pull request 197267, in LLVM 23). Vector instructions hidden
# in inline assembly are the danger: the recogniser does not see them, this does.

Producer = Callable[[Instruction, RegisterUse], Registers]
Consumer = Callable[[Instruction, RegisterUse, Registers], bool]

_VECTOR_MEMORY = ("vmem_load", "vmem_store")
_MEMORY = ("lds_read", "lds_write", *_VECTOR_MEMORY)
_LANE_ACCESSES = ("lane read", "lane swap", "lane write")


@dataclass(frozen=True)
class HazardKind:
    """``produces`` gives the registers at stake; ``consumes`` says if an instruction conflicts on them."""

    name: str
    needed: int
    produces: Producer
    consumes: Consumer


def _is_mfma(row: Row) -> bool:
    return row.hazard == "matrix of 8 passes"


def _is_valu(row: Row) -> bool:
    return row.kind == "valu"


def _is_transcendental(row: Row) -> bool:
    return row.hazard == "transcendental"


def _is_vector_or_memory(row: Row) -> bool:
    return row.kind == "valu" or row.kind in _MEMORY


def _is_vector_or_matrix(row: Row) -> bool:
    return row.kind in ("valu", "mfma")


# -- producers


def _results(file: str, who: Callable[[Row], bool]) -> Producer:
    return lambda i, use: frozenset(r for r in use.writes if r[0] == file) if who(row_of(i)) else _NOTHING


def _special_result(register: int, who: Callable[[Row], bool]) -> Producer:
    return lambda i, use: use.writes & {("s", register)} if who(row_of(i)) else _NOTHING


_matrix_result = _results("v", _is_mfma)
_vector_result = _results("v", _is_valu)
_scalar_result = _results("s", _is_valu)
_exec_result = _special_result(EXEC, _is_valu)


def _matrix_c(instruction: Instruction, use: RegisterUse) -> Registers:
    # where C is also the result, overwriting it is the hazard of the result
    return registers_of(instruction.operands[3]) - use.writes if _is_mfma(row_of(instruction)) else _NOTHING


def _partial_result(instruction: Instruction, use: RegisterUse) -> Registers:
    """What sdwa writes to a part of a register: its bits are moved there late."""
    partial = instruction.encoding == "sdwa" and instruction.modifiers.get("dst_sel", "DWORD") != "DWORD"
    return _vector_result(instruction, use) if partial else _NOTHING


def _wide_store_data(*, scalar_offset: bool) -> Producer:
    """Stores of 12 and 16 bytes read their data late; buffer stores with a scalar offset a state earlier."""

    def produces(instruction: Instruction, _use: RegisterUse) -> Registers:
        row = row_of(instruction)
        buffer = row.rule is table.buffer
        wide = row.kind == "vmem_store" and row.lane_bytes >= 12
        if not wide or (buffer and instruction.operands[-1].is_register) != scalar_offset:
            return _NOTHING
        return registers_of(instruction.operands[0 if buffer else 1])

    return produces


# -- consumers


def _reads(who: Callable[[Row], bool]) -> Consumer:
    return lambda i, use, at_stake: not use.reads.isdisjoint(at_stake) and who(row_of(i))


def _writes(who: Callable[[Row], bool]) -> Consumer:
    return lambda i, use, at_stake: not use.writes.isdisjoint(at_stake) and who(row_of(i))


def _under_exec(who: Callable[[Row], bool]) -> Consumer:
    """exec is no operand in the text: each such instruction reads it."""
    return lambda i, _use, _at_stake: who(row_of(i))


def _reads_factor(instruction: Instruction, _use: RegisterUse, at_stake: Registers) -> bool:
    factors = instruction.operands[1:3] if _is_mfma(row_of(instruction)) else ()
    return any(registers_of(factor) & at_stake for factor in factors)


def _accumulates_shifted(instruction: Instruction, use: RegisterUse, at_stake: Registers) -> bool:
    if not _is_mfma(row_of(instruction)):
        return False
    c = registers_of(instruction.operands[3])
    return bool(c & at_stake & use.reads) and c != at_stake


def _moves_lanes(instruction: Instruction, _use: RegisterUse, at_stake: Registers) -> bool:
    return instruction.encoding == "dpp" and bool(registers_of(instruction.operands[1]) & at_stake)


def _picks_lane(instruction: Instruction, _use: RegisterUse, at_stake: Registers) -> bool:
    lane_access = row_of(instruction).hazard in ("lane read", "lane write")
    return lane_access and any(registers_of(number) & at_stake for number in instruction.operands[2:])


def _touches_in_vector(instruction: Instruction, use: RegisterUse, at_stake: Registers) -> bool:
    return _is_vector_or_matrix(row_of(instruction)) and bool((use.reads | use.writes) & at_stake)


# fmt: off
KINDS = (
    HazardKind("matrix result read by a vector or memory instruction", 12,
               _matrix_result, _reads(_is_vector_or_memory)),
    HazardKind("matrix result overwritten by a vector or memory instruction", 12,
               _matrix_result, _writes(_is_vector_or_memory)),
    HazardKind("matrix result read as A or B of the next", 12, _matrix_result, _reads_factor),
    HazardKind("matrix result partly read as C of the next", 10, _matrix_result, _accumulates_shifted),
    HazardKind("C overwritten by a vector instruction", 7, _matrix_c, _writes(_is_valu)),
    HazardKind("vector result read by a matrix instruction", 2, _vector_result, _reads(_is_mfma)),
    HazardKind("vector result read across lanes by dpp", 2, _vector_result, _moves_lanes),
    HazardKind("vector result read by a lane swap", 2,
               _vector_result, _reads(lambda row: row.hazard == "lane swap")),
    HazardKind("vector result read by v_readlane or v_readfirstlane", 1,
               _vector_result, _reads(lambda row: row.hazard == "lane read")),
    HazardKind("transcendental result read by another vector instruction", 1,
               _results("v", _is_transcendental),
               _reads(lambda row: _is_valu(row) and not _is_transcendental(row))),
    HazardKind("part of a register that sdwa wrote, used by a vector instruction", 1,
               _partial_result, _touches_in_vector),
    HazardKind("data of a 12- or 16-byte store overwritten by a vector instruction", 2,
               _wide_store_data(scalar_offset=False), _writes(_is_vector_or_matrix)),
    HazardKind("data of a 12- or 16-byte store with a scalar offset overwritten by a vector instruction", 1,
               _wide_store_data(scalar_offset=True), _writes(_is_vector_or_matrix)),
    HazardKind("scalar of a vector instruction read by a vector instruction", 2,
               _scalar_result, _reads(_is_valu)),
    HazardKind("scalar of a vector instruction read by a memory instruction", 5,
               _scalar_result, _reads(lambda row: row.kind in _MEMORY)),
    HazardKind("scalar of a vector instruction read as a lane number", 4, _scalar_result, _picks_lane),
    HazardKind("exec of a vector compare used by dpp", 5,
               _exec_result, lambda i, _use, _at_stake: i.encoding == "dpp"),
    HazardKind("exec of a vector compare used by a memory instruction", 5,
               _exec_result, _under_exec(lambda row: row.kind in _VECTOR_MEMORY)),
    HazardKind("exec of a vector compare used by a lane access or a matrix instruction", 4, _exec_result,
               _under_exec(lambda row: row.kind == "mfma" or row.hazard in _LANE_ACCESSES)),
    HazardKind("m0 used by a DMA to LDS", 1, _special_result(M0, lambda row: row.kind in ("salu", "smem")),
               lambda _i, use, at_stake: bool(use.reads & at_stake)),
)
# fmt: on


@dataclass(frozen=True)
class HazardDistance:
    """The fewest wait states seen between a producer and a consumer of this kind, and what the kind needs.

    Lines are those of the assembly; ``seen`` is None where the kernel has no such pair within reach.
    """

    kind: str
    needed: int
    seen: int | None
    producer_line: int | None = None
    consumer_line: int | None = None

    @property
    def ok(self) -> bool:
        return self.seen is None or self.seen >= self.needed

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": self.kind, "needed": self.needed, "seen": self.seen, "ok": self.ok}


def hazard_distances(kernel: Kernel) -> list[HazardDistance]:
    """The fewest wait states of each kind over all paths of the kernel."""
    flow = _Flow(kernel)
    return [flow.fewest(kind) for kind in KINDS]


def check_hazards(kernel: Kernel) -> None:
    """Raises HazardError at the consumer if any pair on any path is closer than gfx950 needs."""
    for distance in hazard_distances(kernel):
        if not distance.ok:
            texts = {instruction.line: instruction.text for instruction in kernel.instructions}
            raise HazardError(
                f"{distance.kind}: {distance.seen} wait states after line {distance.producer_line} "
                f"(`{texts[distance.producer_line or 0]}`), {distance.needed} are needed"
            ).locate(line=distance.consumer_line, text=texts[distance.consumer_line or 0], kernel=kernel.name)


class _Flow:
    def __init__(self, kernel: Kernel) -> None:
        self.instructions = kernel.instructions
        self.uses = [register_use(instruction) for instruction in kernel.instructions]
        self.next = [tuple(successors(kernel, at)) for at in range(len(kernel.instructions))]
        self.produced: dict[Producer, list[tuple[int, Registers]]] = {}
        self.states = [
            int(one.operands[0].number) + 1 if row_of(one).kind == "nop" else 1 for one in kernel.instructions
        ]

    def fewest(self, kind: HazardKind) -> HazardDistance:
        best = HazardDistance(kind.name, kind.needed, None)
        if kind.produces not in self.produced:  # which several kinds share
            pairs = enumerate(zip(self.instructions, self.uses, strict=True))
            found_by = ((at, kind.produces(instruction, use)) for at, (instruction, use) in pairs)
            self.produced[kind.produces] = [(at, registers) for at, registers in found_by if registers]
        for at, at_stake in self.produced[kind.produces]:
            # twice the need is far enough to say how much is left
            limit = 2 * kind.needed if best.seen is None else best.seen - 1
            found = self._nearest(kind, at, at_stake, limit)
            if found is not None:
                consumer = self.instructions[found[1]].line
                best = HazardDistance(kind.name, kind.needed, found[0], self.instructions[at].line, consumer)
        return best

    def _nearest(
        self, kind: HazardKind, start: int, at_stake: frozenset[Register], limit: int
    ) -> tuple[int, int] | None:
        """Wait states to the nearest consumer within ``limit``, and which instruction it is."""
        nearest: tuple[int, int] | None = None
        shortest: dict[int, int] = {}
        reached = [(0, following) for following in self.next[start]]
        while reached:
            states, at = reached.pop()
            if states > limit or shortest.get(at, limit + 1) <= states:
                continue
            shortest[at] = states
            instruction = self.instructions[at]
            if kind.consumes(instruction, self.uses[at], at_stake):
                nearest, limit = (states, at), states - 1
                continue
            states += self.states[at]
            reached += [(states, following) for following in self.next[at]]
        return nearest
