"""What the decode scorer is meant to reach, checked on a report."""

from __future__ import annotations

from kernel.backends.flydsl.decode_layout import Layout
from kernel.gfx950.report.decode import MEMORY_PAGE_CLOCKS, DecodeReport
from kernel.gfx950.report.targets import Target, no_spills, vgprs, wait_states, waves

MAX_PAGE_VALU: dict[Layout, float] = {"registers": 304.5, "staged": 306.5}
"""Vector instructions of a page and wave. Staged, a trip of four pages has 9 more: 8 copies, 1 address."""
MAX_PAGE_LOADS: dict[Layout, float] = {"registers": 10.0, "staged": 9.0}
"""Each of 1,024 bytes; in registers the scales are two of 512."""
MAX_CLOCKS_OF_MEMORY = 0.5
"""Clocks of a page on a CU, of those that the memory's rate allows."""


def check_decode_targets(report: DecodeReport) -> list[Target]:
    """Every aim, met or not."""
    has = report.resources
    valu, loads = report.per_page("valu"), report.per_page("vmem_load")
    model = max(report.model_clocks.values()) / MEMORY_PAGE_CLOCKS
    predicted = report.predicted_clocks / MEMORY_PAGE_CLOCKS
    most_valu, most_loads = MAX_PAGE_VALU[report.layout], MAX_PAGE_LOADS[report.layout]
    share = f"<= {MAX_CLOCKS_OF_MEMORY}"
    return [
        vgprs(has),
        no_spills(has),
        waves(has),
        wait_states(report.hazards),
        Target("page: VALU", f"<= {most_valu}", f"{valu:.2f}", valu <= most_valu),
        Target("page: loads", f"<= {most_loads}", f"{loads:.2f}", loads <= most_loads),
        Target(
            "page: model clocks of memory's (prediction)",
            share,
            f"{model:.3f}",
            model <= MAX_CLOCKS_OF_MEMORY,
        ),
        Target(
            "page: replayed clocks of memory's (prediction)",
            share,
            f"{predicted:.3f}",
            predicted <= MAX_CLOCKS_OF_MEMORY,
        ),
    ]
