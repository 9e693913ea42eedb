"""Which tests of the contract the simulated gfx950 runs on every commit, which nightly, and which never.

It executes each instruction of each workgroup: some 30 ms of a core for a workgroup with little to do, as
much again for every few blocks more. What is cheap there, or reaches code of the kernel that nothing else
reaches, runs on every commit. What repeats that with more requests, rows or blocks is nightly: every line of
the contract keeps a small form for every commit, and ``tests/gfx950`` sweeps what is the kernel's own (each
edge of the diagonal, segments, orders of waves, offsets past 32 bits). Contexts of a million tokens are left
to real devices: the loop over their blocks is the one that 1,100 blocks go through.
"""

from __future__ import annotations

import re

NAME = "flydsl-sim"
NEVER = "every instruction is executed in software, too slow for this size"
"""Why tests of ``product_backend`` leave it out."""

_ALL = ".*"
NIGHTLY: dict[str, str] = {
    # A workgroup a token: 128 to 260 requests or more.
    "test_chunked_prefill_gives_the_same_rows": r"(1|2|3|16|128)-\d|64-1",
    "test_split_in_two_at_every_offset_of_a_block": _ALL,
    "test_of_every_prefix_see_exactly_the_causal_tokens": "[12]-.*",
    "test_of_every_prefix_equal_the_oracle": "[24]-.*",
    "test_every_scale_and_code_is_scored_as_its_rounded_product": _ALL,
    "test_batches_of_1_to_1025_ragged_requests": "1025",
    # Many rows or many blocks.
    "test_of_a_prefill_of_thousands_of_rows": _ALL,
    "test_prefills_across_many_blocks_equal_the_oracle": "forced[0235]",
    "test_row_15_needles_past_128k_keys": _ALL,
    "test_scores_and_selection_are_the_expected_ones": "(?!data/).*",
    # Init and local blocks beyond two: the same comparisons with other numbers.
    "test_overlaps_have_the_local_value": "3-.|.-3",
    # Rows of every length and k: others go through the same loops.
    "test_many_rows": _ALL,
    "test_every_k": "(?!(16|20|40)$).*",
    "test_special_values_in_random_places": r"(64-)?(129|300|1025)(-64)?",
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
