"""The gfx950 prefill scorer, compiled and interpreted, against the oracle: same bits where sums are exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import SCHEDULES, Schedule
from tests.gfx950.scorers import POISON, device_with, group_maxima, heads_in_turn, prefill, scored
from tests.support.calls import CPU, random_call, sparse_pages, sparse_scores, staircase_call
from tests.support.compare import assert_same_bits, assert_within_bounds, oracle_scores

RAGGED_LONG = ((900, 140), (0, 0), (2176, 20), (300, 0), (129, 1))
"""Tiles of several waves, 17 blocks, requests without queries or keys."""


@pytest.mark.parametrize(("heads", "forced"), heads_in_turn([(0, 0), (1, 1), (2, 2), (0, 2), (2, 0)]))
def test_scores_equal_the_oracle(heads: int, forced: tuple[int, int]) -> None:
    """Ragged batches on permuted pages, every cell written, sentinels and -inf included."""
    call = random_call(RAGGED_LONG, heads, seed=heads).forcing(*forced)
    scores, _ = scored(call, compute_units=4)
    assert_same_bits(scores, oracle_scores(call))


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_every_scale_byte_is_scored(heads: int) -> None:
    """Any scale byte: zero, NaN, negative, saturating ones."""
    call = random_call([(400, 20), (0, 0), (1100, 5)], heads, seed=5, values="bytes")
    scores, _ = scored(call, compute_units=1)
    assert_same_bits(scores, oracle_scores(call))


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_inexact_scores_lie_within_the_bound(heads: int) -> None:
    call = random_call([(640, 140), (129, 1)], heads, seed=6, values="inexact").forcing(1, 1)
    scores, _ = scored(call, compute_units=2)
    assert_within_bounds(scores, call, "exact")


@pytest.mark.parametrize(
    ("heads", "prefix"), heads_in_turn([0, 1, 15, 16, 33, 63, 70, 90, 111, 112, 126, 127, 128])
)
def test_the_diagonal_is_exact_at(heads: int, prefix: int) -> None:
    """Whole tiles behind prefixes about the edges of blocks, whose diagonals start in every M-tile."""
    queries = 512 // heads
    call = staircase_call([(prefix + queries, queries)], heads)
    scores, _ = scored(call, compute_units=1)
    steps = torch.arange(prefix, prefix + queries)[:, None] - 128 * torch.arange(scores.shape[2])
    expected = torch.where(steps >= 0, steps.clamp(max=127).float(), -torch.inf)
    assert_same_bits(scores, expected.expand(heads, -1, -1))


@pytest.mark.parametrize(("heads", "compute_units"), heads_in_turn([1, 9]))
def test_scores_and_maxima_depend_on_no_plan(heads: int, compute_units: int) -> None:
    """One to nine segments of a tile, with and without maxima: the same bytes."""
    call = random_call([(4400, 9)], heads, seed=8).forcing(1, 0)
    expected = oracle_scores(call)
    scores, maxima = scored(call, compute_units=compute_units, maxima=True)
    assert maxima is not None
    assert_same_bits(scores, expected)
    assert_same_bits(maxima, group_maxima(expected))
    assert_same_bits(scored(call, compute_units=compute_units)[0], expected)


@pytest.mark.parametrize("columns", [3, 4, 8, 13, 16, 18])
def test_rows_are_filled_to_any_width(columns: int) -> None:
    """S need not be a multiple of 4, and cells past nb are -inf in scores and maxima."""
    call = random_call([(300, 20), (150, 3)], 4, seed=9)
    scores, maxima = scored(call, columns=columns, maxima=True)
    expected = oracle_scores(call, columns)
    assert maxima is not None
    assert_same_bits(scores, expected)
    assert_same_bits(maxima, group_maxima(expected))


def test_only_the_rows_of_the_requests_are_written() -> None:
    """A subset of the batch, into a strided view: rows, gaps and other requests keep what they held."""
    call = random_call([(200, 20), (500, 30), (100, 7)], 4, seed=10)
    batch = call.batch()
    storage = torch.full((57, 4, 7), POISON)
    with device_with(2):
        prefill(batch.subset(batch.requests[1:2]), storage.permute(1, 0, 2)[:, :, 1:6])
    expected = oracle_scores(call, 5)
    rows = slice(20, 50)
    assert_same_bits(storage[rows, :, 1:6].permute(1, 0, 2), expected[:, rows])
    untouched = storage.clone()
    untouched[rows, :, 1:6] = POISON
    assert bool(untouched.isnan().all())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_order_of_waves_gives_the_same_bytes(schedule: Schedule) -> None:
    call = random_call([(700, 130)], 4, seed=11)
    scores, _ = scored(call, schedule=schedule, compute_units=2)
    assert_same_bits(scores, oracle_scores(call))


def test_pages_may_lie_further_apart_than_their_size() -> None:
    call = random_call([(600, 40)], 2, seed=12, page_stride=9216 + 48)
    assert_same_bits(scored(call)[0], oracle_scores(call))


def test_page_offsets_beyond_4_gib() -> None:
    """Pages 3 GiB apart: page_id * page_stride passes 2^31 and 2^32."""
    call = random_call([(640, 12)], 4, seed=13)
    stride = 3 << 30
    pages = sparse_pages(call.pages.shape[0], stride, CPU)
    pages[:] = call.pages
    assert int(call.block_table.max()) * stride > 2**32
    assert_same_bits(scored(replace(call, pages=pages))[0], oracle_scores(call))


def test_score_offsets_beyond_4_gib() -> None:
    """The last rows of a score buffer of 4.1 GiB."""
    call = random_call([(300, 12)], 4, seed=14)
    scores = sparse_scores((4, 33_000, 8192), CPU)[:, -12:]
    with device_with():
        prefill(call.batch(), scores[:, :, :3])
    assert_same_bits(scores[:, :, :3], oracle_scores(call))


def test_operand_maps() -> None:
    """A, B and C: each (key token, dim) has its place, in each M-tile, quarter and N-tile of rows.

    Block p holds one key, at token t(p), zeros elsewhere; its dims cycle through seven magnitudes and each
    scale group has its own power of two. Query row r reads one dim, d(r). So each score is a single element
    of a key; the t(p) lie in every M-tile and quarter, the d(r) run through all of 0 .. 127.
    """
    blocks, queries = 33, 512
    pages = np.zeros((blocks, 9216), dtype=np.uint8)
    codes = 1 + (np.arange(128)[None] + 3 * np.arange(blocks)[:, None]) % 7
    tokens = (np.arange(blocks) * 37 + 5) % 128
    group_scales = np.array([0x38 + 8 * (g - 3) for g in range(8)], dtype=np.uint8)  # 2^-3 .. 2^4
    for block, token in enumerate(tokens):
        row = codes[block]
        pages[block, 64 * token : 64 * token + 64] = row[0::2] | (row[1::2] << 4)
        pages[block, 8192 + 8 * token : 8192 + 8 * token + 8] = group_scales
    dims = (np.arange(queries) * 45 + 11) % 128
    one_hot = np.zeros((queries, 1, 128), dtype=np.uint8)
    one_hot[np.arange(queries), 0, dims] = 0x38
    seq_len = 128 * blocks + queries
    call = random_call([(seq_len, queries)], 1, seed=15)
    table = torch.full_like(call.block_table, 0)
    table[0, :blocks] = torch.arange(blocks, dtype=torch.int32)
    call = replace(
        call,
        q=torch.from_numpy(one_hot).view(torch.float8_e4m3fn),
        pages=torch.from_numpy(pages),
        block_table=table,
    )
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = magnitudes[codes[:, dims]] * 2.0 ** (dims // 16 - 3)
    scores, _ = scored(call, compute_units=1)
    assert_same_bits(scores[0, :, :blocks], torch.from_numpy(expected.T.astype(np.float32).copy()))
