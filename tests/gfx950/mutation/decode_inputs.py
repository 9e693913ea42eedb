"""The launches that mutants of the decode scorer must survive, for each number of heads.

Together they execute every path of the kernel: the split among few and many requests, shares that end inside
one, the ring's loop and tails of one to three pages, every diagonal, sentinels, maxima of a wave's groups and
of groups that a workgroup shares, fills, and numbers that no host would let pass.
"""

from __future__ import annotations

from functools import cache

import torch

from kernel.backends.flydsl.launch import MAX_ROWS
from kernel.gfx950 import SCHEDULES
from tests.gfx950.mutation.decode_launches import DecodeLaunch
from tests.support.call import Call
from tests.support.calls import random_call, staircase_call

LEAST, MOST = -(2**31), 2**31 - 1


@cache
def launches(heads: int) -> tuple[DecodeLaunch, ...]:
    """The launches, all of them exact: scores are the same bits as the oracle's."""
    found = [
        _diagonals(heads),
        DecodeLaunch("tails", _call([(5 * 128, 1), (6 * 128 + 9, 2), (7 * 128 - 1, 1)], heads, 31), 7),
        DecodeLaunch("loop", _call([(21 * 128 + 40, 2), (300, 1)], heads, 32), 23),
        DecodeLaunch("forced", _call([(1400, 3), (257, 1), (130, 2)], heads, 33, (3, 2)), 75),
        DecodeLaunch("groups", _call([(40 * 128, 1), (33 * 128 + 1, 2)], heads, 34, (1, 0)), 40, maxima=True),
        DecodeLaunch("shared", _call([(17 * 128 + 5, 2)], heads, 35, (0, 1)), 37, maxima=True),
        DecodeLaunch("spread", _call([(300, 1), (700, 2), (1, 1)], heads, 36), 7, 1, maxima=True),
        DecodeLaunch("unfilled", _call([(300, 1), (700, 1)], heads, 37), 20, 1, maxima=True, fill=False),
        DecodeLaunch("many requests", _call(_padded(66, 22), heads, 38), 3),
        DecodeLaunch("padding", _call(_padded(400, 66), heads, 39), 4, maxima=True),
        DecodeLaunch("padding inside shares", _call(_padded(400, 66), heads, 41), 4),
        # The first block that is needed and the last one in each place where a page is requested.
        *(
            DecodeLaunch(f"slot {slot}", _call([(512 * (slot + 1) - 3, 1)], heads, 50 + slot, (slot, 1)), 33)
            for slot in range(8)
        ),
        *(
            DecodeLaunch(
                f"{blocks} blocks", _call([(128 * blocks - 3, 1)], heads, blocks, (blocks - 9, 1)), 23
            )
            for blocks in range(10, 22)
        ),
        # Shares of four blocks, of which the last one's latter two are not needed: while its first two are
        # scored each could request one of them.
        DecodeLaunch("two local blocks", _call([(16 * 128 - 3, 1)], heads, 43, (0, 2)), 23),
        # Each request in turn of those that a lane counts may be the first past the batch.
        *(
            DecodeLaunch(f"{batch} requests", _call(_late(batch), heads, 42), 2)
            for batch in (64, 193, 256, *range(300, 304))
        ),
        _hostile(heads, maxima=False),
        _hostile(heads, maxima=True),
    ]
    return tuple(launch.under(SCHEDULES[at % len(SCHEDULES)]) for at, launch in enumerate(found))


def _diagonals(heads: int) -> DecodeLaunch:
    """Every ``position mod 128``: the score of a block is the last token that its row sees."""
    queries = MAX_ROWS // heads
    lengths = [(prefix + queries, queries) for prefix in range(0, 128, queries)]
    return DecodeLaunch("diagonals", staircase_call(lengths, heads), 2)


def _call(lengths: list[tuple[int, int]], heads: int, seed: int, forced: tuple[int, int] = (0, 0)) -> Call:
    """``lengths`` have as many queries for four heads as given, and as many rows for fewer."""
    rows = [(seq_len, min(4 * queries, MAX_ROWS, seq_len * heads)) for seq_len, queries in lengths]
    return _with_zeros(
        random_call([(seq_len, num // heads) for seq_len, num in rows], heads, seed=seed), forced
    )


def _with_zeros(call: Call, forced: tuple[int, int] = (0, 0)) -> Call:
    call.q.view(torch.uint8)[2::5] = 0  # scores of 0 show any start value but 0
    return call.forcing(*forced)


def _padded(batch: int, every: int) -> list[tuple[int, int]]:
    """Requests of one or two blocks among padding, some of which has keys; one of them the last."""
    return [
        (1 + 67 * row % 250, 1) if row % every == 1 or row == batch - 1 else (0 if 37 * row % 11 else 100, 0)
        for row in range(batch)
    ]


def _late(batch: int) -> list[tuple[int, int]]:
    """Requests in the middle and at the end only."""
    return [(200, 1) if row in (batch // 2, batch - 1) else (0, 0) for row in range(batch)]


def _hostile(heads: int, *, maxima: bool) -> DecodeLaunch:
    """Rows, queries, lengths and page ids outside everything, beside a legal request."""
    call = _with_zeros(random_call([(1100, 1)], heads, seed=40))
    width, num_pages = call.block_table.shape[1], call.pages.shape[0]
    ids = tuple(([LEAST, MOST, num_pages, -1, 0, 1] * 2)[:width])
    extra = (
        (1, 1, 2, MOST), (3, 2, 3, 200), (MOST, 3, 4, 200), (-1, MOST, LEAST, 200), (1, LEAST, MOST, 200),
        (1, 4, 5, LEAST), (1, 6, 5, 200), (1, 0, 0, 200), (1, 8, 60, 130), (1, 6, 7, 300), (2, 7, 8, MOST),
    )  # fmt: skip
    name = "hostile with maxima" if maxima else "hostile"
    table = (ids, (num_pages,) * width)
    return DecodeLaunch(name, call, width, maxima=maxima, extra=extra, extra_table=table, extra_queries=9)
