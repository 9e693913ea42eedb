"""What the decode scorer is meant to reach, checked on a report."""

from __future__ import annotations

from kernel.gfx950.report.decode import MEMORY_PAGE_CLOCKS, DecodeReport
from kernel.gfx950.report.targets import Target, no_spills, vgprs, wait_states, waves

MAX_PAGE_VALU = 304.5
"""Vector instructions of a page and wave."""
MAX_PAGE_LOADS = 10.0
MAX_CLOCKS_OF_MEMORY = 0.5
"""Clocks of a page on a CU, of those that the memory's rate allows."""


def check_decode_targets(report: DecodeReport) -> list[Target]:
    """Every aim, met or not."""
    has = report.resources
    valu, loads = report.per_page("valu"), report.per_page("vmem_load")
    model = max(report.model_clocks.values()) / MEMORY_PAGE_CLOCKS
    predicted = report.predicted_clocks / MEMORY_PAGE_CLOCKS
    share = f"<= {MAX_CLOCKS_OF_MEMORY}"
    return [
        vgprs(has),
        no_spills(has),
        waves(has),
        wait_states(report.hazards),
        Target("page: VALU", f"<= {MAX_PAGE_VALU}", f"{valu:.2f}", valu <= MAX_PAGE_VALU),
        Target("page: loads", f"<= {MAX_PAGE_LOADS}", f"{loads:.2f}", loads <= MAX_PAGE_LOADS),
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
