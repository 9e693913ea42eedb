"""The gfx950 decode scorer, compiled and interpreted, against the oracle: same bits where sums are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernel.backends.flydsl.launch import MAX_ROWS, grid_log2
from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import SCHEDULES, Schedule
from tests.gfx950.decode import assert_exact, decoded, launcher
from tests.gfx950.prefill import POISON, device_with
from tests.support.call import CPU
from tests.support.calls import random_call, staircase_call
from tests.support.compare import assert_same_bits, assert_within_bounds, oracle_scores
from tests.support.sparse import sparse_pages, sparse_scores

EDGES = (0, 1, 2, 63, 64, 126, 127, 128, 129, 255, 256, 383)
"""Prefixes about the edges of blocks."""
FORCED = ((0, 0), (1, 1), (3, 2), (0, 3), (2, 0), (1, 2))


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
@pytest.mark.parametrize(("init_blocks", "local_blocks"), FORCED)
def test_scores_equal_the_oracle(heads: int, init_blocks: int, local_blocks: int) -> None:
    """Ragged batches on permuted pages, every cell written, sentinels and -inf included."""
    most = MAX_ROWS // heads
    lengths = [(900, most), (0, 0), (2432, 1), (300, 0), (129, 1), (130, min(3, most)), (1, 1)]
    assert_exact(random_call(lengths, heads, seed=heads).forcing(init_blocks, local_blocks), compute_units=2)


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_every_number_of_queries_about_the_edges_of_blocks(heads: int) -> None:
    for queries in range(1, MAX_ROWS // heads + 1):
        edges = EDGES[queries % 3 :: 3]
        call = random_call([(edge + queries, queries) for edge in edges], heads, seed=100 + queries)
        expected = oracle_scores(call)
        assert_same_bits(decoded(call, compute_units=1, maxima=queries % 2 == 0)[0], expected)


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
@pytest.mark.parametrize("first", [0, 64])
def test_the_diagonal_is_exact_at_every_position(heads: int, first: int) -> None:
    """A request for each ``prefix mod 128``; one key too many or too few shows in every row."""
    most = MAX_ROWS // heads
    lengths = [(prefix + 1 + prefix % most, 1 + prefix % most) for prefix in range(first, first + 64)]
    call = staircase_call(lengths, heads)
    scores, _ = decoded(call, compute_units=8)
    positions = torch.cat([torch.arange(seq_len - queries, seq_len) for seq_len, queries in lengths])
    steps = positions[:, None] - 128 * torch.arange(scores.shape[2])
    expected = torch.where(steps >= 0, steps.clamp(max=127).float(), -torch.inf)
    assert_same_bits(scores, expected.expand(heads, -1, -1))


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_every_scale_byte_is_scored(heads: int) -> None:
    """Any scale byte: zero, NaN, negative, saturating ones."""
    assert_exact(random_call([(400, 2), (1100, 1)], heads, seed=5, values="bytes"), compute_units=1)


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_inexact_scores_lie_within_the_bound(heads: int) -> None:
    call = random_call([(900, 2), (700, 1)], heads, seed=6, values="inexact").forcing(1, 1)
    assert_within_bounds(decoded(call)[0], call, "exact")


@pytest.mark.parametrize("compute_units", [1, 2, 8])
def test_scores_and_maxima_depend_on_no_split(compute_units: int) -> None:
    """Waves with whole groups of 16 blocks (few workgroups), workgroups that share one (many), blocks; shares
    that begin and end inside requests."""
    lengths = [(10_900, 2), (2047, 1), (2048, 1), (2049, 1), (70, 1)]
    assert_exact(random_call(lengths, 4, seed=8).forcing(1, 0), compute_units=compute_units)


@pytest.mark.parametrize("columns", [3, 4, 8, 13, 16, 17, 70, 130])
def test_rows_are_filled_to_any_width(columns: int) -> None:
    """Cells past nb are -inf in scores and maxima, up to ``S``."""
    assert_exact(random_call([(300, 4), (150, 3), (1, 1)], 4, seed=9), columns=columns)


def test_without_fill_cells_past_a_request_stay_as_they_were() -> None:
    call = random_call([(300, 4), (150, 3)], 4, seed=9)
    scores, maxima = decoded(call, columns=40, maxima=True, fill=False)
    assert maxima is not None
    expected = oracle_scores(call, 40)
    assert_same_bits(scores[:, :4, :3], expected[:, :4, :3])
    assert_same_bits(scores[:, 4:, :2], expected[:, 4:, :2])
    assert bool(scores[:, :, 3:].isnan().all())
    assert bool(scores[:, 4:, 2].isnan().all())
    assert bool(maxima[:, :, 1:].isnan().all())


def test_only_the_rows_of_the_requests_are_written() -> None:
    """A subset of the batch, into a strided view: rows, gaps and other requests keep what they held."""
    call = random_call([(200, 2), (500, 3), (0, 0), (100, 4), (90, 1)], 4, seed=10)
    batch = call.batch()
    storage = torch.full((10, 4, 7), POISON)
    with device_with(2):
        launcher()(batch.subset(batch.requests[1::2]), storage.permute(1, 0, 2)[:, :, 1:6])
    expected = oracle_scores(call, 5)
    rows = [2, 3, 4, 5, 6, 7, 8]
    assert_same_bits(storage[rows, :, 1:6].permute(1, 0, 2), expected[:, rows])
    untouched = storage.clone()
    untouched[rows, :, 1:6] = POISON
    assert bool(untouched.isnan().all())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_order_of_waves_gives_the_same_bytes(schedule: Schedule) -> None:
    call = random_call([(700, 3), (2500, 1), (64, 1)], 4, seed=11)
    assert_exact(call, schedule=schedule, compute_units=2)


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_batches_of_more_requests_than_lanes(heads: int) -> None:
    """70 requests; and 300 of which almost all are padding, so that a share spans more than 64."""
    lengths = [(0, 0) if i % 3 else (1 + 37 * i % 300, 1) for i in range(70)]
    call = random_call(lengths, heads, seed=53)
    assert_same_bits(decoded(call, compute_units=2)[0], oracle_scores(call))
    lengths = [(0, 0)] * 300
    lengths[3], lengths[140], lengths[261] = (130, 1), (300, 1), (500, 1)
    assert_exact(random_call(lengths, heads, seed=60), compute_units=1)


def test_pages_may_lie_further_apart_than_their_size() -> None:
    assert_exact(random_call([(600, 4), (100, 1)], 2, seed=12, page_stride=9216 + 48))


def test_page_offsets_beyond_4_gib() -> None:
    """Pages 3 GiB apart: page_id * page_stride passes 2^31 and 2^32."""
    call = random_call([(640, 4)], 4, seed=13)
    stride = 3 << 30
    pages = sparse_pages(call.pages.shape[0], stride, CPU)
    pages[:] = call.pages
    assert int(call.block_table.max()) * stride > 2**32
    assert_same_bits(decoded(replace(call, pages=pages))[0], oracle_scores(call))


def test_score_offsets_beyond_4_gib() -> None:
    """The last rows of a score buffer of 4.1 GiB."""
    call = random_call([(300, 4), (200, 3)], 4, seed=14)
    scores = sparse_scores((4, 33_000, 8192), CPU)[:, -7:]
    with device_with():
        launcher()(call.batch(), scores[:, :, :3])
    assert_same_bits(scores[:, :, :3], oracle_scores(call))


def test_no_grid_is_larger_than_its_work_or_the_device() -> None:
    assert grid_log2(1, 1, False, 256) == 0
    assert grid_log2(1, 8, False, 256) == 1
    assert grid_log2(32, 1024, True, 256) == 9
    assert grid_log2(1, 8192, True, 256) == 9
    assert grid_log2(1, 64, True, 256) == 2
    assert grid_log2(1025, 8192, False, 304) == 9
    assert grid_log2(1025, 8192, False, 32) == 6
