"""The balance of the gfx950 plan, against what can be counted by hand."""

from __future__ import annotations

import pytest

from indexer.made_cases import Shape, make_case
from indexer.profile import plan_balance


def test_a_decode_call_has_no_prefill_plan() -> None:
    assert plan_balance(make_case("m3", Shape(context=5000, queries=16), 0)) is None


def test_one_tile_is_one_workgroup() -> None:
    balance = plan_balance(make_case("m3", Shape(context=128, queries=128, heads=4), 0))
    assert balance is not None
    assert (balance.items, balance.slots) == (1, 512)
    assert balance.slot_blocks[0] == 1 + 6 / 4  # its block, and what an item costs beside
    assert set(balance.slot_blocks[1:]) == {0.0}
    assert balance.busy_share == pytest.approx(1 / 512)


def test_a_large_call_keeps_the_device_busy() -> None:
    balance = plan_balance(make_case("m3", Shape(context=65536, queries=4096, heads=4), 0))
    assert balance is not None
    assert balance.busy_share > 0.85
    # Every tile of 512 rows (128 tokens) scores all blocks that its last row sees, and no block twice.
    blocks = sum((65536 - 4096 + 128 * (tile + 1)) // 128 for tile in range(32))
    assert sum(balance.slot_blocks) == blocks + balance.items * 6 / 4


def test_decode_requests_are_counted_apart() -> None:
    balance = plan_balance(make_case("ragged", Shape(context=3000, queries=100), 0))
    assert balance is not None
    assert balance.decode_requests == 5
