"""Waves may come in any order: the prefill scorer writes the same bytes, and a race in it is seen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import (
    SCHEDULES,
    BarrierError,
    Kernel,
    RaceError,
    Schedule,
    UndefinedReadError,
)
from kernel.gfx950.parse import parse_instruction
from tests.gfx950.mutation.campaign import Campaign
from tests.gfx950.mutation.campaigns import prefill
from tests.gfx950.mutation.mutants import Mutant, mutated
from tests.gfx950.mutation.prefill_launches import PrefillLaunch

ORDERS = (
    *SCHEDULES,
    *(Schedule(waves="mixed", workgroups="mixed", seed=seed) for seed in (3, 4)),
)


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
@pytest.mark.parametrize("case", ["unaligned", "aligned", "forced", "decode"])
def test_every_order_of_waves_writes_the_same_bytes(case: str, heads: int) -> None:
    """Each order gives the oracle's bits, in cells that a launch owns and in none else."""
    found = prefill(heads)
    launches = [launch for launch in found.launches if launch.case.name == case]
    for at, schedule in enumerate(ORDERS):
        launches[at % len(launches)].under(schedule).run(found.kernel)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_barrier_some_launch_races(schedule: Schedule) -> None:
    """Each barrier of the kernel, in every order of waves: nothing of the others hides that it is missing."""
    found = prefill(4)
    barriers = [at for at, one in enumerate(found.kernel.instructions) if one.mnemonic == "s_barrier"]
    assert len(barriers) > 2
    for at in barriers:
        kernel = mutated(found.kernel, Mutant("deleted", at, "s_nop 0"))
        with pytest.raises((RaceError, BarrierError, UndefinedReadError)):
            _run_all(_launches_through(found, at), kernel, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_two_waves_that_write_one_lds_byte_race(heads: int, schedule: Schedule) -> None:
    """Entry ``lane`` of the LUT instead of entry ``thread``: all waves write the same bytes."""
    found = prefill(heads)
    with pytest.raises(RaceError, match=r"LDS byte .* writes what wave . wrote"):
        found.launches[0].under(schedule).run(_with_lanes_for_threads(found.kernel))


def _run_all(launches: list[PrefillLaunch], kernel: Kernel, schedule: Schedule) -> None:
    for launch in launches:
        launch.under(schedule).run(kernel)


def _launches_through(found: Campaign[PrefillLaunch], at: int) -> list[PrefillLaunch]:
    return [launch for launch, executed in zip(found.launches, found.executed, strict=True) if executed[at]]


def _with_lanes_for_threads(kernel: Kernel) -> Kernel:
    """The kernel whose LUT writes are addressed by the lane in the wave."""
    texts = [" ".join(one.text.split()) for one in kernel.instructions]
    write = next(at for at, text in enumerate(texts) if text.startswith("ds_write_b64"))
    address = kernel.instructions[write].operands[0].text
    (lane,) = {found[1] for text in texts if (found := re.match(r"v_and_b32_e32 (v\d+), 63, v0$", text))}
    shifts = [at for at, text in enumerate(texts[:write]) if text == f"v_lshlrev_b32_e32 {address}, 3, v0"]
    text = f"v_lshlrev_b32_e32 {address}, 3, {lane}"
    instructions = list(kernel.instructions)
    instructions[shifts[-1]] = parse_instruction(text, instructions[shifts[-1]].line)
    return replace(kernel, instructions=instructions)
