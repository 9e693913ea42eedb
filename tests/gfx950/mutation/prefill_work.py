"""What the matrix unit is due to do for an item: code that takes a longer way to its scores is wrong.

Told from the item alone, block by block; see the kernel's text for its paths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kernel.contract import BLOCK_TOKENS
from kernel.gfx950 import RunReport
from kernel.plan import STORE_BLOCKS, WorkItem
from tests.gfx950.mutation.launch import WrongWorkError
from tests.gfx950.mutation.prefill_launches import PrefillLaunch

_WAVES, _TILES, _TILE = 4, 8, 16
_WHOLE = _TILES * _TILES
"""MFMAs of a wave for a block that all its rows see whole."""


@dataclass(frozen=True)
class Work:
    """Trips of all waves through the code of a plain group and of a whole block, and their other MFMAs."""

    plain_groups: int
    whole_blocks: int
    others: int


def check_work(launch: PrefillLaunch, report: RunReport) -> None:
    """Raises WrongWorkError if a launch ran other matrix instructions than its items are due."""
    due, done = due_work(launch), _done_work(report)
    if done != due:
        raise WrongWorkError(f"{launch.name}: {done} instead of {due}")


def due_work(launch: PrefillLaunch) -> Work:
    """Groups of four blocks that need neither mask nor sentinel are plain. In others a wave's block is whole
    if its first query, which sees the least, sees all of it."""
    call = launch.case.call
    plain = whole = others = 0
    for item in launch.items:
        for first in range(item.first_block, item.end_block, STORE_BLOCKS):
            group = range(first, first + STORE_BLOCKS)
            if all(_is_plain(item, block, call.init_blocks, call.local_blocks) for block in group):
                plain += _WAVES
                continue
            for block in range(first, min(first + STORE_BLOCKS, item.end_block)):
                for position in _wave_positions(item, call.num_heads):
                    ahead = position - BLOCK_TOKENS * block
                    if ahead >= BLOCK_TOKENS - 1:
                        whole += 1
                    else:
                        others += sum(_pairs(ahead, call.num_heads))
    return Work(plain, whole, others)


def _is_plain(item: WorkItem, block: int, init_blocks: int, local_blocks: int) -> bool:
    """Whether every row sees the block whole and gets no sentinel for it; the first row sees the least."""
    seen = item.position // BLOCK_TOKENS + 1
    whole = BLOCK_TOKENS * (block + 1) <= item.position + 1
    return block < item.end_block and whole and init_blocks <= block < seen - local_blocks


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


def _done_work(report: RunReport) -> Work:
    """As ``due_work``: one stretch of code has the MFMAs of four whole blocks, and one those of one."""
    is_mfma = np.array([one.mnemonic.startswith("v_mfma") for one in report.kernel.instructions])
    edges = sorted({0, *report.kernel.labels.values(), len(is_mfma)})
    stretches = [slice(first, end) for first, end in itertools.pairwise(edges)]
    trips = []
    for mfmas in (STORE_BLOCKS * _WHOLE, _WHOLE):
        (stretch,) = [one for one in stretches if is_mfma[one].sum() == mfmas]
        trips.append(int(report.executed[stretch][is_mfma[stretch]][0]))
    plain, whole = trips
    done = int(report.executed[is_mfma].sum())
    return Work(plain, whole, done - (STORE_BLOCKS * plain + whole) * _WHOLE)
