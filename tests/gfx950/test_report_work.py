"""The compiled top-k and insert kernels must not get worse: figures against ``kernel_limits.json``."""

from __future__ import annotations

import json

import pytest

from kernel.backends.flydsl.geometry import VARIANTS, KeyType, Variant
from kernel.gfx950.report.work import WorkReport, check_work_targets
from tests.gfx950 import compiled
from tests.gfx950.kernel_limits import assert_every_limit_bites, worse

KERNELS: tuple[Variant | KeyType, ...] = (*VARIANTS, *KeyType)


@pytest.fixture(params=KERNELS, ids=lambda kernel: str(kernel.name).lower())
def report(request: pytest.FixtureRequest) -> WorkReport:
    return compiled.work_report(request.param)


def test_no_figure_is_worse_than_its_limit(report: WorkReport) -> None:
    assert worse(report.fields()) == []


def test_the_gate_sees_every_figure_get_worse() -> None:
    assert_every_limit_bites(compiled.work_report(KeyType.BFLOAT16).fields(), at_least=11)


def test_targets_are_met(report: WorkReport) -> None:
    """No spill; top-k through maxima in 15 us, from scores and insert within 1.2 of their bytes' time."""
    targets = check_work_targets(report)
    assert [target for target in targets if not target.met] == []
    assert len(targets) == 3 or report.name.startswith("topk")


def test_fields_agree_with_each_other(report: WorkReport) -> None:
    fields = report.fields()
    assert json.loads(json.dumps(fields)) == fields
    for work in fields["works"]:
        assert work["predicted_us"] == max(work["predicted_valu_us"], work["predicted_memory_us"])
        clocks = 2400 * 1024 * work["predicted_valu_us"]
        assert clocks == pytest.approx(4 * work["valu"] * work["units"], rel=0.01)
        assert work["predicted_memory_us"] == pytest.approx(work["bytes"] * work["units"] / 8e6, rel=0.01)
