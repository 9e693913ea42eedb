"""Which decode layout took less time, by how much, and in which steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from indexer.first_run.attempt import Item
from kernel.backends.flydsl import decode_layout
from kernel.backends.flydsl.decode_layout import Layout

SPREAD_PERCENT = 2.0
"""Of the slower one's time: medians of the same launch differ by as much from run to run."""


@dataclass(frozen=True)
class StepTimes:
    """Cold median microseconds of a decode step by layout."""

    shape: str
    cold_us: dict[Layout, float]


def faster_layout(steps: Sequence[StepTimes]) -> Item:
    """The verdict over all steps and of each.

    Returns:
        ``layout``: the faster one over all steps, None where they differ by less than
        :data:`SPREAD_PERCENT`; ``percent``: less time than the other took; ``cold_us``: sums by layout;
        ``set``: the setting to use, only where there is a faster one; ``steps``: the same of each.
    """
    layouts = decode_layout.LAYOUTS
    total = {layout: sum(step.cold_us[layout] for step in steps) for layout in layouts}
    found = _compared(total)
    if found["layout"] is not None:
        found["set"] = f"{decode_layout.VARIABLE}={found['layout']}"
    return {**found, "steps": [{"shape": step.shape, **_compared(step.cold_us)} for step in steps]}


def _compared(cold_us: dict[Layout, float]) -> Item:
    faster = min(cold_us, key=lambda layout: cold_us[layout])
    slowest = max(cold_us.values())
    percent = 100 * (1 - cold_us[faster] / slowest)
    return {
        "layout": faster if percent >= SPREAD_PERCENT else None,
        "percent": percent,
        "cold_us": dict(cold_us),
    }
