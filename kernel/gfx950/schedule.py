"""In which order the waves of a workgroup run between barriers, and when DMA to LDS lands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Schedule:
    """One legal order of events. A correct kernel writes the same bytes under every one of them.

    ``waves``: lowest wave first, highest first, or a new seeded permutation at each barrier.
    ``workgroups``: the same choice over the grid.
    ``dma``: whether a DMA to LDS writes at once or only at the wait that covers it.
    """

    waves: Literal["up", "down", "mixed"] = "up"
    workgroups: Literal["up", "down", "mixed"] = "up"
    dma: Literal["early", "late"] = "late"
    seed: int = 0

    def order(self, kind: Literal["waves", "workgroups"], count: int, turn: int) -> Sequence[int]:
        """A permutation of ``range(count)`` for the ``turn``-th time that an order is asked for."""
        choice = self.waves if kind == "waves" else self.workgroups
        if choice == "up":
            return range(count)
        if choice == "down":
            return range(count - 1, -1, -1)
        permutation = np.random.default_rng((self.seed, turn, count)).permutation(count)
        return [int(i) for i in permutation]


SCHEDULES = (
    Schedule(),
    Schedule(waves="down", workgroups="down", dma="early"),
    Schedule(waves="mixed", workgroups="mixed", seed=1),
    Schedule(waves="mixed", workgroups="mixed", dma="early", seed=2),
)
"""Orders that a test sweeps: both extremes and two seeded mixtures."""
