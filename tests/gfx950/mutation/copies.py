"""Proof that an instruction writes what its registers hold already, on every path.

Register allocation leaves such copies where paths meet. A copy makes its two registers equal, and any
instruction of ``_PURE`` makes its result equal to that text, until one of the registers that it names is
written. What holds at the end of every way that leads to an instruction holds there.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel.gfx950 import Instruction, Kernel
from kernel.gfx950.hazards import Register, register_use
from kernel.gfx950.parse import EXEC
from tests.gfx950.mutation.paths import successors

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
