"""Mutants of the top-k and insert kernels that compute the same with the same work, reviewed one by one.

An entry names the change without registers (``equivalents.description``) and is asked only about a mutant
that survived every launch.
"""

from __future__ import annotations

import re

REVIEWED: tuple[tuple[str, str], ...] = (
    (
        r"constant shifted: s_lshl2_add_u32 s, s, -8 -> s_lshl2_add_u32 s, s, -7; s_and_b32 s, s, -8",
        "the bit that differs is masked off by the next instruction",
    ),
    (
        r"(compare flipped|constant shifted): v_cmp_gt_i32_e(32|64) (s|vcc), 16, v -> "
        r"v_cmp_(ge_i32_e(32|64) (s|vcc), 16|gt_i32_e(32|64) (s|vcc), 17), v",
        "what is kept or noted at place 16 lies behind the best 16: padding or the next candidate overwrites "
        "it, and of the groups' table 16 entries are read",
    ),
    (
        r"(deleted|operation changed|constant shifted): s_add_i32 s, s, 32 -> .*; s_waitcnt lgkmcnt\(3\); "
        r"v_cmp_gt_i64_e32 vcc, v, v; s_add_i32 s, s, 8",
        "of at most 64 candidates 16 are compared before, so the loop over 32 more is passed once",
    ),
    (
        r"v_cmp_gt_i32_e32 vcc, 16, v; compare flipped: v_cmp_gt_u32_e64 s, s, v -> v_cmp_ge_u32_e64",
        "a row that goes through its groups has more than 16: the lane behind the last is none of the best",
    ),
    (
        r"constant shifted: v_add_u32_e32 v, 0x200000, v -> v_add_u32_e32 v, 0x200001, v",
        "one unit in the last place is far less than a scaled value's distance from a threshold",
    ),
    (
        r"constant shifted: v_and_b32_e32 v, 0x1ff, v -> v_and_b32_e32 v, 0xff, v",
        "2^128 / 448 * 2^-126 is below 2, so the pattern's bit 30 is never set",
    ),
    (
        r"v, 0xffff0000, v -> v_and_b32_e32 v, 0x7fff0000, v; v_lshlrev_b32_e32 v, 16, v; v_max_u32",
        "the largest of magnitudes has no sign",
    ),
    (
        r"v_alignbit_b32 v, v, v, 7; .*: v_lshrrev_b32_e32 v, 7, v -> .*; v_mul_lo_u32 v, v, s",
        "the upper half of a page id, which is 0: 2^32 pages are 36 TiB",
    ),
    (
        r"constant shifted: v_max_f32_e32 v, 0x3b000000, v -> v_max_f32_e32 v, 0x3b000001, v",
        "both round to the least scale",
    ),
    (
        r"operands swapped: v_permlane32_swap_b32_e32 v, v -> .*; s_nop 1; v_max_i32_dpp v, v, v row_mirror",
        "the two hold the same, and the row that comes of it mirrored has the same minimum",
    ),
)
"""(pattern of the change, why nothing can tell)."""


def reason_of(change: str) -> str:
    """The reason of the entry that a change fits, "" without one."""
    return next((reason for pattern, reason in REVIEWED if re.search(pattern, change)), "")
