"""Wait states between dependent instructions, over every path of a kernel.

One instruction is one wait state, ``s_nop n`` is n + 1. Which pairs need how many: ``hazard_kinds``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernel.gfx950.errors import HazardError
from kernel.gfx950.parse import EXEC, M0, Instruction, Kernel, Operand

# Which registers an instruction reads and writes, from its text alone; for analyses that execute nothing.

Register = tuple[str, int]
"""("v", 0-511, accumulators from 256 on) or ("s", 0-127)."""


@dataclass(frozen=True)
class RegisterUse:
    reads: frozenset[Register]
    writes: frozenset[Register]


def registers_of(operand: Operand) -> frozenset[Register]:
    if not operand.is_register:
        return frozenset()
    file = "v" if operand.kind == "vector" else "s"
    return frozenset((file, operand.index + at) for at in range(operand.count))


def destinations(instruction: Instruction) -> int:
    """How many of the first operands are written."""
    name = instruction.mnemonic
    if name.startswith(("v_permlane", "v_swap")):
        return 2
    if "_co_u32" in name or name.startswith(("v_mad_u64", "v_mad_i64")):
        return 2
    if name.startswith(
        ("s_cmp", "s_bitcmp", "s_branch", "s_cbranch", "s_nop", "s_waitcnt", "s_barrier", "s_endpgm")
    ):
        return 0
    if name.startswith(("s_sleep", "s_setprio", "ds_write")) or "_store_" in name:
        return 0
    if "_load_lds_" in name or "lds" in instruction.modifiers:
        return 0
    return 1


def register_use(instruction: Instruction) -> RegisterUse:
    """exec, which every vector instruction reads, is left out of ``reads``; scc is no register here."""
    operands, count = instruction.operands, destinations(instruction)
    writes = frozenset[Register]().union(*(registers_of(o) for o in operands[:count]))
    reads = frozenset[Register]().union(*(registers_of(o) for o in operands[count:]))
    name = instruction.mnemonic
    keeps = name.startswith(("v_permlane", "v_swap", "v_fmac", "v_writelane", "s_addk", "s_mulk", "s_bitset"))
    if keeps or instruction.encoding == "dpp" or _keeps_a_part(instruction):
        reads |= writes
    if name.endswith("_saveexec_b64") or name.startswith("v_cmpx"):
        writes |= {("s", EXEC), ("s", EXEC + 1)}
    if "_load_lds_" in name or "lds" in instruction.modifiers:
        reads |= {("s", M0)}
    return RegisterUse(reads, writes)


def _keeps_a_part(instruction: Instruction) -> bool:
    """Whether sdwa writes a part of its result's register and keeps the rest, as it does unless told."""
    if instruction.encoding != "sdwa" or instruction.modifiers.get("dst_sel", "DWORD") == "DWORD":
        return False
    return instruction.modifiers.get("dst_unused", "UNUSED_PRESERVE") == "UNUSED_PRESERVE"


# The kinds of dependence that gfx950 does not check, and the wait states that each needs.
#
# The hardware leaves these distances to the compiler. What each kind needs was measured with LLVM 22's hazard
# recogniser for gfx950, one instruction pair at a time; ``v_mfma_f32_16x16x128_f8f6f4`` of 8-bit operands
# counts as 8 passes there. One kind LLVM 22 lacks: a gfx950 was seen to write overwritten data where a wide
# buffer store has a scalar offset (llvm-project pull request 197267, in LLVM 23). Vector instructions hidden
# in inline assembly are the danger: the recogniser does not see them, this does.

Registers = frozenset[Register]
Producer = Callable[[Instruction, RegisterUse], Registers]
Consumer = Callable[[Instruction, RegisterUse, Registers], bool]

_VECTOR_MEMORY = ("buffer_", "global_", "scratch_")
_MEMORY = ("ds_", *_VECTOR_MEMORY)
_WIDE_STORES = ("_store_dwordx3", "_store_dwordx4")
_TRANSCENDENTAL = ("v_rcp_", "v_rsq_", "v_sqrt_", "v_exp_", "v_log_", "v_sin_", "v_cos_")
_NOTHING: Registers = frozenset()


@dataclass(frozen=True)
class HazardKind:
    """``produces`` gives the registers at stake; ``consumes`` says if an instruction conflicts on them."""

    name: str
    needed: int
    produces: Producer
    consumes: Consumer


def _is_mfma(instruction: Instruction) -> bool:
    return instruction.mnemonic.startswith("v_mfma")


def _is_valu(instruction: Instruction) -> bool:
    return instruction.mnemonic.startswith("v_") and not _is_mfma(instruction)


def _is_vector(instruction: Instruction) -> bool:
    return _is_valu(instruction) or instruction.mnemonic.startswith(_MEMORY)


def _is_transcendental(instruction: Instruction) -> bool:
    return instruction.mnemonic.startswith(_TRANSCENDENTAL)


def _is_permlane(instruction: Instruction) -> bool:
    return instruction.mnemonic.startswith("v_permlane")


def _scalars(registers: Registers) -> Registers:
    return frozenset(r for r in registers if r[0] == "s")


def _vectors(registers: Registers) -> Registers:
    return frozenset(r for r in registers if r[0] == "v")


# -- producers


def _matrix_result(instruction: Instruction, use: RegisterUse) -> Registers:
    return use.writes if _is_mfma(instruction) else _NOTHING


def _matrix_c(instruction: Instruction, use: RegisterUse) -> Registers:
    # where C is also the result, overwriting it is the hazard of the result
    return registers_of(instruction.operands[3]) - use.writes if _is_mfma(instruction) else _NOTHING


def _vector_result(instruction: Instruction, use: RegisterUse) -> Registers:
    return _vectors(use.writes) if _is_valu(instruction) else _NOTHING


def _scalar_result(instruction: Instruction, use: RegisterUse) -> Registers:
    return _scalars(use.writes) if _is_valu(instruction) else _NOTHING


def _exec_result(instruction: Instruction, use: RegisterUse) -> Registers:
    return use.writes & {("s", EXEC)} if _is_valu(instruction) else _NOTHING


def _transcendental_result(instruction: Instruction, use: RegisterUse) -> Registers:
    return _vectors(use.writes) if _is_transcendental(instruction) else _NOTHING


def _partial_result(instruction: Instruction, use: RegisterUse) -> Registers:
    """What sdwa writes to a part of a register: its bits are moved there late."""
    partial = instruction.encoding == "sdwa" and instruction.modifiers.get("dst_sel", "DWORD") != "DWORD"
    return _vectors(use.writes) if partial else _NOTHING


def _wide_store_data(instruction: Instruction, _use: RegisterUse) -> Registers:
    """Stores of 12 and 16 bytes read their data late; buffer stores with a scalar offset a state earlier."""
    name, operands = instruction.mnemonic, instruction.operands
    if not (name.startswith(_VECTOR_MEMORY) and name.endswith(_WIDE_STORES)) or _is_scalar_offset(
        instruction
    ):
        return _NOTHING
    return registers_of(operands[0 if name.startswith("buffer_") else 1])


def _offset_store_data(instruction: Instruction, _use: RegisterUse) -> Registers:
    return registers_of(instruction.operands[0]) if _is_scalar_offset(instruction) else _NOTHING


def _is_scalar_offset(instruction: Instruction) -> bool:
    name = instruction.mnemonic
    return name.startswith("buffer_") and name.endswith(_WIDE_STORES) and instruction.operands[3].is_register


def _m0(instruction: Instruction, use: RegisterUse) -> Registers:
    return use.writes & {("s", M0)} if instruction.mnemonic.startswith("s_") else _NOTHING


# -- consumers


def _reads(who: Callable[[Instruction], bool]) -> Consumer:
    return lambda instruction, use, at_stake: who(instruction) and bool(use.reads & at_stake)


def _writes(who: Callable[[Instruction], bool]) -> Consumer:
    return lambda instruction, use, at_stake: who(instruction) and bool(use.writes & at_stake)


def _reads_or_writes(who: Callable[[Instruction], bool]) -> Consumer:
    return lambda i, use, at_stake: who(i) and bool((use.reads | use.writes) & at_stake)


def _under_exec(who: Callable[[Instruction], bool]) -> Consumer:
    """exec is no operand in the text: each such instruction reads it."""
    return lambda instruction, _use, _at_stake: who(instruction)


def _reads_factor(instruction: Instruction, _use: RegisterUse, at_stake: Registers) -> bool:
    if not _is_mfma(instruction):
        return False
    return bool((registers_of(instruction.operands[1]) | registers_of(instruction.operands[2])) & at_stake)


def _accumulates_shifted(instruction: Instruction, use: RegisterUse, at_stake: Registers) -> bool:
    if not _is_mfma(instruction):
        return False
    c = registers_of(instruction.operands[3])
    return bool(c & at_stake & use.reads) and c != at_stake


def _moves_lanes(instruction: Instruction, _use: RegisterUse, at_stake: Registers) -> bool:
    return instruction.encoding == "dpp" and bool(registers_of(instruction.operands[1]) & at_stake)


def _picks_lane(instruction: Instruction, _use: RegisterUse, at_stake: Registers) -> bool:
    takes_number = instruction.mnemonic in ("v_readlane_b32", "v_writelane_b32")
    return takes_number and bool(registers_of(instruction.operands[2]) & at_stake)


def _reads_lane(instruction: Instruction) -> bool:
    return instruction.mnemonic.startswith(("v_readlane", "v_readfirstlane"))


def _accesses_memory(instruction: Instruction) -> bool:
    return instruction.mnemonic.startswith(_MEMORY)


KINDS = (
    HazardKind(
        "matrix result read by a vector or memory instruction", 12, _matrix_result, _reads(_is_vector)
    ),
    HazardKind(
        "matrix result overwritten by a vector or memory instruction",
        12,
        _matrix_result,
        _writes(_is_vector),
    ),
    HazardKind("matrix result read as A or B of the next", 12, _matrix_result, _reads_factor),
    HazardKind("matrix result partly read as C of the next", 10, _matrix_result, _accumulates_shifted),
    HazardKind("C overwritten by a vector instruction", 7, _matrix_c, _writes(_is_valu)),
    HazardKind("vector result read by a matrix instruction", 2, _vector_result, _reads(_is_mfma)),
    HazardKind("vector result read across lanes by dpp", 2, _vector_result, _moves_lanes),
    HazardKind("vector result read by a lane swap", 2, _vector_result, _reads(_is_permlane)),
    HazardKind("vector result read by v_readlane or v_readfirstlane", 1, _vector_result, _reads(_reads_lane)),
    HazardKind(
        "transcendental result read by another vector instruction",
        1,
        _transcendental_result,
        _reads(lambda i: _is_valu(i) and not _is_transcendental(i)),
    ),
    HazardKind(
        "part of a register that sdwa wrote, used by a vector instruction",
        1,
        _partial_result,
        _reads_or_writes(lambda i: i.mnemonic.startswith("v_")),
    ),
    HazardKind(
        "data of a 12- or 16-byte store overwritten by a vector instruction",
        2,
        _wide_store_data,
        _writes(lambda i: i.mnemonic.startswith("v_")),
    ),
    HazardKind(
        "data of a 12- or 16-byte store with a scalar offset overwritten by a vector instruction",
        1,
        _offset_store_data,
        _writes(lambda i: i.mnemonic.startswith("v_")),
    ),
    HazardKind(
        "scalar of a vector instruction read by a vector instruction", 2, _scalar_result, _reads(_is_valu)
    ),
    HazardKind(
        "scalar of a vector instruction read by a memory instruction",
        5,
        _scalar_result,
        _reads(_accesses_memory),
    ),
    HazardKind("scalar of a vector instruction read as a lane number", 4, _scalar_result, _picks_lane),
    HazardKind(
        "exec of a vector compare used by dpp", 5, _exec_result, _under_exec(lambda i: i.encoding == "dpp")
    ),
    HazardKind(
        "exec of a vector compare used by a memory instruction",
        5,
        _exec_result,
        _under_exec(lambda i: i.mnemonic.startswith(_VECTOR_MEMORY)),
    ),
    HazardKind(
        "exec of a vector compare used by a lane access or a matrix instruction",
        4,
        _exec_result,
        _under_exec(
            lambda i: _reads_lane(i) or _is_permlane(i) or _is_mfma(i) or i.mnemonic.startswith("v_writelane")
        ),
    ),
    HazardKind("m0 used by a DMA to LDS", 1, _m0, lambda _i, use, at_stake: bool(use.reads & at_stake)),
)


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
        self.next = [self._successors(kernel, at) for at in range(len(kernel.instructions))]

    def _successors(self, kernel: Kernel, at: int) -> tuple[int, ...]:
        name = self.instructions[at].mnemonic
        follows = (at + 1,) if at + 1 < len(self.instructions) else ()
        if name == "s_endpgm":
            return ()
        if name == "s_branch":
            return (kernel.target(self.instructions[at]),)
        return (*follows, kernel.target(self.instructions[at])) if name.startswith("s_cbranch") else follows

    def fewest(self, kind: HazardKind) -> HazardDistance:
        best = HazardDistance(kind.name, kind.needed, None)
        for at, instruction in enumerate(self.instructions):
            at_stake = kind.produces(instruction, self.uses[at])
            if not at_stake:
                continue
            # twice the need is far enough to say how much is left
            limit = 2 * kind.needed if best.seen is None else best.seen
            found = self._nearest(kind, at, at_stake, limit)
            if found is not None and (best.seen is None or found[0] < best.seen):
                consumer = self.instructions[found[1]].line
                best = HazardDistance(kind.name, kind.needed, found[0], instruction.line, consumer)
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
                if nearest is None or states < nearest[0]:
                    nearest = (states, at)
                continue
            states += int(instruction.operands[0].number) + 1 if instruction.mnemonic == "s_nop" else 1
            reached += [(states, following) for following in self.next[at]]
        return nearest
