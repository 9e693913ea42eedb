"""Which tests of the contract the simulated gfx950 runs on every commit, which nightly, and which never.

It executes each instruction of each workgroup: some 30 ms of a core for a workgroup with little to do, as
much again for every few blocks more. What is cheap there, or reaches code of the kernel that nothing else
reaches, runs on every commit. What repeats that with more requests, rows or blocks is nightly: every line of
the contract keeps a small form for every commit, and ``tests/gfx950`` sweeps what is the kernel's own (each
edge of the diagonal, segments, orders of waves, offsets past 32 bits). Contexts of a million tokens are left
to real devices: the loop over their blocks is the one that 1,100 blocks go through.

On every commit its calls are smaller, too: ``RAGGED`` instead of the larger batch of the same shape, and
``COMPUTE_UNITS`` instead of 256, so that fewer workgroups have more to do.
"""

from __future__ import annotations

import re

NAME = "flydsl-sim"
NEVER = "every instruction is executed in software, too slow for this size"
"""Why tests of ``product_backend`` leave it out."""

COMPUTE_UNITS = 2
RAGGED = ((300, 9), (0, 0), (129, 1), (19, 19), (517, 0), (1, 1), (700, 3), (400, 17), (0, 0), (127, 2))
"""As :data:`tests.support.calls.RAGGED`, request by request, with fewer queries and blocks."""

_ALL = ".*"


def _but(*kept: str) -> str:
    """Every parametrisation but these."""
    return f"(?!({'|'.join(kept)})$).*"


NIGHTLY: dict[str, str] = {
    # A workgroup a token: 128 to 260 requests or more.
    "test_chunked_prefill_gives_the_same_rows": _ALL,
    "test_heads_do_not_depend_on_one_another": _ALL,
    "test_split_in_two_at_every_offset_of_a_block": _ALL,
    "test_of_every_prefix_see_exactly_the_causal_tokens": _ALL,
    "test_of_every_prefix_equal_the_oracle": _but("1-from 0"),
    "test_every_scale_and_code_is_scored_as_its_rounded_product": _ALL,
    "test_batches_of_1_to_1025_ragged_requests": "1025",
    # Many rows, blocks or keys.
    "test_of_a_prefill_of_thousands_of_rows": _ALL,
    "test_prefills_across_many_blocks_equal_the_oracle": _ALL,
    "test_score_buffers_of_4_gib": _ALL,
    "test_row_15_needles_past_128k_keys": _ALL,
    "test_scores_and_selection_are_the_expected_ones": _but("data/ragged_l15_cut"),
    "test_long_rows": _but("low contrast"),
    "test_every_bfloat16_gets_the_code_of_the_oracle": _but("0.001953125", "1.875", "448.0"),
    "test_every_bfloat16_amax_gets_the_scale_of_the_oracle": _ALL,
    # The same bytes again; tests/gfx950/test_prefill.py holds scores against plans, widths and wave orders.
    "test_scores_do_not_depend_on_the_width_of_the_buffer": _ALL,
    "test_repeated_runs_give_the_same_bytes": _ALL,
    "test_row_11_how_the_prefill_was_split": _ALL,
    "test_row_13_hardware_that_a_test_assumed": _ALL,
    "test_row_8_ascending_ids": _ALL,
    "test_each_scores_the_pages_of_the_other": _but("dtype0"),
    # Page strides and ids past 32 bits: others are in test_public_reports.py and tests/gfx950.
    "test_pages_lie_any_multiple_of_16_bytes_apart": _but("9232"),
    "test_pages_past_4_gib_are_read": _but("9216 B apart"),
    # Init and local blocks: rows of the contract's table, of which tests/gfx950 has others.
    "test_overlaps_have_the_local_value": _but("2-2"),
    "test_ragged_batches_equal_the_oracle": _but("forced4", "forced5"),
    # One of each value, or one, instead of every combination: tests/gfx950 has each number of heads and k.
    "test_equal_the_oracle_where_partial_sums_are_exact": _but("0-exact-1", "1-bytes-2"),
    "test_lie_within_the_bound_of_the_oracle": _but("4"),
    "test_are_head_major_whatever_the_number_of_queries": _but("1-1", "2-4", "3-2", "4-4", "5-1", "8-2"),
    "test_scores_go_to_the_cells_of_a_strided_buffer_only": _but("1-False", "4-True"),
    "test_ids_go_to_the_cells_of_a_strided_buffer_only": _but("block"),
    "test_ids_are_head_major": _but("score-1-1", "block-2-2", "score-4-4", "block-4-3", "score-2-5"),
    "test_row_1_token_major_and_head_major": _but("4-4"),
    "test_rows_of_requests_left_out_stay_untouched": _but("kept2", "kept5"),
    "test_values_that_nobody_checked_stay_inside_and_have_a_result": _but("illegal-1", "on the host-1"),
    "test_gives_what_scores_and_topk_give": _but("block-inexact-4"),
    "test_equals_the_oracle": _but("forced1-17"),
    "test_random_keys_get_the_bytes_of_the_oracle": _but("0-dtype0", "1-dtype1", "2-dtype2"),
    "test_a_run_gives_what_a_call_gives": _but("4-forced1-block"),
    # Other addresses for a plan's runs: tests/gfx950/test_hip_plans.py.
    "test_runs_of_a_plan_take_tensors_of_any_place_and_strides": _ALL,
    # Rows of every length and k: others go through the same loops.
    "test_many_rows": _ALL,
    "test_every_k": _but("40"),
    "test_rows_of_0_to_more_than_k_blocks": _but("17"),
    "test_special_values_in_random_places": _but("16-64", "65-1", "127-16", "300-16"),
    # Seventeen contexts of fewer and more blocks than k.
    "test_row_7_fewer_blocks_than_k": "[2-9]|1[0-4]",
}
"""Test to parametrisations (a pattern of what the id has beside the backend) that are nightly there."""


def is_nightly(test: str, test_id: str) -> bool:
    """Whether the simulated device runs a test of the contract nightly only.

    Args:
        test: the function's name.
        test_id: the id of its parameters, the backend's first or last.
    """
    pattern = NIGHTLY.get(test)
    return pattern is not None and re.fullmatch(pattern, test_id.replace(NAME, "", 1).strip("-")) is not None
