"""What the matrix unit is due to do for an item: code that takes a longer way to its scores is wrong.

Told from the item alone, block by block; see the kernel's text for its paths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from kernel.contract import BLOCK_TOKENS
from kernel.gfx950 import RunReport
from kernel.plan import STORE_BLOCKS, WorkItem
from tests.gfx950.mutation.launches import Launch

_WAVES, _TILES, _TILE = 4, 8, 16
_WHOLE = _TILES * _TILES
"""MFMAs of a wave for a block that all its rows see whole."""


class WrongWorkError(Exception):
    """Scores are right, and the way to them is not the one that is due."""


def check_work(launch: Launch, report: RunReport) -> None:
    """Raises WrongWorkError if a launch ran other matrix instructions than its items are due."""
    plain, careful = due_work(launch)
    trips, rest = _done_work(report)
    if (trips, rest) != (plain, careful):
        raise WrongWorkError(
            f"{launch.name}: {trips} plain groups and {rest} other MFMAs, due are {plain} and {careful}"
        )


def due_work(launch: Launch) -> tuple[int, int]:
    """Groups of four blocks that need neither mask nor sentinel, and MFMAs of all waves in other blocks."""
    call = launch.case.call
    plain = careful = 0
    for item in launch.items:
        for first in range(item.first_block, item.end_block, STORE_BLOCKS):
            group = range(first, first + STORE_BLOCKS)
            if all(_is_plain(item, block, call.init_blocks, call.local_blocks) for block in group):
                plain += 1
            else:
                blocks = range(first, min(first + STORE_BLOCKS, item.end_block))
                careful += sum(_multiplied(item, block, call.num_heads) for block in blocks)
    return plain, careful


def _is_plain(item: WorkItem, block: int, init_blocks: int, local_blocks: int) -> bool:
    """Whether every row sees the block whole and gets no sentinel for it; the first row sees the least."""
    seen = item.position // BLOCK_TOKENS + 1
    whole = BLOCK_TOKENS * (block + 1) <= item.position + 1
    return block < item.end_block and whole and init_blocks <= block < seen - local_blocks


def _multiplied(item: WorkItem, block: int, heads: int) -> int:
    """MFMAs of the four waves for a block outside plain groups."""
    return sum(
        pairs
        for position in _wave_positions(item, heads)
        for pairs in _pairs(position - BLOCK_TOKENS * block, heads)
    )


def _wave_positions(item: WorkItem, heads: int) -> Iterator[int]:
    """Position of the first query of each wave that has any."""
    for wave in range(_WAVES):
        token = BLOCK_TOKENS * (wave // heads) + _TILE // heads * (wave % heads)
        if token < item.num_tokens:
            yield item.position + token


def _pairs(ahead: int, heads: int) -> Iterator[int]:
    """N-tiles multiplied for each M-tile, by a wave with its first query ``ahead`` of the block's start."""
    last = ahead + _TILE * (_TILES - 1) + (_TILE - 1) // heads
    for m in range(_TILES if last >= 0 else 0):
        # the diagonal of an N-tile lies in the M-tile of its first query and, for later ones, in the next
        unseen = max(m - ahead // _TILE - 1, 0)
        yield max(_TILES - unseen, 0)


def _done_work(report: RunReport) -> tuple[int, int]:
    """As ``due_work``: the plain loop is the one stretch of code with four blocks' MFMAs."""
    is_mfma = np.array([one.mnemonic.startswith("v_mfma") for one in report.kernel.instructions])
    edges = sorted({0, *report.kernel.labels.values(), len(is_mfma)})
    (plain,) = [
        slice(first, end)
        for first, end in itertools.pairwise(edges)
        if is_mfma[first:end].sum() == STORE_BLOCKS * _WHOLE
    ]
    done = int(report.executed[is_mfma].sum())
    trips = int(report.executed[plain][is_mfma[plain]][0]) // _WAVES
    return trips, done - trips * _WAVES * STORE_BLOCKS * _WHOLE
