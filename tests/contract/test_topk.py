"""Top-k of given scores: order, ties, special values, short rows, every k."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel.backends.base import Backend, Order
from tests.support.calls import Lengths, Values, random_call
from tests.support.compare import (
    assert_same_bits,
    flushed_denormals,
    in_block_order,
    oracle_scores,
    scores_of,
    selected,
    selection_of,
    topk_of,
)

INF, NAN = torch.inf, torch.nan
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e30, 1e29, INF, -INF, NAN, 1e-45, -1e-45, 3.4e38, -3.4e38)


def assert_selected(backend: Backend, scores: torch.Tensor, num_blocks: torch.Tensor, topk: int) -> None:
    """Compare both orders with the contract's sentence."""
    expected = selected(scores, num_blocks, topk)
    assert_same_bits(topk_of(backend, scores, num_blocks, topk, "score"), expected)
    assert_same_bits(topk_of(backend, scores, num_blocks, topk, "block"), in_block_order(expected))


def rows_of(*rows: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """One head's rows, seen whole."""
    scores = torch.tensor([rows])
    return scores, torch.full((scores.shape[1],), scores.shape[2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, 3.0, 2.0, 0.0], [1, 2, 0]),
        ([5.0, 5.0, 5.0, 5.0], [0, 1, 2]),
        ([0.0, -0.0, 0.0, -0.0], [0, 1, 2]),
        ([-0.0, 0.0, -1.0, 0.0], [0, 1, 3]),
        ([NAN, 1.0, -INF, -3.4e38], [1, 3, 0]),
        ([-INF, NAN, -INF, NAN], [0, 1, 2]),
        ([NAN, NAN, NAN, NAN], [0, 1, 2]),
        ([1e29, 7.0, 1e29, 1e30], [3, 0, 2]),
        ([INF, 1e30, INF, NAN], [0, 2, 1]),
        ([-1.0, -2.0, -1.0, -1.0], [0, 2, 3]),
        ([-1e-45, -0.0, 1e-45, 0.0], [2, 1, 3]),
    ],
)
def test_by_hand(backend: Backend, row: list[float], expected: list[int]) -> None:
    """Score descending, ties to the lower id, -0.0 equals +0.0, NaN counts as -inf."""
    scores, num_blocks = rows_of(row)
    assert topk_of(backend, scores, num_blocks, 3).tolist() == [[expected]]
    assert topk_of(backend, scores, num_blocks, 3, "block").tolist() == [[sorted(expected)]]


@pytest.mark.parametrize("topk", [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64])
def test_rows_of_0_to_more_than_k_blocks(backend: Backend, topk: int) -> None:
    """-1 where the row has fewer than k blocks; cells at and past nb may hold anything."""
    num_blocks = torch.arange(topk + 6, dtype=torch.int32)
    generator = torch.Generator().manual_seed(topk)
    scores = torch.randn(2, topk + 6, topk + 5, generator=generator)
    for nb in range(topk + 6):
        scores[:, nb, nb:] = torch.tensor([1e30, INF, NAN]).repeat(topk + 5)[: topk + 5 - nb]
    assert_selected(backend, scores, num_blocks, topk)


@pytest.mark.parametrize("topk", range(1, 65))
def test_every_k(backend: Backend, topk: int) -> None:
    """k from 1 to 64, with ties everywhere."""
    generator = torch.Generator().manual_seed(topk)
    scores = torch.randint(-3, 4, (1, 4, 100), generator=generator).float()
    assert_selected(backend, scores, torch.tensor([100, 64, 99, topk], dtype=torch.int32), topk)


@pytest.mark.parametrize("topk", [1, 16, 64])
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 1025])
def test_special_values_in_random_places(backend: Backend, columns: int, topk: int) -> None:
    """Rows of NaN, infinities, zeros of both signs, denormals and sentinels: ties among all of them."""
    random = np.random.default_rng(columns + topk)
    scores = torch.from_numpy(random.choice(np.array(SPECIAL, dtype=np.float32), (2, 9, columns)))
    num_blocks = torch.from_numpy(random.integers(0, columns + 1, 9, dtype=np.int32))
    num_blocks[0] = columns
    assert_selected(backend, scores, num_blocks, topk)


def test_ties_at_the_last_place(backend: Backend) -> None:
    """More equal scores than places are left: the lower ids have them, wherever the better ones lie."""
    for better in range(0, 16, 5):
        scores = torch.full((1, 3, 500), 2.5)
        scores[0, 0, 499 - better : 499] = 9.0
        scores[0, 1, 250 : 250 + better] = 9.0
        scores[0, 2, :better] = 9.0
        assert_selected(backend, scores, torch.full((3,), 500, dtype=torch.int32), 16)


@pytest.mark.parametrize("kind", ["ascending", "descending", "equal", "low contrast", "minus infinity"])
def test_long_rows(backend: Backend, kind: str) -> None:
    """8,192 blocks: the best last, first, all equal, or apart by the last bit of a float."""
    blocks = torch.arange(8192.0)
    row = {
        "ascending": blocks,
        "descending": -blocks,
        "equal": torch.full((8192,), 0.125),
        "low contrast": torch.tensor(1.0) + (blocks * 40503 % 8192 % 61) * 2.0**-23,
        "minus infinity": torch.full((8192,), -INF),
    }[kind]
    scores = row.repeat(2, 3, 1)
    assert_selected(backend, scores, torch.tensor([8192, 8191, 4097], dtype=torch.int32), 16)


@pytest.mark.parametrize(("heads", "total_q"), [(4, 4), (2, 2), (1, 1), (4, 3), (2, 5), (1, 4), (4, 33)])
@pytest.mark.parametrize("order", ["score", "block"])
def test_ids_are_head_major(backend: Backend, heads: int, total_q: int, order: Order) -> None:
    """block_ids[h, token, :], also where total_q == H; num_blocks belongs to the token, not to the head."""
    generator = torch.Generator().manual_seed(heads * 100 + total_q)
    scores = torch.randn(heads, total_q, 40, generator=generator)
    num_blocks = torch.randint(0, 41, (total_q,), dtype=torch.int32, generator=generator)
    expected = selected(scores, num_blocks, 16)
    expected = expected if order == "score" else in_block_order(expected)
    assert_same_bits(topk_of(backend, scores, num_blocks, 16, order), expected)


def test_many_rows(backend: Backend) -> None:
    """A backend that takes rows in chunks goes on where it stopped: half a million cells, ragged rows."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(0, 50, (2, 901, 600), generator=generator).float()
    num_blocks = torch.randint(0, 601, (901,), dtype=torch.int32, generator=generator)
    assert_selected(backend, scores, num_blocks, 16)


def test_strided_scores(backend: Backend) -> None:
    """Scores may be a view with stride(2) == 1; what lies around it never wins."""
    generator = torch.Generator().manual_seed(1)
    storage = torch.full((4, 9, 77), INF)
    storage[1:3, 2:7, 8:60] = torch.randn(2, 5, 52, generator=generator)
    scores, num_blocks = storage[1:3, 2:7, 8:60], torch.tensor([52, 1, 51, 30, 16], dtype=torch.int32)
    block_ids = torch.zeros(2, 5, 16, dtype=torch.int32, device=backend.device)
    on_device = storage.to(backend.device)[1:3, 2:7, 8:60]
    backend.topk(on_device, num_blocks.to(backend.device), block_ids, "score")
    assert_same_bits(block_ids.cpu(), selected(scores, num_blocks, 16))


def test_no_rows(backend: Backend) -> None:
    """Without queries there is nothing to select, and without blocks every id is -1."""
    assert topk_of(backend, torch.zeros(4, 0, 0), torch.zeros(0, dtype=torch.int32), 16).shape == (4, 0, 16)
    assert topk_of(backend, torch.zeros(4, 0, 9), torch.zeros(0, dtype=torch.int32), 16).shape == (4, 0, 16)
    none = topk_of(backend, torch.full((1, 2, 3), INF), torch.zeros(2, dtype=torch.int32), 2)
    assert none.tolist() == [[[-1, -1], [-1, -1]]]


# Selection without a score buffer: the ids that scores and top-k would give.

LONG = (2305, 3)
"""More blocks than most k."""


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("values", ["exact", "inexact"])
@pytest.mark.parametrize("order", ["score", "block"])
def test_gives_what_scores_and_topk_give(
    backend: Backend, ragged: Lengths, heads: int, values: Values, order: Order
) -> None:
    """select is score and topk: the same ids from the same bits."""
    call = random_call([*ragged, LONG], heads, seed=31, values=values).forcing(1, 1)
    num_blocks = call.batch().num_blocks_per_query()
    expected = topk_of(backend, scores_of(backend, call), num_blocks, 16, order)
    assert_same_bits(selection_of(backend, call, 16, order), expected)


@pytest.mark.parametrize("topk", [1, 2, 15, 16, 17, 18, 19, 64])
@pytest.mark.parametrize("forced", [(0, 0), (0, 1), (3, 2)])
def test_equals_the_oracle(backend: Backend, ragged: Lengths, topk: int, forced: tuple[int, int]) -> None:
    """Exact inputs, contexts shorter and longer than k blocks, in both orders."""
    call = random_call([*ragged, LONG], 2, seed=32).forcing(*forced)
    expected = selected(oracle_scores(call), call.batch().num_blocks_per_query(), topk)
    assert_same_bits(selection_of(backend, call, topk), expected)
    assert_same_bits(selection_of(backend, call, topk, "block"), in_block_order(expected))


def test_ties_go_to_the_lower_block(backend: Backend) -> None:
    """One page as every block of a long context: scores tie, and the first k blocks are selected."""
    call = random_call([(128 * 100, 3), (128 * 17 + 5, 2)], 4, seed=33)
    call.block_table[:] = call.block_table[0, 0]
    selection = selection_of(backend, call, 16)
    assert_same_bits(selection[:, :3], torch.arange(16, dtype=torch.int32).expand(4, 3, 16).contiguous())
    expected = selected(oracle_scores(call), call.batch().num_blocks_per_query(), 16)
    assert_same_bits(selection, expected)


def test_logical_blocks_are_selected_not_pages(backend: Backend) -> None:
    """Block ids count within the request: renaming the pages changes none of them."""
    call = random_call([(128 * 30, 4)], 4, seed=34)
    expected = selection_of(backend, call, 16)
    permutation = torch.randperm(call.pages.shape[0], generator=torch.Generator().manual_seed(0))
    pages = torch.empty_like(call.pages)
    pages[permutation] = call.pages
    call.block_table[0, :30] = permutation[call.block_table[0, :30].long()].int()
    call.pages.copy_(pages)
    assert_same_bits(selection_of(backend, call, 16), expected)


def test_of_an_empty_batch_is_empty(backend: Backend) -> None:
    """batch = 0, and requests without queries, select nothing."""
    assert selection_of(backend, random_call([], 4), 16).shape == (4, 0, 16)
    assert selection_of(backend, random_call([(0, 0), (200, 0)], 1), 16).shape == (1, 0, 16)


@pytest.mark.parametrize("columns", [9, 40])
def test_what_the_host_does_to_denormals_changes_no_selection(backend: Backend, columns: int) -> None:
    """Flushed, scores that differ would be ties. The order is that of their bits, made here by integers."""
    patterns = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)).to(torch.int32)
    scores = torch.stack([patterns.view(torch.float32), -patterns.view(torch.float32)]).view(1, 2, columns)
    by_bits = torch.stack([patterns, -patterns]).argsort(dim=1, descending=True, stable=True)
    with flushed_denormals():
        found = topk_of(backend, scores, torch.full((2,), columns, dtype=torch.int32), 7)
    assert_same_bits(found, by_bits[None, :, :7].to(torch.int32))
