"""The decode scorer whose pages go through LDS by DMA: the same bits, whenever a DMA lands."""

from __future__ import annotations

import pytest
import torch

from kernel.backends import flydsl_sim, registry
from kernel.backends.flydsl.geometry import VARIABLE
from kernel.backends.flydsl.launch import MAX_ROWS
from kernel.contract import SUPPORTED_HEADS
from kernel.errors import DeviceUnavailableError
from kernel.gfx950 import SCHEDULES, Schedule
from kernel.gfx950.hip import simulated_device
from kernel.gfx950.report.model import resources
from tests.gfx950.decode import assert_exact
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, oracle_scores


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_scores_equal_the_oracle(heads: int) -> None:
    """Every number of blocks of a tail, the diagonal, sentinels, shares that end inside requests."""
    most = MAX_ROWS // heads
    lengths = [(900, most), (0, 0), (2432, 1), (129, 1), (1, 1), (640, 1), (384, 1)]
    call = random_call(lengths, heads, seed=heads)
    assert_exact(call, compute_units=2, layout="staged")
    assert_exact(call.forcing(1, 1), compute_units=4, columns=23, layout="staged")
    record = simulated_device().launches[-1]
    assert record.kernel == f"score_decode_h{heads}_staged"
    metadata = record.report.kernel.metadata
    assert metadata is not None
    has = resources(metadata)
    assert (has.vgpr_spills, has.sgpr_spills, has.scratch_bytes, has.waves_per_simd) == (0, 0, 0, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_order_of_waves_and_landing_of_dma_gives_the_same_bytes(schedule: Schedule) -> None:
    call = random_call([(700, 3), (3500, 1), (64, 1)], 4, seed=11)
    assert_exact(call, schedule=schedule, compute_units=1, layout="staged")


def test_every_scale_byte_is_scored() -> None:
    call = random_call([(400, 2), (1100, 1)], 4, seed=5, values="bytes")
    assert_exact(call, compute_units=1, layout="staged")


@pytest.mark.parametrize("compute_units", [1, 2, 8])
def test_scores_and_maxima_depend_on_no_split(compute_units: int) -> None:
    lengths = [(10_900, 2), (2047, 1), (2049, 1), (70, 1)]
    assert_exact(random_call(lengths, 4, seed=8).forcing(1, 0), compute_units=compute_units, layout="staged")


@pytest.mark.parametrize(
    ("value", "kernel"), [("staged", "_staged"), ("registers", ""), ("", ""), (None, "")]
)
def test_a_setting_chooses(value: str | None, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    call = random_call([(300, 1)], 4)
    scores = torch.full((4, 1, call.batch().num_score_blocks), float("nan"))
    flydsl_sim.create(None, "exact").score_decode(call.batch(), scores)
    assert simulated_device().launches[-1].kernel == f"score_decode_h4{kernel}"
    assert_same_bits(scores, oracle_scores(call))


def test_a_layout_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "lds")
    status = registry.status("flydsl-sim")
    assert not status.usable
    assert status.reason == (
        f"{VARIABLE}=lds is no layout of the decode scorer; use registers or staged, or unset it"
    )
    with pytest.raises(DeviceUnavailableError, match=f"{VARIABLE}=lds"):
        flydsl_sim.create(None, "exact")
    assert f"{VARIABLE}=lds" in registry.status("flydsl").reason
