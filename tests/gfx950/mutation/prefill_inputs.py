"""The launches that mutants of the prefill scorer must survive, for each number of heads.

Together ``launches`` execute every instruction of the kernel, but few blocks, so that a mutant dies within a
second. ``sweep`` takes what chooses a path through every value: only for the few mutants that are left.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import torch

from kernel.contract import BLOCK_TOKENS, HEAD_DIM
from kernel.gfx950 import SCHEDULES
from kernel.page import blocks_of
from kernel.plan import TILE_ROWS
from tests.gfx950.mutation.prefill_launches import Case, PrefillLaunch, one_each
from tests.support.calls import random_call
from tests.support.page_bytes import ONE, pack_page


@cache
def launches(heads: int) -> tuple[PrefillLaunch, ...]:
    """The launches, all of them exact: scores are the same bits as the oracle's."""
    tile = TILE_ROWS // heads
    found: list[PrefillLaunch] = []
    for case in cases(heads, tile):
        found += one_each(case, SCHEDULES)
    decode = _case("decode", [(1, 1), (128, 1), (257, 2)], heads, seed=21, columns=3)
    return (*found, PrefillLaunch(decode, tuple(decode.items), SCHEDULES[1]))


def cases(heads: int, tile: int) -> list[Case]:
    prefixes = sorted({1, max(16 - 16 // heads, 1), 13, *(16 * m + 2 * m + 1 for m in range(1, 7)), 127})
    return [
        # the diagonal inside an M-tile, a tail, plain groups before it, 2 segments
        _case("unaligned", [(5 * 128 + 37 + tile - 5, tile - 5)], heads, seed=11, slots=2),
        # the diagonal at a block's edge
        _case("aligned", [(4 * 128 + tile, tile)], heads, seed=12),
        # the diagonal in each M-tile, at most of its tokens; a wave's last query ends a block or begins one
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
        # the largest keys and queries, at a block's edge and elsewhere
        _extreme_case([(256, 128), (269, 128)], heads),
        # rows that end at each cell of a group: behind the last block, and behind the cells past the end
        *(
            _case(f"{end} cells", [(128 * end - 3, 2), (100, 1)], heads, seed=19, columns=end)
            for end in (5, 6, 7)
        ),
    ]


@cache
def sweep(heads: int) -> tuple[PrefillLaunch, ...]:
    """Launches of many items: every ``prefix mod 128``, every count of blocks up to 9 between sentinels, and
    diagonals at a block's edge with blocks and queries around them."""
    found = []
    tile = TILE_ROWS // heads
    for forced in ((0, 0), (1, 2), (4, 1)):
        lengths = [(128 * before + tokens, tokens) for before in range(6) for tokens in (1, 77)]
        lengths += [(128 * before + tile, tile) for before in (0, 3)]
        found.append(_case(f"aligned, forced {forced}", lengths, heads, seed=23, forced=forced))
    for first in range(0, 128, 16):
        lengths = [(prefix + 128, 128) for prefix in range(first, first + 16)]
        found.append(_case(f"prefixes from {first}", lengths, heads, seed=first))
    lengths = [(128 * blocks - 61 * (blocks % 2), 1 + blocks % 3) for blocks in range(1, 10)]
    for forced in itertools.product((0, 1, 4, 5), (0, 1)):
        columns, maxima = (9, True) if sum(forced) % 2 else (12, False)
        name = f"{forced} forced, {columns} cells"
        found.append(_case(name, lengths, heads, seed=20, forced=forced, columns=columns, maxima=maxima))
    return tuple(
        PrefillLaunch(case, tuple(case.items), SCHEDULES[at % len(SCHEDULES)])
        for at, case in enumerate(found)
    )


def _extreme_case(lengths: list[tuple[int, int]], heads: int) -> Case:
    """One dimension of each key and of each row of queries is 384, the first value that E5M2 has as infinity;
    the others are smaller and none is 0, so that no NaN comes of it. Sums are exact."""
    random = np.random.default_rng(22)
    call = random_call(lengths, heads, seed=22)
    tokens = np.arange(BLOCK_TOKENS)
    for page in call.pages.numpy():
        codes = random.integers(1, 6, (BLOCK_TOKENS, HEAD_DIM), np.uint8)  # magnitudes 0.5 to 3
        groups = random.integers(0, HEAD_DIM // 16, BLOCK_TOKENS)
        codes[tokens, 16 * groups + random.integers(0, 16, BLOCK_TOKENS)] = 7  # 6
        codes |= random.integers(0, 2, codes.shape, np.uint8) << 3
        scales = np.full((BLOCK_TOKENS, HEAD_DIM // 16), ONE, np.uint8)
        scales[tokens, groups] = ONE + 8 * 6  # 64
        page[:] = pack_page(codes, scales)
    queries = call.q.view(torch.uint8).numpy().reshape(-1, HEAD_DIM)
    queries[:] = ONE
    rows = np.arange(len(queries))
    queries[rows, random.integers(0, HEAD_DIM, len(rows))] = 0x7C
    queries |= random.integers(0, 2, queries.shape, np.uint8) << 7
    return Case("extreme", call, blocks_of(max(seq_len for seq_len, _ in lengths)))


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
    blocks = blocks_of(max(seq_len for seq_len, _ in lengths))
    return Case(name, call, blocks if columns is None else columns, slots, maxima)
