"""What the top-k and insert kernels are meant to reach, checked on a report."""

from __future__ import annotations

from collections.abc import Iterator

from kernel.gfx950.report.targets import Target, no_spills, wait_states
from kernel.gfx950.report.work import Work, WorkReport

MAX_TOPK_US = 15.0
"""Of 32,768 rows of 4,096 blocks through group maxima: 5 % of the time that scoring them takes."""
MAX_OF_MEMORY = 1.2
"""Time of a kernel that reads everything once, of that of its bytes."""
_TOPK, _SCANS, _INSERT = "topk_group_k16_b4096", ("topk_scan_k16", "topk_scan_k32"), "insert_"


def check_work_targets(report: WorkReport) -> list[Target]:
    """Every aim, met or not; times are predictions."""
    return [
        no_spills(report.resources),
        wait_states(report.hazards),
        *_times(report),
    ]


def _times(report: WorkReport) -> Iterator[Target]:
    longest = report.works[0]
    if report.name == _TOPK:
        found = longest.predicted_us
        yield Target(
            f"{longest.shape.name} (prediction)",
            f"<= {MAX_TOPK_US} us",
            f"{found:.1f} us",
            found <= MAX_TOPK_US,
        )
    if report.name in _SCANS or report.name.startswith(_INSERT):
        yield _of_memory(longest)


def _of_memory(work: Work) -> Target:
    found = work.predicted_us / work.memory_us
    name = f"{work.shape.name}: time of its bytes' (prediction)"
    return Target(name, f"<= {MAX_OF_MEMORY}", f"{found:.2f}", found <= MAX_OF_MEMORY)
