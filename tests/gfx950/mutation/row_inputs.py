"""The launches that mutants of the top-k and insert kernels must survive: few rows each, quick to kill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from kernel.backends.flydsl.geometry import KeyType, Variant
from kernel.gfx950 import SCHEDULES
from tests.gfx950.bound_network import telling_rows
from tests.gfx950.key_groups import hard_keys
from tests.gfx950.mutation.launch import Launch
from tests.gfx950.test_insert import launch_of
from tests.gfx950.topk_cut_rows import cut_columns, cut_groups, cut_scores, cut_short
from tests.gfx950.topk_launch import TopkLaunch
from tests.gfx950.topk_list_rows import (
    counted_rows,
    crowded_groups,
    crowded_rows,
    few_groups,
    fine_rows,
    heavy_rows,
    one_a_lane,
    tied_rows,
    whole_lists,
)
from tests.gfx950.topk_rows import (
    Row,
    network_rows,
    rows_of_groups,
    short_rows,
    special_rows,
    spread_rows,
    whole_chunks,
    zero_rows,
)

_PART = 16
"""Rows of a launch: one workgroup of four rows a wave."""


def topk_launches(variant: Variant) -> Iterator[Launch]:
    """Network rows, short rows of every length, ties and special values; in both orders, every schedule."""
    random = np.random.default_rng(7)
    length = 2100 if variant.most_groups is None else 8300 if variant.most_groups == 0 else 700
    grouped = variant.most_groups is not None
    parts: list[tuple[Iterable[Row], int]] = [
        (telling_rows(variant.best, grouped), variant.best),
        (network_rows(random, variant.best, 16 if grouped else 4, 8), variant.best),
        (crowded_rows(random, variant.best), variant.best),
        (crowded_groups(random, variant.best), variant.best),
        (spread_rows(random, length), variant.best),
        *_cut_rows(random, variant),
        *(
            []
            if grouped
            else [(islice(tied_rows(random, num), 4), variant.best) for num in (600, 2100, 2300)]
        ),
        (tied_rows(random, 256), variant.best),
        (heavy_rows(random, min(variant.best, 32), 2200 if not grouped else 256), variant.best),
        (islice(tied_rows(random, 1024), 6), variant.best),
        *((zero_rows(random, num), variant.best) for num in (250, 660)),
        (short_rows(random), variant.best - 1),
        (counted_rows(random, variant.best), variant.best),
        (few_groups(random), variant.best),
        (rows_of_groups(random, min(length, 1000), variant.best), variant.best),
        (islice(special_rows(random, length), 12 if length < 8000 else 4), variant.best),
        (islice(special_rows(random, 600), 12, None), variant.best),
    ]
    at = 0
    for rows, k in parts:
        left = iter(rows)
        while part := list(islice(left, _PART)):
            schedule = SCHEDULES[at % len(SCHEDULES)]
            yield TopkLaunch(part[0].name, variant, [part], k, bool(at % 2), schedule)
            at += 1
    row = Row("60 of 99", random.standard_normal(60).astype(np.float32))
    none = Row("fewer than none", np.zeros(0, np.float32))
    lengths = (99, 61, 60, 60, -1)
    yield TopkLaunch("clamped", variant, [[*[row] * 4, none]], 3, columns=60, lengths=lengths)
    rows = [Row(f"{num} blocks", random.standard_normal(num).astype(np.float32)) for num in range(1, 41)]
    yield TopkLaunch("workgroups", variant, [rows], 3)
    heads = [[Row("random", random.standard_normal(290).astype(np.float32)) for _ in range(3)] for _ in "ab"]
    few = list(islice(short_rows(random), _PART))
    for ascending in (False, True):
        yield TopkLaunch("short", variant, [few], variant.best - 1, ascending)
        yield TopkLaunch("heads", variant, heads, 5, ascending)

    left = one_a_lane(random, variant.best)
    while part := list(islice(left, _PART)):
        yield TopkLaunch(part[0].name, variant, [part], variant.best)
    if variant.most_groups == 256:  # the longest row whose list is cut only at its end
        yield TopkLaunch(
            "groups that tie", variant, [list(whole_lists(random, variant.best, 4))], variant.best
        )


def _cut_rows(random: np.random.Generator, variant: Variant) -> Iterator[tuple[Iterable[Row], int]]:
    """Rows whose lists have any length, and are cut in each place of the code that cuts one."""
    slices = None if variant.most_groups is None else (variant.most_groups or 512) // 64
    yield fine_rows(random, variant.best, slices), variant.best
    yield cut_short(random, variant.best), variant.best
    if not variant.most_groups:
        yield whole_chunks(random, 2048 if variant.most_groups is None else 16 * 512), variant.best
    if variant.most_groups is None:
        yield cut_scores(random, variant.best), variant.best
    else:
        yield cut_groups(random, variant.best, (variant.most_groups or 512 + 192) // 64), variant.best
        yield cut_columns(random, variant.best), variant.best


def insert_launches(key_type: KeyType) -> Iterator[Launch]:
    """Thresholds and midpoints of some scales, special values; skipped slots; a last wave with few keys."""
    for seed, scales in enumerate((slice(0, None, 40), slice(5, 12), slice(120, None))):
        yield launch_of(key_type, hard_keys(key_type, scales, seed), seed)
    yield launch_of(key_type, hard_keys(key_type, slice(None), 8), 8)
    yield launch_of(key_type, hard_keys(key_type, slice(40, 70))[:70], 9)
