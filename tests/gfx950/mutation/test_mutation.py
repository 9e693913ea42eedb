"""Mistakes in the compiled prefill scorer do not stay unseen: each is caught, or known to change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from kernel.contract import SUPPORTED_HEADS
from tests.gfx950.mutation.campaign import Verdict, campaign, survivors
from tests.gfx950.mutation.choice import is_code, whole_set
from tests.gfx950.mutation.score import PROPERTY, recorded

_SAMPLE, _SEED = 14, 950
"""Mutants for each number of heads in every run of the suite."""
_PARTS = 8
Record = Callable[[str, object], None]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_a_sample_of_mutants_is_caught(heads: int, record_property: Record) -> None:
    found = campaign(heads)
    random = np.random.default_rng((_SEED, heads))
    everything = whole_set(found, heads)
    chosen = [everything[at] for at in random.permutation(len(everything))[:_SAMPLE]]
    verdicts = [found.judge(mutant, thorough=False) for mutant in chosen]
    _record(f"H={heads}, a sample", verdicts, record_property)
    assert not list(survivors(found, verdicts))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_every_mutant_is_caught(heads: int, part: int, record_property: Record) -> None:
    found = campaign(heads)
    verdicts = [found.judge(mutant) for mutant in whole_set(found, heads)[part::_PARTS]]
    _record(f"H={heads}", verdicts, record_property)
    assert not list(survivors(found, verdicts))


def test_the_whole_set_is_large_enough() -> None:
    """At least 200 mutants, every wait, barrier and compare among them."""
    for heads in SUPPORTED_HEADS:
        found = campaign(heads)
        chosen = whole_set(found, heads)
        assert len(chosen) >= 200
        assert all(is_code(found.kernel, mutant) for mutant in chosen)
        changed = {mutant.index for mutant in chosen}
        for index, instruction in enumerate(found.kernel.instructions):
            if instruction.mnemonic.startswith(("s_waitcnt", "s_barrier", "s_cmp", "v_cmp")):
                assert index in changed


def _record(name: str, verdicts: Iterable[Verdict], record_property: Record) -> None:
    """For the summary that ends the test run."""
    record_property(PROPERTY, recorded(name, (verdict.outcome for verdict in verdicts)))
