"""Mistakes in the compiled decode scorer do not stay unseen: each is caught, or known to change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kernel.contract import SUPPORTED_HEADS
from tests.gfx950.mutation.decode_campaign import DecodeCampaign, campaign
from tests.gfx950.mutation.equivalents import description
from tests.gfx950.mutation.mutants import Mutant
from tests.gfx950.mutation.score import SURVIVED, Record, Verdict, record
from tests.gfx950.mutation.waits import missing_waits

_SAMPLE, _SEED = 16, 952
"""Mutants in every run of the suite; the number of heads changes little in the kernel."""
_PARTS = 12
_FEWEST = 600


@pytest.mark.timeout(900)
def test_a_sample_of_mutants_is_caught(record_property: Record) -> None:
    found = campaign(4)
    everything = found.whole_set
    order = np.random.default_rng(_SEED).permutation(len(everything))
    _assert_caught(found, [everything[at] for at in order[:_SAMPLE]], record_property, ", a sample")


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_every_mutant_is_caught(heads: int, part: int, record_property: Record) -> None:
    found = campaign(heads)
    _assert_caught(found, found.whole_set[part::_PARTS], record_property)


def test_the_launches_reach_all_of_the_kernel() -> None:
    """But for a branch that is never taken where it stands; every wait and barrier has a mutant."""
    found = campaign(4)
    unreached = [at for at in range(len(found.kernel.instructions)) if not found.reached(at)]
    assert {found.kernel.instructions[at].mnemonic for at in unreached} <= {"s_branch"}
    assert len(found.whole_set) >= _FEWEST
    changed = {mutant.index for mutant in found.whole_set}
    for index, instruction in enumerate(found.kernel.instructions):
        if instruction.mnemonic in ("s_waitcnt", "s_barrier") and found.reached(index):
            assert index in changed


def test_no_path_misses_a_wait() -> None:
    assert missing_waits(campaign(4).kernel) == []


def _assert_caught(
    found: DecodeCampaign, chosen: Sequence[Mutant], record_property: Record, of: str = ""
) -> None:
    verdicts = [found.judge(mutant) for mutant in chosen]
    record(f"decode, H={found.heads}{of}", verdicts, record_property)
    assert not list(_survivors(found, verdicts))


def _survivors(found: DecodeCampaign, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Where each survivor is and what it changes."""
    for verdict in verdicts:
        if verdict.outcome == SURVIVED:
            line = found.kernel.instructions[verdict.mutant.index].line
            yield f"line {line}: {description(found.kernel, verdict.mutant)}"
