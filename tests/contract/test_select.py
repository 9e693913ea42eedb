"""Selection without a score buffer: the ids that scores and top-k would give."""

from __future__ import annotations

import pytest
import torch

from kernel.backends.base import Backend, Order
from tests.support.calls import RAGGED, Values, random_call
from tests.support.compare import assert_same_bits, oracle_scores
from tests.support.run import scores_of, selection_of, topk_of
from tests.support.selection import in_block_order, selected


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("values", ["exact", "inexact"])
@pytest.mark.parametrize("order", ["score", "block"])
def test_gives_what_scores_and_topk_give(backend: Backend, heads: int, values: Values, order: Order) -> None:
    """select is score_prefill and topk: the same ids from the same bits."""
    call = random_call(RAGGED, heads, seed=31, values=values).forcing(1, 1)
    num_blocks = call.batch().num_blocks_per_query()
    expected = topk_of(backend, scores_of(backend, call), num_blocks, 16, order)
    assert_same_bits(selection_of(backend, call, 16, order), expected)


@pytest.mark.parametrize("topk", [1, 2, 15, 16, 17, 18, 19, 64])
@pytest.mark.parametrize("forced", [(0, 0), (0, 1), (3, 2)])
def test_equals_the_oracle(backend: Backend, topk: int, forced: tuple[int, int]) -> None:
    """Exact inputs, contexts shorter and longer than k blocks, in both orders."""
    call = random_call(RAGGED, 2, seed=32).forcing(*forced)
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
