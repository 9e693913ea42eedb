"""Sweeps of the gfx950 scorers that take too long for every commit."""

from __future__ import annotations

import numpy as np
import pytest

from kernel.backends.flydsl.geometry import MAX_ROWS
from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import SCHEDULES
from tests.gfx950.scorers import assert_exact, group_maxima, scored
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


# ---- Decode ----


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
@pytest.mark.parametrize("first", range(0, 128, 32))
def test_every_prefix_of_decode(heads: int, first: int) -> None:
    """Every ``prefix mod 128`` behind none to two whole blocks, with every number of queries, all orders."""
    most = MAX_ROWS // heads
    for start in range(first, first + 32, 8):
        lengths = []
        for prefix in range(start, start + 8):
            for blocks, queries in ((0, 1), (1, 1 + prefix % most), (2, most)):
                lengths.append((128 * blocks + prefix + queries, queries))
        call = random_call(lengths, heads, seed=start)
        for forced in ((0, 0), (start // 8 % 4, start // 32 % 4)):
            schedule = SCHEDULES[start // 8 % len(SCHEDULES)]
            assert_exact(call.forcing(*forced), compute_units=1 + start % 5, schedule=schedule)


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
@pytest.mark.parametrize("compute_units", [1, 2, 4, 8, 16])
def test_every_split(heads: int, compute_units: int) -> None:
    """Contexts of one to 513 blocks; shares of blocks, of groups, of quarters of groups."""
    lengths = [(65_613, MAX_ROWS // heads), (1, 1), (16_384, 1), (2049, 1), (0, 0), (127, 1), (10_240, 1)]
    assert_exact(random_call(lengths, heads, seed=compute_units).forcing(1, 1), compute_units=compute_units)
    assert_exact(random_call(lengths[1:], heads, seed=compute_units), compute_units=compute_units)


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
@pytest.mark.parametrize("batch", [64, 65, 128, 129, 255, 256, 257, 1025])
def test_batches_with_padding(heads: int, batch: int) -> None:
    """Requests of none to three blocks, a run of padding in the middle."""
    lengths = [(0, 0) if row % 5 < 2 or 20 < row < 120 else (1 + 31 * row % 390, 1) for row in range(batch)]
    assert_exact(random_call(lengths, heads, seed=batch), compute_units=4, schedule=SCHEDULES[batch % 4])


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
@pytest.mark.parametrize("seed", range(12))
def test_random_batches(heads: int, seed: int) -> None:
    random = np.random.default_rng((seed, heads))
    most = MAX_ROWS // heads
    lengths = []
    for _ in range(int(random.integers(1, 12))):
        queries = int(random.integers(0, most + 1))
        seq_len = int(
            random.choice([random.integers(1, 300), random.integers(1, 4500), 128 * random.integers(1, 40)])
        )
        seq_len = 0 if random.random() < 0.15 else max(seq_len + int(random.integers(-2, 17)), queries, 1)
        lengths.append((seq_len, min(queries, seq_len)))
    call = random_call(lengths, heads, seed=seed, page_stride=9216 + 16 * int(random.integers(0, 4)))
    call = call.forcing(int(random.integers(0, 4)), int(random.integers(0, 4)))
    columns = call.batch().num_score_blocks + int(random.integers(0, 40))
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    compute_units = int(random.choice([1, 2, 3, 8, 64]))
    assert_exact(call, compute_units=compute_units, schedule=schedule, columns=columns)
