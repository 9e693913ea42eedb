"""Wait states between instructions whose dependence gfx950 does not check, over every path of a kernel.

The hardware leaves these distances to the compiler: one instruction is one wait state, ``s_nop n`` is n + 1.
What each kind needs was measured with LLVM 22's hazard recogniser for gfx950, one instruction pair at a time;
``v_mfma_f32_16x16x128_f8f6f4`` of 8-bit operands counts as 8 passes there. Vector instructions hidden in
inline assembly are the danger: the recogniser does not see them, this does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernel.gfx950.errors import HazardError
from kernel.gfx950.operands import EXEC, M0
from kernel.gfx950.parse import Instruction, Kernel
from kernel.gfx950.register_use import Register, RegisterUse, register_use, registers_of

_MEMORY = ("ds_", "buffer_", "global_", "scratch_")


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


@dataclass(frozen=True)
class _Kind:
    """``produces`` gives the registers at stake; ``consumes`` says if an instruction conflicts on them."""

    name: str
    needed: int
    produces: Callable[[Instruction, RegisterUse], frozenset[Register]]
    consumes: Callable[[Instruction, RegisterUse, frozenset[Register]], bool]


def _is_mfma(instruction: Instruction) -> bool:
    return instruction.mnemonic.startswith("v_mfma")


def _is_valu(instruction: Instruction) -> bool:
    return instruction.mnemonic.startswith("v_") and not _is_mfma(instruction)


def _is_vector(instruction: Instruction) -> bool:
    return _is_valu(instruction) or instruction.mnemonic.startswith(_MEMORY)


def _scalars(registers: frozenset[Register]) -> frozenset[Register]:
    return frozenset(r for r in registers if r[0] == "s")


def _vectors(registers: frozenset[Register]) -> frozenset[Register]:
    return frozenset(r for r in registers if r[0] == "v")


def _result(instruction: Instruction, use: RegisterUse) -> frozenset[Register]:
    return use.writes if _is_mfma(instruction) else frozenset()


def _c_operand(instruction: Instruction, use: RegisterUse) -> frozenset[Register]:
    # where C is also the result, overwriting it is the hazard of the result
    return registers_of(instruction.operands[3]) - use.writes if _is_mfma(instruction) else frozenset()


def _valu_vectors(instruction: Instruction, use: RegisterUse) -> frozenset[Register]:
    return _vectors(use.writes) if _is_valu(instruction) else frozenset()


def _valu_scalars(instruction: Instruction, use: RegisterUse) -> frozenset[Register]:
    return _scalars(use.writes) if _is_valu(instruction) else frozenset()


def _valu_exec(instruction: Instruction, use: RegisterUse) -> frozenset[Register]:
    return use.writes & {("s", EXEC)} if _is_valu(instruction) else frozenset()


def _late_result(instruction: Instruction, use: RegisterUse) -> frozenset[Register]:
    late = instruction.mnemonic.startswith("v_rcp") or instruction.encoding == "sdwa"
    return _vectors(use.writes) if late else frozenset()


def _m0(instruction: Instruction, use: RegisterUse) -> frozenset[Register]:
    return use.writes & {("s", M0)} if instruction.mnemonic.startswith("s_") else frozenset()


def _reads_mask(instruction: Instruction, use: RegisterUse, at_stake: frozenset[Register]) -> bool:
    takes_mask = instruction.mnemonic in (
        "v_cndmask_b32",
        "v_addc_co_u32",
        "v_subb_co_u32",
        "v_subbrev_co_u32",
    )
    return takes_mask and bool(registers_of(instruction.operands[-1]) & at_stake & use.reads)


def _accumulates_shifted(instruction: Instruction, use: RegisterUse, at_stake: frozenset[Register]) -> bool:
    if not _is_mfma(instruction):
        return False
    c = registers_of(instruction.operands[3])
    return bool(c & at_stake & use.reads) and c != at_stake


KINDS = (
    _Kind(
        "matrix result read by a vector or memory instruction",
        12,
        _result,
        lambda i, use, regs: _is_vector(i) and bool(use.reads & regs),
    ),
    _Kind(
        "matrix result overwritten by a vector instruction",
        12,
        _result,
        lambda i, use, regs: _is_valu(i) and bool(use.writes & regs),
    ),
    _Kind(
        "matrix result read as A or B of the next",
        12,
        _result,
        lambda i, _use, regs: _is_mfma(i) and bool(_factors(i) & regs),
    ),
    _Kind("matrix result partly read as C of the next", 10, _result, _accumulates_shifted),
    _Kind(
        "C overwritten by a vector instruction",
        7,
        _c_operand,
        lambda i, use, regs: _is_valu(i) and bool(use.writes & regs),
    ),
    _Kind(
        "vector result read by a matrix instruction",
        2,
        _valu_vectors,
        lambda i, use, regs: _is_mfma(i) and bool(use.reads & regs),
    ),
    _Kind(
        "vector result read across lanes by dpp",
        2,
        _valu_vectors,
        lambda i, _use, regs: i.encoding == "dpp" and bool(registers_of(i.operands[1]) & regs),
    ),
    _Kind(
        "vector result read by a lane swap",
        2,
        _valu_vectors,
        lambda i, use, regs: i.mnemonic.startswith("v_permlane") and bool(use.reads & regs),
    ),
    _Kind(
        "vector result read by v_readlane or v_readfirstlane",
        1,
        _valu_vectors,
        lambda i, use, regs: i.mnemonic.startswith("v_read") and bool(use.reads & regs),
    ),
    _Kind(
        "transcendental or sdwa result read by a vector instruction",
        1,
        _late_result,
        lambda i, use, regs: _is_valu(i) and bool(use.reads & regs),
    ),
    _Kind("lane mask of a vector instruction read as a mask", 2, _valu_scalars, _reads_mask),
    _Kind(
        "scalar of a vector instruction read by a memory instruction",
        5,
        _valu_scalars,
        lambda i, use, regs: i.mnemonic.startswith(_MEMORY) and bool(use.reads & regs),
    ),
    _Kind(
        "scalar of a vector instruction read as a lane number",
        4,
        _valu_scalars,
        lambda i, _use, regs: (
            i.mnemonic in ("v_readlane_b32", "v_writelane_b32") and bool(registers_of(i.operands[2]) & regs)
        ),
    ),
    _Kind("exec of a vector compare used by dpp", 5, _valu_exec, lambda i, _use, _regs: i.encoding == "dpp"),
    _Kind("m0 used by a DMA to LDS", 1, _m0, lambda _i, use, regs: bool(use.reads & regs)),
)


def _factors(instruction: Instruction) -> frozenset[Register]:
    return registers_of(instruction.operands[1]) | registers_of(instruction.operands[2])


def hazard_distances(kernel: Kernel) -> list[HazardDistance]:
    """The fewest wait states of each kind over all paths of the kernel."""
    flow = _Flow(kernel)
    return [flow.fewest(kind) for kind in KINDS]


def check_hazards(kernel: Kernel) -> None:
    """Raises HazardError at the consumer if any pair on any path is closer than gfx950 needs."""
    for distance in hazard_distances(kernel):
        if not distance.ok:
            text = next(i.text for i in kernel.instructions if i.line == distance.consumer_line)
            raise HazardError(
                f"{distance.kind}: {distance.seen} wait states after line {distance.producer_line}, "
                f"{distance.needed} are needed"
            ).locate(line=distance.consumer_line, text=text, kernel=kernel.name)


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

    def fewest(self, kind: _Kind) -> HazardDistance:
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
        self, kind: _Kind, start: int, at_stake: frozenset[Register], limit: int
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
