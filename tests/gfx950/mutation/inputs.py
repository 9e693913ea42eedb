"""The launches that mutants of the prefill scorer must survive, for each number of heads.

Together they execute every instruction of the kernel, but few blocks, so that a mutant dies within a second.
"""

from __future__ import annotations

from functools import cache

import torch

from kernel.gfx950 import SCHEDULES
from kernel.plan import TILE_ROWS
from tests.gfx950.mutation.launches import Case, Launch, one_each
from tests.support.calls import random_call


@cache
def launches(heads: int) -> tuple[Launch, ...]:
    """The launches, all of them exact: scores are the same bits as the oracle's."""
    tile = TILE_ROWS // heads
    found: list[Launch] = []
    for case in cases(heads, tile):
        found += one_each(case, SCHEDULES)
    decode = _case("decode", [(1, 1), (128, 1), (257, 2)], heads, seed=21, columns=3)
    return (*found, Launch(decode, tuple(decode.items), SCHEDULES[1]))


def cases(heads: int, tile: int) -> list[Case]:
    prefixes = [max(16 - 16 // heads, 1), 13, *(16 * m + 2 * m + 1 for m in range(1, 7)), 16 * 7 + 15]
    return [
        # the diagonal inside an M-tile, a tail, plain groups before it, 2 segments
        _case("unaligned", [(5 * 128 + 37 + tile - 5, tile - 5)], heads, seed=11, slots=2),
        # the diagonal at a block's edge
        _case("aligned", [(4 * 128 + tile, tile)], heads, seed=12),
        # the diagonal in each M-tile, at most of its tokens; the first wave's last query ends a block
        _case("diagonals", [(prefix + 128, 128) for prefix in prefixes], heads, seed=15),
        # the last block seen whole: the last of the maxima leaves a plain group
        _case("whole", [(512, 1), (1280, 1), (511, 1)], heads, seed=16, maxima=True),
        # sentinels keep a group from being plain; waves that have no row by one
        _case("local", [(512, 1), (1023, 8), (1200, 4)], heads, seed=17, forced=(0, 1), columns=16),
        _case("init", [(1025, 3), (1300, 128 if heads == 1 else 8)], heads, seed=18, forced=(4, 0)),
        # sentinels, groups of 16, cells past the end
        _case(
            "forced", [(18 * 128 + 30, 90)], heads, seed=13, forced=(5, 1), slots=2, columns=39, maxima=True
        ),
        _case(
            "ragged",
            [(300, 45), (0, 0), (129, 1), (127, 2), (517, 70), (650, 11)],
            heads,
            seed=14,
            forced=(1, 2),
            columns=7,
        ),
    ]


def _case(
    name: str,
    lengths: list[tuple[int, int]],
    heads: int,
    *,
    seed: int,
    forced: tuple[int, int] = (0, 0),
    slots: int = 1,
    columns: int | None = None,
    maxima: bool = False,
) -> Case:
    call = random_call(lengths, heads, seed=seed).forcing(*forced)
    call.q.view(torch.uint8)[5::23] = 0  # scores of 0 show any start value but 0
    blocks = max(-(-seq_len // 128) for seq_len, _ in lengths)
    return Case(name, call, blocks if columns is None else columns, slots, maxima)
