"""Sweeps of the gfx950 prefill scorer that take too long for every commit."""

from __future__ import annotations

import pytest

from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import SCHEDULES
from tests.gfx950.prefill import group_maxima, scored
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, oracle_scores

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
@pytest.mark.parametrize("first", range(0, 128, 16))
def test_every_prefix(heads: int, first: int) -> None:
    """Every prefix mod 128 behind none to two whole blocks; whole tiles, tails and single queries."""
    queries = 512 // heads
    for prefix in range(first, first + 16):
        lengths = [
            (128 * blocks + prefix + q, q) for blocks, q in ((1, queries - prefix % 7), (0, 1), (2, 18))
        ]
        call = random_call(lengths, heads, seed=prefix).forcing(prefix % 3, prefix // 3 % 3)
        scores, _ = scored(call, compute_units=1 + prefix % 5, schedule=SCHEDULES[prefix % len(SCHEDULES)])
        assert_same_bits(scores, oracle_scores(call))


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
@pytest.mark.parametrize("compute_units", range(1, 9))
def test_every_number_of_segments(heads: int, compute_units: int) -> None:
    """A context of 68 blocks, cut into up to 16 segments, with and without maxima."""
    call = random_call([(8600, 200)], heads, seed=compute_units).forcing(1, 1)
    expected = oracle_scores(call)
    assert_same_bits(scored(call, compute_units=compute_units)[0], expected)
    scores, maxima = scored(call, compute_units=compute_units, maxima=True)
    assert maxima is not None
    assert_same_bits(scores, expected)
    assert_same_bits(maxima, group_maxima(expected))


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_a_chunked_prefill_gives_the_same_rows(heads: int) -> None:
    """Chunks of a prefill, most of which start inside a block, against the whole at once."""
    whole = random_call([(1400, 1400)], heads, seed=3)
    expected = oracle_scores(whole)
    assert_same_bits(scored(whole, compute_units=8)[0], expected)
    start = 0
    for size in (1, 127, 130, 384, 517, 241):
        end = start + size
        chunk = type(whole)(
            whole.q[start:end],
            whole.pages,
            whole.block_table,
            whole.cu_seqlens_q.clamp(max=size),
            whole.seq_lens.clamp(max=end),
        )
        columns = -(-end // 128)
        assert_same_bits(scored(chunk, compute_units=2)[0], expected[:, start:end, :columns])
        start = end
