"""Mistakes in the compiled kernels do not stay unseen: each is caught, or shown to change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.gfx950.mutation.campaign import survivors
from tests.gfx950.mutation.campaigns import NAMES, campaign, mutants_of
from tests.gfx950.mutation.choice import is_code
from tests.gfx950.mutation.mutants import Mutant
from tests.gfx950.mutation.score import Record, record

_SEED = 950
_SAMPLES = {
    "score_prefill_h1": 8, "score_prefill_h2": 8, "score_prefill_h4": 8, "score_decode_h4": 8,
    "score_decode_h1_staged": 6, "topk_scan_k16": 6, "topk_group_k16_b1024": 6, "insert_bf16": 6,
}  # fmt: skip
"""Mutants in every run of the suite, of a kernel of each family."""
_PARTS = 8


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _SAMPLES)
def test_a_sample_of_mutants_is_caught(name: str, record_property: Record) -> None:
    everything = mutants_of(name)
    _assert_complete(name, everything)
    order = np.random.default_rng(_SEED).permutation(len(everything))
    chosen = [everything[at] for at in order[: _SAMPLES[name]]]
    _assert_caught(name, chosen, record_property, ", a sample", thorough=False)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_is_caught(name: str, part: int, record_property: Record) -> None:
    everything = mutants_of(name)
    _assert_complete(name, everything)
    _assert_caught(name, everything[part::_PARTS], record_property)


def _assert_complete(name: str, everything: Sequence[Mutant]) -> None:
    """At least 200 mutants, every wait, barrier and compare that a launch reaches among them."""
    found = campaign(name)
    assert len(everything) >= 200
    assert all(is_code(found.kernel, mutant) for mutant in everything)
    changed = {mutant.index for mutant in everything}
    for index, instruction in enumerate(found.kernel.instructions):
        if instruction.mnemonic.startswith(("s_waitcnt", "s_barrier", "s_cmp", "v_cmp")):
            assert index in changed or not found.reached(index)


def _assert_caught(
    name: str, chosen: Sequence[Mutant], record_property: Record, of: str = "", *, thorough: bool = True
) -> None:
    found = campaign(name)
    verdicts = [found.judge(mutant, thorough=thorough) for mutant in chosen]
    record(f"{name}{of}", verdicts, record_property)
    left = list(survivors(found.kernel, verdicts))
    assert not left, "\n".join(left)
