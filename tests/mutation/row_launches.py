"""The launches that mutants of the top-k and insert kernels must survive: few rows each, quick to kill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from kernel.backends.flydsl.geometry import KeyType, Variant
from kernel.gfx950 import SCHEDULES
from tests.gfx950.row_launches import TopkLaunch, hard_keys, insert_launch, telling_rows
from tests.gfx950.topk_rows import (
    Row,
    counted_rows,
    crowded_groups,
    crowded_rows,
    cut_beside_padding,
    cut_columns,
    cut_groups,
    cut_scores,
    cut_short,
    few_groups,
    fine_rows,
    heavy_rows,
    network_rows,
    one_a_lane,
    rows_of_groups,
    short_rows,
    special_rows,
    spread_rows,
    tied_rows,
    whole_chunks,
    whole_lists,
    zero_rows,
)
from tests.mutation.equivalents import Equivalent
from tests.mutation.launch import Launch

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
    if not grouped:
        rows = list(cut_beside_padding(random, variant.best))
        yield TopkLaunch("lists cut beside padding", variant, [rows], variant.best)
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
        yield insert_launch(key_type, hard_keys(key_type, scales, seed), seed)
    yield insert_launch(key_type, hard_keys(key_type, slice(None), 8), 8)
    yield insert_launch(key_type, hard_keys(key_type, slice(40, 70))[:70], 9)


# Mutants of the top-k and insert kernels that compute the same with the same work, reviewed one by one.

REVIEWED = (
    Equivalent(
        "the bit that differs is masked off by the next instruction",
        r"constant shifted: s_lshl2_add_u32 s, s, -8 -> s_lshl2_add_u32 s, s, -7; s_and_b32 s, s, -8",
    ),
    Equivalent(
        "what is kept or noted at place k lies behind the best k: padding or the next candidate overwrites "
        "it, and of the groups' table k entries are read",
        r"(compare flipped|constant shifted): v_cmp_gt_i32_e(32|64) (s|vcc), (16|32|64), v -> "
        r"v_cmp_(ge_i32_e(32|64) (s|vcc), (16|32|64)|gt_i32_e(32|64) (s|vcc), (17|33|0x41)), v",
        differs=True,
    ),
    Equivalent(
        "of at most 64 candidates 16 are compared before, so the loop over 32 more is passed once",
        r"(deleted|operation changed|constant shifted): s_add_i32 s, s, 32 -> .*; s_waitcnt lgkmcnt\(3\); "
        r"v_cmp_gt_i64_e32 vcc, v, v; s_add_i32 s, s, 8",
    ),
    Equivalent(
        "a row that goes through its groups has more than 16: the lane behind the last is none of the best",
        r"v_cmp_gt_i32_e32 vcc, 16, v; compare flipped: v_cmp_gt_[iu]32_e64 s, s, v -> v_cmp_ge_[iu]32_e64",
        differs=True,
    ),
    Equivalent(
        "one unit in the last place is far less than a scaled value's distance from a threshold",
        r"constant shifted: v_add_u32_e32 v, 0x200000, v -> v_add_u32_e32 v, 0x200001, v",
    ),
    Equivalent(
        "2^128 / 448 * 2^-126 is below 2, so the pattern's bit 30 is never set",
        r"constant shifted: v_and_b32_e32 v, 0x1ff, v -> v_and_b32_e32 v, 0xff, v",
    ),
    Equivalent(
        "the largest of magnitudes has no sign",
        r"v, 0xffff0000, v -> v_and_b32_e32 v, 0x7fff0000, v; v_lshlrev_b32_e32 v, 16, v; v_max_u32",
    ),
    Equivalent(
        "the upper half of a page id, which is 0: 2^32 pages are 36 TiB",
        r": v_lshrrev_b32_e32 v, 7, v -> .*; v_mul_lo_u32 v, v, s; v_add3_u32",
    ),
    Equivalent(
        "both round to the least scale",
        r"constant shifted: v_max_f32_e32 v, 0x3b000000, v -> v_max_f32_e32 v, 0x3b000001, v",
    ),
    Equivalent(
        "all of a list's first 64 are sorted, and not only its best k: padding or the next candidate "
        "overwrites what lies behind them",
        r"v_cmp_gt_i32_e32 vcc, (16|32|64), v; deleted: s_and_saveexec_b64 s, vcc -> s_nop 0; "
        r"v_lshl_add_u32 v, v, 3, s; ds_write_b64 v, v",
    ),
    Equivalent(
        "groups are noted behind the best k as well, and of the table k entries are read",
        r"v_not_b32_e32 v, v; operation changed: s_and_b64 vcc, s, vcc -> s_or_b64 vcc, s, vcc; "
        r"v_cndmask_b32_e64 v, v, v, s; v_cndmask_b32_e32 v, v, v, vcc",
    ),
    Equivalent(
        "a lane without a group holds padding, whose place is behind more than 16",
        r"v_cmp_gt_i32_e32 vcc, 16, v; v_cmp_gt_i32_e64 s, s, v; v_not_b32_e32 v, v; "
        r"deleted: s_and_b64 vcc, s, vcc -> s_nop 0; v_cndmask_b32_e64 v, v, v, s",
    ),
    Equivalent(
        "vcc is all ones or none, of a scalar condition, and some lane is active",
        r"deleted: s_and_b64 vcc, exec, vcc -> s_nop 0;",
    ),
    Equivalent(
        "what is compared with 0 may be 1 or 2",
        r"constant shifted: v_cndmask_b32_e64 v, 0, 1, s -> v_cndmask_b32_e64 v, 0, 2, s; "
        r"v_cmp_ne_u32_e32 vcc, 0, v",
    ),
    Equivalent(
        "of the same two halves or rows the sum or the lesser is taken",
        r"operands swapped: v_permlane(16|32)_swap_b32_e32 v, v -> .*; v_(add_u32|min_i32)_e32 v, v, v",
    ),
    Equivalent(
        "padding is below every candidate whatever its lower half is",
        r"constant shifted: v_mov_b32_e32 v, 0 -> v_mov_b32_e32 v, 1; v_bfrev_b32_e32 v, 64",
    ),
    Equivalent(
        "no column has so low a key: that of -inf is 0x807fffff",
        r"constant shifted: s_max_i32 s, s, 0x80000001 -> s_max_i32 s, s, 0x80000002",
    ),
    Equivalent(
        "of no lane something is read and not taken",
        r"s_ff1_i32_b64 s, vcc; deleted: s_min_u32 s, s, 64 -> s_nop 0; v_readlane_b32 s, v, s; s_cmp_lg_u64",
    ),
    Equivalent(
        "rows of one load and rows of a loop's loads come here, and of neither is a load of what is touched "
        "next still in flight: LLVM's counters are those of both",
        r"v_lshl_add_u32 v, v, 3, s; (deleted|vmcnt weakened): s_waitcnt vmcnt\(0\) -> .*; "
        r"(ds_write_b64 v, v; s_or_b64 exec, exec, s|ds_read_b64 v, v; v_cmp_gt_i32_e32 vcc, s, v; s_cmp_eq)|"
        r"vmcnt (weakened|dropped): s_waitcnt vmcnt\(0\) lgkmcnt\(0\) -> .*; "
        r"(v_not_b32_e32 v, v; v_lshl_add_u64 v, s, 0, v|v_cndmask_b32_e64 v, v, v, s; v_mov_b32_e32 v, s)",
    ),
    Equivalent(
        "a list that is cut has more than 64 candidates, so the loop makes more than four trips",
        r"compare flipped: s_cmp_lt_u32 s, 12 -> s_cmp_le_u32 s, 12; "
        r"(s_nop 0|v_cndmask_b32_e64 v, 0, 1, vcc)",
        differs=False,
    ),
    Equivalent(
        "a list is far shorter than 2^30",
        r"constant shifted: s_and_b32 s, s, 0x7ffffffc -> s_and_b32 s, s, 0x3ffffffc",
    ),
    Equivalent(
        "of at most 64 candidates none has place 64",
        r"compare flipped: v_cmp_gt_i32_e32 vcc, 64, v -> v_cmp_ge_i32_e32 vcc, 64, v; "
        r"v_cmp_gt_i32_e64 s, s, v; s_waitcnt lgkmcnt\(0\); v_not_b32_e32 v, v",
        differs=False,
    ),
    Equivalent(
        "a list of more than 128 has padding, whose place is behind all, past its 192nd; and what is sorted "
        "behind its best 64 is overwritten",
        r"v_add_u32_e32 v, 0x80, v; v_cmp_gt_i32_e32 vcc, 64, v; v_cmp_gt_i32_e64 s, s, v; "
        r"operation changed: s_and_b64 s, vcc, s -> s_or_b64 s, vcc, s",
    ),
    Equivalent(
        "rows change places two by two, and what comes of it is mirrored: bitonic as well, and sorted next",
        r"operands swapped: v_permlane16_swap_b32_e32 v, v -> .*; s_nop 1; "
        r"(v_max_i32_dpp v, v, v|v_mov_b32_dpp v, v) row_mirror",
    ),
    Equivalent(
        "the two hold the same, and the row that comes of it mirrored has the same minimum",
        r"operands swapped: v_permlane32_swap_b32_e32 v, v -> .*; s_nop 1; v_max_i32_dpp v, v, v row_mirror",
    ),
    Equivalent(
        "all exchanges across bit 3 of the lane's number are turned: the same network, as below",
        r"operands swapped: v_cndmask_b32_e32 v, v, v, vcc -> .*; v_or_b32_e32 v, 0x[15]00, v; "
        r"v_or_b32_e32 v, 0x[26]00, v",
    ),
    Equivalent(
        "all exchanges across that bit of the lane's number are turned: the same network of lanes whose "
        "numbers "
        "differ in the bit, and the bound is taken of them all",
        r"compare flipped: v_cmp_eq_u32_e32 vcc, 0, v -> v_cmp_ne_u32_e32 vcc, 0, v",
        differs=True,
    ),
    Equivalent(
        "a candidate meets itself only at its own place in the list: in a long list the first four and "
        "those of the "
        "lanes' later ones, or the last ones and the lanes' first, are never the same",
        r"compare flipped: v_cmp_gt_i64_e(32 vcc|64 s), v, v -> v_cmp_ge_i64_e(32 vcc|64 s), v, v",
        differs=False,
    ),
    Equivalent(
        "a lane's third candidate and later ones may lie behind the list and its padding, and be copies "
        "of what an earlier cut moved: their places are not used",
        r"s_nop 1; v_(addc_co_u32_e32 v, vcc, v, v|cndmask_b32_e64 v, 0, 1), vcc; compare flipped: "
        r"v_cmp_gt_i64_e32 vcc, v, v -> v_cmp_ge_i64_e32 vcc, v, v; s_nop 1; "
        r"v_(addc_co_u32_e32 v, vcc, v, v|cndmask_b32_e64 v, 0, 1), vcc; v_cmp_gt_i64",
        differs=True,
    ),
    Equivalent(
        "the entry behind the last is padding, whose place is behind all",
        r"(v_add_u32_e32 v, (64|0x[48c]0|0x100), v; (v_cmp_gt_i32_e(32 vcc|64 s), (16|32|64|s), v; "
        r")?|v_cmp_gt_i32_e32 vcc, (16|32|64), v; )"
        r"compare flipped: v_cmp_gt_i32_e(32 vcc|64 s), s, v -> v_cmp_ge_i32_e(32 vcc|64 s), s, v; "
        r"(v_cmp_gt_i32|s_and_b64)",
    ),
    Equivalent(
        "at 2^-6 both ways give the same scale and byte",
        r"compare flipped: v_cmp_gt_f32_e32 vcc, s, v -> v_cmp_ge_f32|constant shifted: s_mov_b32 s, "
        r"0x3c800000",
    ),
    Equivalent(
        "a scale has no sign",
        r"constant shifted: v_and_b32_e32 v, 0xfff00000, v -> v_and_b32_e32 v, 0x7ff00000, v",
    ),
    Equivalent(
        "eight times a slot has no bit 0",
        r"constant shifted: s_movk_i32 s, 0x3f8 -> s_movk_i32 s, 0x3f9; v_and_or_b32",
    ),
    Equivalent(
        "one unit in the last place of the factor 1 - 2^-10 moves no value across a threshold",
        r"constant shifted: v_mul_f32_e32 v, 0x7fe000, v -> v_mul_f32_e32 v, 0x7fe001, v",
    ),
    Equivalent(
        "both round to the largest scale",
        r"constant shifted: v_min_f32_e32 v, 0x43e00000, v -> v_min_f32_e32 v, 0x43e00001, v",
    ),
    Equivalent(
        "the upper half of a slot, which is 0: 2^32 slots are 309 GB of pages",
        r"v_and_or_b32 v, v, s, v; v_lshlrev_b32_e32 v, 3, v; deleted: v_mov_b32_e32 v, v -> s_nop 0; "
        r"v_lshl_add_u64",
    ),
    Equivalent(
        "of the largest magnitude only the upper 16 bits are used",
        r"constant shifted: v_and_b32_e32 v, 0x7fffffff, v -> v_and_b32_e32 v, 0x7ffffffe, v",
    ),
    Equivalent(
        "the largest of magnitudes has no sign",
        r"v_max3_u32 v, v, v, v; constant shifted: v_and_b32_e32 v, 0xffff0000, v -> v_and_b32_e32 v, "
        r"0x7fff0000",
    ),
    Equivalent(
        "a list of more than 64 is that of a short row, whose only load has landed: longer rows leave fewer",
        r"s_lshl3_add_u32 s, s, s; (deleted|vmcnt weakened): s_waitcnt vmcnt\(0\) -> .*; "
        r"v_add_u32_e32 v, s, v; v_mov_b32_e32 v, 0|"
        r"s_mov_b32 s, 4; v_lshl_add_u32 v, v, 3, s; (deleted|vmcnt weakened): s_waitcnt vmcnt\(0\) -> .*; "
        r"ds_read2st64_b64",
    ),
)
