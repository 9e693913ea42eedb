"""The launches behind the mutants: right scores by the due way, and no instruction left out."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import SCHEDULES, Kernel, Schedule
from tests.gfx950.mutation.campaigns import prefill
from tests.gfx950.mutation.prefill_work import check_work
from tests.gfx950.mutation.waits import missing_waits

_NEVER_ENTERED = (
    # exec is never 0 where LLVM asks for it: a wave has 64 lanes
    r"s_branch \S+",
    # values of a loop that always makes a trip, a group's first block being below its end
    r"((v_mov_b32_e32 \S+ (0xff800000|v\d+)|v_mov_b64_e32 \S+ v\S+); )+s_branch \S+",
)
"""Stretches of code that LLVM lays out and no launch enters."""


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_launches_execute_every_instruction(heads: int) -> None:
    """Scores, maxima and the work done are right in each, and together they miss only dead code."""
    found = prefill(heads)
    executed = np.sum(found.executed, axis=0)
    missed = _stretches(found.kernel, executed == 0)
    unexpected = [text for text in missed if not any(re.fullmatch(known, text) for known in _NEVER_ENTERED)]
    assert not unexpected


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
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
