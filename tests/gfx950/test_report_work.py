"""The compiled top-k and insert kernels must not get worse: figures against ``kernel_limits.json``."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from kernel.backends.flydsl.key_type import KeyType
from kernel.backends.flydsl.topk_variants import VARIANTS, Variant
from kernel.gfx950.report.work import WorkReport
from kernel.gfx950.report.work_targets import check_work_targets
from tests.gfx950 import compiled
from tests.gfx950.test_report_kernels import AT_LEAST, LIMITS

KERNELS: tuple[Variant | KeyType, ...] = (*VARIANTS, *KeyType)


@pytest.fixture(params=KERNELS, ids=lambda kernel: str(kernel.name).lower())
def report(request: pytest.FixtureRequest) -> WorkReport:
    return compiled.work_report(request.param)


def worse_work(fields: dict[str, Any], limits: dict[str, Any]) -> list[str]:
    """The figures that are worse than their limits, those of each shape included."""
    places = [("", fields, {key: limit for key, limit in limits.items() if key != "works"})]
    shapes = {work["shape"]: work for work in fields["works"]}
    places += [(f"{shape}: ", shapes[shape], own) for shape, own in limits["works"].items()]
    return [
        f"{place}{key} {found[key]}, limit {limit}"
        for place, found, own in places
        for key, limit in own.items()
        if (found[key] < limit if key in AT_LEAST else found[key] > limit)
    ]


def test_no_figure_is_worse_than_its_limit(report: WorkReport) -> None:
    assert worse_work(report.fields(), LIMITS[report.name]) == []


def test_the_gate_sees_every_figure_get_worse() -> None:
    fields = compiled.work_report(KeyType.BFLOAT16).fields()
    limits = LIMITS[fields["name"]]
    tried = 0
    for shape in ("", *limits["works"]):
        own = limits["works"][shape] if shape else {k: v for k, v in limits.items() if k != "works"}
        for key, limit in own.items():
            changed = copy.deepcopy(fields)
            place = next(work for work in changed["works"] if work["shape"] == shape) if shape else changed
            place[key] = limit * 0.999 if key in AT_LEAST else limit + 1
            (found,) = worse_work(changed, limits)
            assert f"{key} {place[key]}" in found
            tried += 1
    assert tried > 10


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
