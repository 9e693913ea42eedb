"""A row's bits depend on its query and its keys alone: not on neighbours, chunks, tiles, threads or the path.

All on inexact values, where another order of summation shows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from kernel.backends.base import Order
from kernel.backends.cpu import CpuBackend, score, topk
from tests.support.call import Call, cumulative
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, assert_within_bounds
from tests.support.run import scores_of, selection_of, topk_of

LENGTHS = [(5000, 700), (2305, 3), (1, 1), (0, 0), (640, 17), (129, 129)]


def one_request(call: Call, row: int, first: int, last: int) -> Call:
    """Queries ``first`` to ``last`` of a request, alone, with only the keys up to the last of them."""
    start = int(call.cu_seqlens_q[row])
    prefix = int(call.seq_lens[row]) - (int(call.cu_seqlens_q[row + 1]) - start)
    return dataclasses.replace(
        call,
        q=call.q[start + first : start + last],
        block_table=call.block_table[row : row + 1],
        cu_seqlens_q=cumulative([last - first]),
        seq_lens=torch.tensor([prefix + last], dtype=torch.int32),
    )


@pytest.fixture
def cpu() -> CpuBackend:
    return CpuBackend()


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_inexact_values_are_within_the_bound(cpu: CpuBackend) -> None:
    call = random_call([(900, 100), (2305, 3)], values="inexact")
    assert_within_bounds(scores_of(cpu, call), call, "exact")


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_batch_neighbours_and_split_points(cpu: CpuBackend, heads: int) -> None:
    call = random_call(LENGTHS, heads, values="inexact", seed=heads)
    together = scores_of(cpu, call)
    random = torch.Generator().manual_seed(heads)
    splits = sorted({0, 700, 1, *torch.randint(2, 700, (6,), generator=random).tolist()})
    for first, last in itertools.pairwise(splits):
        alone = scores_of(cpu, one_request(call, 0, first, last))
        assert_same_bits(alone, together[:, first:last, : alone.shape[2]])
        assert bool((together[:, first:last, alone.shape[2] :] == -torch.inf).all())
    row = scores_of(cpu, one_request(call, 1, 1, 2))
    assert_same_bits(row, together[:, 701:702, : row.shape[2]])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 15, 16, 17, 31, 33, 49, 63, 65, 127, 200, 257, 511, 513, 1025])
def test_every_tile_width(cpu: CpuBackend, rows: int) -> None:
    """Rows of one call of each size against the same rows scored one at a time."""
    call = random_call([(1300, rows)], 1, values="inexact", seed=rows)
    together = scores_of(cpu, call)
    for place in {0, rows // 3, rows - 1}:
        alone = scores_of(cpu, one_request(call, 0, place, place + 1))
        assert_same_bits(alone, together[:, place : place + 1, : alone.shape[2]])


def test_chunks_and_groups(cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(LENGTHS, values="inexact").forcing(1, 2)
    scores = scores_of(cpu, call)
    monkeypatch.setattr(score, "CHUNK_ROWS", 52)
    monkeypatch.setattr(score, "MAX_GROUP_BLOCKS", 5)
    assert_same_bits(scores_of(CpuBackend(), call), scores)


def test_threads(cpu: CpuBackend, threads: None) -> None:
    call = random_call(LENGTHS, values="inexact")
    results = []
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        results.append((scores_of(cpu, call), selection_of(cpu, call, 16)))
    for scores, selection in results[1:]:
        assert_same_bits(scores, results[0][0])
        assert_same_bits(selection, results[0][1])


@pytest.mark.parametrize("order", ["score", "block"])
@pytest.mark.parametrize("k", [1, 16, 64])
@pytest.mark.parametrize("pending", [32, 40, 256])
def test_select_is_score_then_topk(
    cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch, order: Order, k: int, pending: int
) -> None:
    monkeypatch.setattr(topk, "_PENDING_BLOCKS", pending)
    call = random_call(LENGTHS, values="inexact").forcing(2, 1)
    expected = topk_of(cpu, scores_of(cpu, call), call.batch().num_blocks_per_query(), k, order)
    assert_same_bits(selection_of(cpu, call, k, order), expected)


def test_float64_where_float32_tiles_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every float64 sum is exact, so the scores are the oracle's after rounding to float32, all bits."""
    monkeypatch.setattr(score, "_agrees", lambda *_: False)
    score.agreeing_shapes.cache_clear()
    try:
        fallback = CpuBackend()
        assert score.agreeing_shapes()[0] == torch.float64
    finally:
        score.agreeing_shapes.cache_clear()
    call = random_call(LENGTHS[1:], values="inexact").forcing(0, 1)
    exact = scores_of(fallback, call)
    assert_within_bounds(exact, call, "exact")
    for row in range(4):
        if call.seq_lens[row]:
            alone = scores_of(fallback, one_request(call, row, 0, 1))
            start = int(call.cu_seqlens_q[row])
            assert_same_bits(alone, exact[:, start : start + 1, : alone.shape[2]])


def test_a_narrow_width_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    agrees = score._agrees

    def only_wide(keys: torch.Tensor, queries: torch.Tensor, product: torch.Tensor) -> bool:
        return queries.shape[0] >= 128 and agrees(keys, queries, product)

    monkeypatch.setattr(score, "_agrees", only_wide)
    score.agreeing_shapes.cache_clear()
    try:
        tiles = score.RowTiles()
    finally:
        score.agreeing_shapes.cache_clear()
    assert min(tiles.widths) >= 128
    queries = torch.zeros(3, 128).to(torch.float8_e4m3fn)
    assert [tile.queries.shape[1] for tile in tiles.split(queries, 0, 1)] == [min(tiles.widths)]
