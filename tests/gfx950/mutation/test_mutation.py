"""Mistakes in the compiled prefill scorer do not stay unseen: each is caught, or known to change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kernel.contract import SUPPORTED_HEADS
from tests.gfx950.mutation.campaign import Campaign, campaign, score, survivors
from tests.gfx950.mutation.mutants import Mutant, mutants

_SAMPLE, _SEED = 14, 950
"""Mutants for each number of heads in every run of the suite."""
_PARTS = 8
_EVERY = ("barrier", "weakened", "dropped", "compare", "branch", "nop")
"""Operators, or what they delete, of which the whole set takes every mutant."""
_OF_OTHERS = 12
"""And of each other operator."""

Record = Callable[[str, object], None]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_a_sample_of_mutants_is_caught(heads: int, record_property: Record) -> None:
    found = campaign(heads)
    random = np.random.default_rng((_SEED, heads))
    everything = _whole_set(found)
    chosen = [everything[at] for at in random.permutation(len(everything))[:_SAMPLE]]
    _assert_caught(found, chosen, record_property)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_every_mutant_is_caught(heads: int, part: int, record_property: Record) -> None:
    found = campaign(heads)
    _assert_caught(found, _whole_set(found)[part::_PARTS], record_property)


def test_the_whole_set_is_large_enough() -> None:
    """At least 200 mutants, every wait and barrier among them."""
    for heads in SUPPORTED_HEADS:
        found = campaign(heads)
        chosen = _whole_set(found)
        assert len(chosen) >= 200
        changed = {mutant.index for mutant in chosen}
        for index, instruction in enumerate(found.kernel.instructions):
            if instruction.mnemonic in ("s_waitcnt", "s_barrier"):
                assert index in changed


def _whole_set(found: Campaign) -> list[Mutant]:
    """Mutants of instructions that the launches reach; the seeded choice of some is always the same."""
    reached = [mutant for mutant in mutants(found.kernel) if found.reached(mutant.index)]
    others: dict[str, list[Mutant]] = {}
    chosen = []
    for mutant in reached:
        mnemonic = found.kernel.instructions[mutant.index].mnemonic
        if mnemonic in ("s_waitcnt", "s_barrier") or any(word in mutant.operator for word in _EVERY):
            chosen.append(mutant)
        else:
            others.setdefault(mutant.operator, []).append(mutant)
    random = np.random.default_rng((_SEED, found.heads))
    for operator in sorted(others):
        chosen += [others[operator][at] for at in random.permutation(len(others[operator]))[:_OF_OTHERS]]
    return chosen


def _assert_caught(found: Campaign, chosen: Sequence[Mutant], record_property: Record) -> None:
    verdicts = [found.judge(mutant) for mutant in chosen]
    record_property("mutation score", score(found.heads, verdicts))
    assert not list(survivors(found, verdicts))
