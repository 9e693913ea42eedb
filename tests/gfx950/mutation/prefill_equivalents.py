"""Compares of the prefill scorer that, changed, compute the same; reviewed one by one."""

from __future__ import annotations

from tests.gfx950.mutation.equivalents import Equivalent

REVIEWED = (
    Equivalent(
        "no plain group where plain_first = plain_end: its loop then makes no trip, and the careful groups "
        "before and behind it are those of one run",
        r".*; v_and_b32_e32 v, -4, v; v_mov_b32_e32 v, s; "
        r"compare flipped: v_cmp_lt_i32_e32 vcc, s, v -> v_cmp_le_i32_e32 vcc, s, v; .*",
        differs=True,
    ),
    Equivalent(
        "block >= min(block + 4, end) is false for every group: a group begins below the item's end",
        r"s_add_i32 s, s, 4; s_min_i32 s, s, s; v_mov_b32_e32 v, v; "
        r"compare flipped: s_cmp_ge_i32 s, s -> s_cmp_gt_i32 s, s; v_mov_b32_e32 v, 0xff800000; .*",
        differs=False,
    ),
    Equivalent(
        "block < fill_end for the first of four blocks: a group begins below its loop's end, and that is "
        "fill_end or, for scored blocks, the item's end, which is not behind it",
        r"s_mov_b64 s, 0; s_and_b64 vcc, exec, s; s_cbranch_vccz \S+; "
        r"compare flipped: s_cmp_lt_i32 s, s -> s_cmp_le_i32 s, s; s_cselect_b64 s, -1, 0; "
        r"s_and_b64 s, s, s; s_and_saveexec_b64 s, s",
        differs=False,
    ),
)
