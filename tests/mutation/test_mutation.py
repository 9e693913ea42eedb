"""Mistakes in the compiled kernels do not stay unseen: each is caught, or shown to change nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest

from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import SCHEDULES, Kernel, Schedule
from tests.gfx950.scorers import HEADS
from tests.mutation.campaign import is_code, survivors
from tests.mutation.campaigns import NAMES, campaign, mutants_of, prefill
from tests.mutation.equivalents import missing_waits
from tests.mutation.mutants import Mutant, mutants
from tests.mutation.prefill_launches import check_work
from tests.mutation.score import Record, record

_SEED = 950
_SMOKE = ("score_prefill_h4", "score_decode_h4", "topk_scan_k16", "insert_bf16")
"""A kernel of each family, of which a few mutants are judged in every run of the suite."""
_SMOKE_MUTANTS = 2
_PARTS = 8


@pytest.mark.parametrize("name", _SMOKE)
def test_a_few_mutants_are_caught(name: str, record_property: Record) -> None:
    """Of instructions that the first launch executes; launches are run until one tells."""
    found = campaign(name)
    reached = [mutant for mutant in mutants(found.kernel) if found.executed_by(0)[mutant.index]]
    order = np.random.default_rng(_SEED).permutation(len(reached))
    code = (reached[at] for at in order if is_code(found.kernel, reached[at]))
    chosen = list(islice(code, _SMOKE_MUTANTS))
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


# ---- The launches: right scores by the due way, and no instruction left out ----

_NEVER_ENTERED = (
    # exec is never 0 where LLVM asks for it: a wave has 64 lanes
    r"s_branch \S+",
    # values of a loop that always makes a trip, a group's first block being below its end
    r"((v_mov_b32_e32 \S+ (0xff800000|v\d+)|v_mov_b64_e32 \S+ v\S+); )+s_branch \S+",
)
"""Stretches of code that LLVM lays out and no launch enters."""


@pytest.mark.parametrize("heads", HEADS)
def test_launches_execute_every_instruction(heads: int) -> None:
    """Scores, maxima and the work done are right in each, and together they miss only dead code."""
    found = prefill(heads)
    executed = np.sum(found.executed, axis=0)
    missed = _stretches(found.kernel, executed == 0)
    unexpected = [text for text in missed if not any(re.fullmatch(known, text) for known in _NEVER_ENTERED)]
    assert not unexpected


@pytest.mark.parametrize("heads", HEADS)
def test_every_path_waits_for_its_operands(heads: int) -> None:
    """Whatever the branches do, registers and barriers wait for the operations in flight."""
    assert not missing_waits(prefill(heads).kernel)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_launches_are_right_in_every_order(heads: int, schedule: Schedule) -> None:
    found = prefill(heads)
    for launch in found.launches:
        check_work(launch, launch.under(schedule).run(found.kernel))


def _stretches(kernel: Kernel, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[str]:
    """The text of each run of chosen instructions."""
    found: list[list[str]] = []
    for index in np.flatnonzero(chosen):
        text = " ".join(kernel.instructions[index].text.replace(",", "").split())
        if index and chosen[index - 1]:
            found[-1].append(text)
        else:
            found.append([text])
    return ["; ".join(texts) for texts in found]
