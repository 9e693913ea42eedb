"""Which top-k kernels there are, and which one a call takes. Needs no FlyDSL."""

from __future__ import annotations

from dataclasses import dataclass

from kernel.backends.flydsl.geometry import LANES
from kernel.plan import MAXIMA_BLOCKS

NO_GROUP = 1 << 25
"""A group past every row: the 32-bit byte offset of its columns lies behind any row's end."""
MAX_BLOCKS = (NO_GROUP - 16) * MAXIMA_BLOCKS
"""Blocks of a row at most, 2 GiB of scores."""
WAVES = 4
THREADS = WAVES * LANES
CLASSES = (16, 32, 64)
"""A kernel selects the best 16, 32 or 64; the first ``k`` of them are given out."""
_SHORT_ROWS = 4
"""Rows that a wave takes one after the other, where they are short: what is a lane's is computed once."""


@dataclass(frozen=True)
class Variant:
    """One compiled kernel.

    Attributes:
        best: class of k: 16, 32 or 64.
        most_groups: groups of a row at most, all of them in registers at once; 0 for rows of any length; None
            where a row is selected from its scores alone.
    """

    best: int
    most_groups: int | None = None

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        if self.most_groups is None:
            return f"topk_scan_k{self.best}"
        blocks = f"_b{self.most_groups * MAXIMA_BLOCKS}" if self.most_groups else ""
        return f"topk_group_k{self.best}{blocks}"

    @property
    def rows_per_wave(self) -> int:
        """Rows that a wave selects one after the other."""
        return 1 if self.most_groups is None else _SHORT_ROWS


VARIANTS = (
    *(Variant(best) for best in CLASSES),
    *(Variant(best, 0) for best in CLASSES),
    *(Variant(CLASSES[0], groups) for groups in (LANES, 2 * LANES, 4 * LANES, 8 * LANES)),
)
"""Every kernel."""


def variant_for(k: int, num_blocks: int, grouped: bool) -> Variant:
    """The kernel for ``k`` ids of rows of ``num_blocks`` blocks at most."""
    best = next(best for best in CLASSES if k <= best)
    fitting = [
        one
        for one in VARIANTS
        if one.best == best
        and (one.most_groups is not None) == grouped
        and (not one.most_groups or num_blocks <= one.most_groups * MAXIMA_BLOCKS)
    ]
    return min(fitting, key=lambda one: one.most_groups or NO_GROUP)
