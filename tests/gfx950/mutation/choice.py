"""Which mutants of a kernel are judged: all of waits, barriers, compares and branches, some of the others."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from kernel.gfx950 import InterpreterError, Kernel
from tests.gfx950.mutation.campaign import Campaign
from tests.gfx950.mutation.mutants import Mutant, mutants, mutated

_SEED = 950
_EVERY = ("barrier", "weakened", "dropped", "compare", "branch", "nop", "lanes")
"""Operators, or what they delete, of which the whole set has every mutant."""


def whole_set(found: Campaign[Any], seed: int, of_others: int | None) -> list[Mutant]:
    """Mutants of instructions that the launches reach, and that are code.

    ``of_others`` of each operator that is not among ``_EVERY``, or all. The seeded choice is always the same.
    """
    others: dict[str, list[Mutant]] = {}
    chosen = []
    for mutant in mutants(found.kernel):
        if not found.reached(mutant.index):
            continue
        mnemonic = found.kernel.instructions[mutant.index].mnemonic
        if mnemonic not in ("s_waitcnt", "s_barrier") and not any(word in mutant.operator for word in _EVERY):
            others.setdefault(mutant.operator, []).append(mutant)
        elif is_code(found.kernel, mutant):
            chosen.append(mutant)
    random = np.random.default_rng((_SEED, seed))
    for operator in sorted(others):
        shuffled = (others[operator][at] for at in random.permutation(len(others[operator])))
        code = (mutant for mutant in shuffled if is_code(found.kernel, mutant))
        chosen += itertools.islice(code, of_others)
    return chosen


def is_code(kernel: Kernel, mutant: Mutant) -> bool:
    """Whether the changed instruction exists: a compiler can only be wrong in what an assembler takes."""
    try:
        mutated(kernel, mutant)
    except InterpreterError:
        return False
    return True
