"""Mutants that compute the same, and why: proved by a static analysis, or reviewed one by one.

A reviewed entry names the change without registers and line numbers, and what stands before and behind it, so
that it outlives a recompilation and fits nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kernel.gfx950 import HazardError, Instruction, Kernel, check_hazards
from tests.gfx950.mutation.mutants import NOP_SHORTENED, Mutant, mutated
from tests.gfx950.mutation.waits import missing_waits


@dataclass(frozen=True)
class Equivalent:
    """``change`` is a pattern for ``description``, ``reason`` says why no launch can tell."""

    change: str
    reason: str
    heads: tuple[int, ...] = (1, 2, 4)


REVIEWED: tuple[Equivalent, ...] = ()


def proof(kernel: Kernel, mutant: Mutant) -> str:
    """Why a mutant of a wait or an ``s_nop`` changes nothing on any path; "" if that is not so."""
    if mutant.operator == NOP_SHORTENED:
        try:
            check_hazards(mutated(kernel, mutant))
        except HazardError:
            return ""
        return "enough wait states on every path"
    if kernel.instructions[mutant.index].mnemonic == "s_waitcnt" and not missing_waits(
        mutated(kernel, mutant)
    ):
        return "another wait covers it on every path"
    return ""


def reviewed(kernel: Kernel, mutant: Mutant, heads: int) -> str:
    """The reason of the entry that a mutant fits, "" without one."""
    text = description(kernel, mutant)
    return next((one.reason for one in REVIEWED if heads in one.heads and re.search(one.change, text)), "")


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
