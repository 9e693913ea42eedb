"""The compiled decode scorers must not get worse: every figure against ``kernel_limits.json``."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.geometry import LAYOUTS, Layout
from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import RunReport
from kernel.gfx950.report.decode import (
    MEMORY_PAGE_CLOCKS,
    ROLES,
    DecodeReport,
    check_decode_targets,
    find_trips,
)
from kernel.gfx950.report.prefill import UnknownLoopsError
from tests.gfx950 import compiled
from tests.gfx950.assembly_kernel import kernel_of
from tests.gfx950.kernel_limits import LIMITS, assert_every_limit_bites, worse


@pytest.fixture(params=list(itertools.product(LAYOUTS, SUPPORTED_HEADS)))
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecodeReport:
    layout, heads = request.param
    return compiled.decode_report(heads, layout, tmp_path_factory)


def test_no_figure_is_worse_than_its_limit(report: DecodeReport) -> None:
    assert worse(report.fields()) == []


def test_every_kernel_has_limits() -> None:
    assert list(LIMITS) == list(geometry.kernel_names())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gate_sees_every_figure_get_worse(
    layout: Layout, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fields = compiled.decode_report(4, layout, tmp_path_factory).fields()
    assert set(LIMITS[fields["name"]]["loops"]) == set(ROLES)
    assert_every_limit_bites(fields, at_least=33)


def test_targets_are_met(report: DecodeReport) -> None:
    """No spill, two waves a SIMD, a page in less than half of what the memory takes for it."""
    targets = check_decode_targets(report)
    assert [target for target in targets if not target.met] == []
    assert any("memory" in target.name for target in targets)


def test_fields_agree_with_each_other(report: DecodeReport) -> None:
    fields = report.fields()
    assert json.loads(json.dumps(fields)) == fields
    page, group, forced = fields["loops"]
    assert [loop["role"] for loop in fields["loops"]] == list(ROLES)
    assert page["mfma"] == group["mfma"] == forced["mfma"] == 32
    assert page["memory_loads"] == {"registers": 40, "staged": 36}[report.layout]
    assert (page["memory_stores"], group["memory_stores"]) == (1, 2)
    assert page["valu"] < group["valu"]
    assert (page["interpreted_trips"], group["interpreted_trips"], forced["interpreted_trips"]) == (27, 8, 1)
    assert fields["page"]["valu"] == round((3 * page["valu"] + group["valu"]) / 16, 2)
    assert fields["page"]["memory_clocks"] == pytest.approx(707.8, abs=0.1)
    assert pytest.approx(9216 / 8e12 * 256 * 2.4e9) == MEMORY_PAGE_CLOCKS
    # Staged, a page of 9,216 B is written into LDS and read from it, at 128 B a clock.
    written, read = {"registers": (0, 0), "staged": (72, 72)}[report.layout]
    assert fields["page"]["lds_dma_clocks"] == written
    assert fields["page"]["model_clocks"]["lds"] == 64 + read
    assert fields["page"]["lds_conflict_clocks"] > 0
    assert all(hazard["ok"] for hazard in fields["hazards"])
    memory_bound = 32 * 1024 * 9216 / 8e6
    assert fields["calls"][0]["predicted_us"] == pytest.approx(memory_bound + 2.5, abs=0.1)


def test_another_number_of_trips_is_an_error() -> None:
    body = "s_nop 0\n.LBB0_1:\n" + 32 * "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0\n"
    kernel = kernel_of(body + "s_cbranch_scc1 .LBB0_1\ns_endpgm")
    trace = np.array([0, *range(1, 34), 34], np.int32)
    counts = np.zeros(len(kernel.instructions), np.int64)
    with pytest.raises(UnknownLoopsError, match="wave 0 made 1 trips, not 8"):
        find_trips(RunReport(kernel, counts, 1, 1, None, {(0, 0): trace}))
