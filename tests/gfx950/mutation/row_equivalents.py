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
        r"operands swapped: v_permlane32_swap_b32_e32 v, v -> .*; s_nop 1; v_max_i32_dpp v, v, v row_mirror",
        "the two hold the same, and the row that comes of it mirrored has the same minimum",
    ),
)
"""(pattern of the change, why nothing can tell)."""


def reason_of(change: str) -> str:
    """The reason of the entry that a change fits, "" without one."""
    return next((reason for pattern, reason in REVIEWED if re.search(pattern, change)), "")
