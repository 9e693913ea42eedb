"""Mistakes in the compiled top-k and insert kernels are seen: each is caught, or changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kernel.backends.flydsl.key_type import KeyType
from kernel.backends.flydsl.topk_variants import VARIANTS
from tests.gfx950.mutation.mutants import Mutant
from tests.gfx950.mutation.row_campaign import RowCampaign, survivors
from tests.gfx950.mutation.row_inputs import insert_campaign, topk_campaign
from tests.gfx950.mutation.score import Record, record

_SAMPLE, _SEED = 6, 951
"""Mutants of a kernel in every run of the suite."""
_SAMPLED = ("topk_group_k16_b1024", "insert_bf16")
_WHOLE = 600
"""And nightly: of a kernel with more mutants a seeded choice."""
_PARTS = 6
_LEAST = {"topk_group_k16_b1024": 0.9, "insert_bf16": 0.9, "insert_fp16": 0.9, "insert_fp32": 0.9}
"""Share of a kernel's mutants that must be caught, proved or reviewed; survivors are recorded. The launches
of the other kernels do not reach every place of every list yet, so theirs are recorded only."""
NAMES = (*(variant.name for variant in VARIANTS), *(f"insert_{key_type.value}" for key_type in KeyType))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _SAMPLED)
def test_a_sample_of_mutants_is_caught(name: str, record_property: Record) -> None:
    found = campaign_of(name)
    _assert_caught(name, found, _chosen(found, _SAMPLE), 1, record_property)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("name", NAMES)
def test_mutants_are_caught(name: str, part: int, record_property: Record) -> None:
    found = campaign_of(name)
    _assert_caught(name, found, _chosen(found, _WHOLE)[part::_PARTS], _LEAST.get(name, 0), record_property)


def campaign_of(name: str) -> RowCampaign:
    kind, _, rest = name.partition("_")
    return insert_campaign(KeyType(rest)) if kind == "insert" else topk_campaign(name)


def _chosen(found: RowCampaign, count: int) -> list[Mutant]:
    """The same choice every time."""
    random = np.random.default_rng(_SEED)
    everything = found.mutants
    return [everything[at] for at in random.permutation(len(everything))[:count]]


def _assert_caught(
    name: str, found: RowCampaign, chosen: Sequence[Mutant], least: float, record_property: Record
) -> None:
    verdicts = [found.judge(mutant) for mutant in chosen]
    left = list(survivors(found, verdicts))
    record(f"{name}, a sample" if least == 1 else name, verdicts, record_property)
    record_property("mutants not explained", left)
    assert len(left) <= (1 - least) * len(chosen), "\n".join(left)
