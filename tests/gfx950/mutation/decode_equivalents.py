"""Mutants of the decode scorer that compute the same, reviewed one by one."""

from __future__ import annotations

from tests.gfx950.mutation.equivalents import Equivalent

REVIEWED = (
    Equivalent(
        "a share that begins or ends with a request then looks at one more, of which it has no block",
        r"compare flipped: (v_cmp_g[te]_i32_e(32 vcc|64 s), s, v -> .*s_bcnt1_i32_b64|"
        r"v_cmp_gt_i32_e64 s, s, v -> v_cmp_ge_i32_e64 s, s, v; (v_readlane_b32|v_sub_u32_e32)|"
        r"v_cmp_g[te]_i32_e32 vcc, s, v -> .*s_cselect_b64)",
        differs=True,
    ),
    Equivalent(
        "a share of no block then looks at one request, of which it has none",
        r"compare flipped: s_cmp_(lt_i32 s, s -> s_cmp_le_i32 s, s; v_and_b32_e32 v, (15|0x3c0), v|"
        r"ge_i32 s, s -> s_cmp_gt_i32 s, s; s_waitcnt lgkmcnt\(0\); s_barrier)",
        differs=False,
    ),
    Equivalent(
        "the request past the batch lies behind every share",
        r"buffer_load_dword v, v, s, 0 offen; compare flipped: v_cmp_gt_u32_e32 vcc, s, v -> .*; "
        r"s_waitcnt vmcnt\(0\)",
        differs=True,
    ),
    Equivalent(
        "a request without keys has no blocks, whether that is told from its length or from its blocks",
        r"s_min_i32 s, s, s; compare flipped: s_cmp_gt_i32 s, 0 -> s_cmp_ge_i32 s, 0; s_cselect_b32 s, s, 0|"
        r"s_waitcnt lgkmcnt\(0\); compare flipped: s_cmp_gt_i32 s, 0 -> s_cmp_ge_i32 s, 0; s_cselect_b64",
    ),
    Equivalent(
        "the 64th request is then read from memory instead of LDS: the same numbers",
        r"compare flipped: s_cmp_gt_i32 s, 63 -> s_cmp_ge_i32 s, 63",
        differs=True,
    ),
    Equivalent(
        "what sees four blocks whole and without sentinels gets the same scores with their selections",
        r"v_max3_f32 v, v, v, v; .*compare flipped: s_cmp_(lt|gt)_i32 s, s -> s_cmp_(le|ge)_i32 s, s; "
        r"s_(cselect_b64 s, -1, 0|mov_b32 s, s); s_(cmp_gt_i32|mov_b32|cselect_b64) s, |"
        r"compare flipped: s_cmp_gt_i32 s, s -> s_cmp_ge_i32 s, s; "
        r"(s_cselect_b64 s, -1, 0; s_cmp_gt_i32 s, s; )?v_mov_b32_e32 v, 0xff800000",
    ),
    Equivalent(
        "a tail ends less than four blocks behind its first one",
        r"s_cselect_b64 s, 0, -1; compare flipped: s_cmp_ge_i32 s, s -> s_cmp_gt_i32 s, s; s_cselect_b64",
        differs=False,
    ),
    Equivalent(
        "where nothing is left to fill the loop's one trip finds no lane with a cell",
        r"s_add_i32 s, s, 64; compare flipped: s_cmp_lt_[iu]32 s, s -> s_cmp_le|"
        r"s_waitcnt lgkmcnt\(0\); compare flipped: s_cmp_lt_i32 s, s -> s_cmp_le_i32 s, s; "
        r"s_cselect_b64 s, -1, 0; s_and_b64 s, s, s; s_and_b64 s, s, (s|exec)|"
        r"s_cselect_b32 s, s, s; compare flipped: s_cmp_lt_u32 s, s -> s_cmp_le_u32 s, s; s_mov_b32 s, 0",
    ),
    Equivalent(
        "lane 16 then stores or leaves what lane 0 does: the same maximum in the same place",
        r"compare flipped: v_cmp_gt_i32_e(32 vcc|64 s), 16, v -> .*; s_and_b64",
        differs=True,
    ),
    Equivalent(
        "a row that stands on the first token of the block behind a diagonal has its own score of that one, "
        "which follows",
        r"v_permlane16_swap_b32_e32 v, v; compare flipped: v_cmp_gt_i32_e64 s, s, v -> .*; "
        r"v_max_f32_e32 v, v, v; s_and_b64",
        differs=True,
    ),
    Equivalent(
        "an end of the plain blocks that is too low: those behind it get the same scores with their "
        "selections",
        r"constant shifted: s_ashr_i32 s, s, 7 -> s_ashr_i32 s, s, 8; s_sub_i32 s, s, s; "
        r"v_mov_b32_e32 v, v; s_add",
    ),
    Equivalent(
        "the pair is exec where this is reached, and all 64 lanes are active",
        r"v_permlane32_swap_b32_e32 v, v; deleted: s_mov_b64 s, -1 -> s_nop 0; v_max_f32_e32 v, v, v",
    ),
    Equivalent(
        "the number of a block has no sign",
        r"s_lshr_b32 s, s, 2; constant shifted: s_and_b32 s, s, 0x3ffffffc -> s_and_b32 s, s, 0x1ffffffc",
    ),
    Equivalent(
        "the first thread of a wave is a multiple of 64",
        r"compare flipped: s_cmpk_gt_u32 s, 0x7f -> s_cmpk_ge_u32 s, 0x7f; s_barrier",
        differs=False,
    ),
)

_OF_SEVERAL_HEADS = (
    Equivalent(
        "a request of two or four heads has more than one row",
        r"s_cselect_b32 s, s, 0; compare flipped: s_cmp_lt_i32 s, 1 -> s_cmp_le_i32 s, 1; s_cbranch_scc1",
        differs=False,
    ),
)


def reviewed_of(heads: int) -> tuple[Equivalent, ...]:
    """The entries for the kernel of so many heads."""
    return REVIEWED + _OF_SEVERAL_HEADS * (heads > 1)
