"""Top-k and insert through FlyDSL's launcher on the simulated device: views, refusals, failures, sizes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kernel.backends.flydsl.geometry import MAX_BLOCKS
from kernel.backends.flydsl.launch import InsertLauncher, TopkLauncher
from kernel.errors import InvalidArgumentError, LaunchError
from kernel.gfx950.hip import simulated_device
from tests.gfx950.prefill import group_maxima
from tests.support.call import CPU
from tests.support.compare import assert_same_bits
from tests.support.oracle_pages import oracle_inserted
from tests.support.selection import in_block_order, selected
from tests.support.sparse import sparse_scores


@cache
def topk() -> TopkLauncher:
    return TopkLauncher(simulated_device())


@cache
def insert() -> InsertLauncher:
    return InsertLauncher(simulated_device())


def rows(tokens: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores ``[2, tokens, columns]`` and lengths."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, tokens, columns, generator=generator)
    return scores, torch.randint(0, columns + 1, (tokens,), generator=generator, dtype=torch.int32)


def test_ids_go_into_views_and_nowhere_else() -> None:
    """Heads and tokens anywhere, and ids that do not lie side by side."""
    scores, num_blocks = rows(5, 40)
    expected = selected(scores, num_blocks, 16)
    storage = torch.full((7, 2, 40), -7, dtype=torch.int32)
    for view in (storage.transpose(0, 1)[:, 1:6, 3:19], storage.transpose(0, 1)[:, 1:6, 1:33:2]):
        storage.fill_(-7)
        topk()(scores, num_blocks, view, "score")
        assert_same_bits(view.clone(), expected)
        view.fill_(-7)
        assert bool((storage == -7).all())


def test_scores_and_maxima_may_be_views() -> None:
    """Of any strides: what the kernels cannot read as it lies is copied."""
    scores, num_blocks = rows(4, 600, seed=1)
    num_blocks[0] = 600
    cells = torch.arange(600) < num_blocks[:, None]
    maxima = group_maxima(scores.masked_fill(~cells, -torch.inf))
    apart = torch.full((600, 4, 2), torch.inf)
    apart.copy_(scores.permute(2, 1, 0))
    wide = torch.full((2, 5, 50), torch.inf)
    wide[:, 1:, 7:45] = maxima
    expected = in_block_order(selected(scores, num_blocks, 16))
    for view in (scores, apart.permute(2, 1, 0)):
        for groups in (None, wide[:, 1:, 7:45]):
            block_ids = torch.empty(2, 4, 16, dtype=torch.int32)
            topk()(view, num_blocks, block_ids, "block", groups)
            assert_same_bits(block_ids, expected)


def test_rows_that_are_too_long_are_refused_by_name() -> None:
    scores = torch.empty(1).expand(1, 1, MAX_BLOCKS + 1)
    with pytest.raises(InvalidArgumentError, match=r"scores.shape\[2\]"):
        topk()(scores, torch.ones(1, dtype=torch.int32), torch.empty(1, 1, 1, dtype=torch.int32), "score")


def test_keys_may_be_views() -> None:
    """A slice of a wider tensor is read where it lies, one at an odd address is copied."""
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(40, 300, generator=generator).bfloat16()
    slots = torch.randperm(256, generator=generator)[:80:2]
    for keys in (wide[:, :128], wide[:, 8:136], wide[:, 3:131], wide[:, 1:257:2]):
        pages = torch.full((2, 9216), 0xA5, dtype=torch.uint8)
        expected = oracle_inserted(keys.contiguous(), pages, slots)
        insert()(keys, pages, slots)
        assert_same_bits(pages, expected)


def test_a_launch_that_failed_raises_and_the_next_one_works() -> None:
    scores, num_blocks = rows(3, 20, seed=3)
    block_ids = torch.empty(2, 3, 4, dtype=torch.int32)
    keys, slots = torch.ones(3, 128), torch.arange(3)
    pages = torch.zeros(1, 9216, dtype=torch.uint8)
    topk()(scores, num_blocks, block_ids, "score")
    insert()(keys, pages, slots)
    with simulated_device().failing("hipModuleLaunchKernel"):
        with pytest.raises(LaunchError):
            topk()(scores, num_blocks, block_ids, "score")
        with pytest.raises(LaunchError):
            insert()(keys, pages, slots)
    topk()(scores, num_blocks, block_ids, "score")
    assert_same_bits(block_ids, selected(scores, num_blocks, 4))


@pytest.mark.nightly
def test_rows_at_the_end_of_4_9_gib_of_scores() -> None:
    """H = 4, 40,000 queries, 8,192 blocks: the last rows of the last heads, by scores and by maxima."""
    heads, tokens, columns = 4, 40_000, 8192
    scores = sparse_scores((heads, tokens, columns), CPU)
    maxima = sparse_scores((heads, tokens, columns // 16), CPU)
    last = slice(tokens - 3, tokens)
    scores[2:, last] = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(4))
    maxima[2:, last] = group_maxima(scores[2:, last])
    num_blocks = torch.full((3,), columns, dtype=torch.int32)
    expected = selected(scores[2:, last], num_blocks, 16)
    for groups in (None, maxima[:, last]):
        block_ids = torch.empty(heads, 3, 16, dtype=torch.int32)
        topk()(scores[:, last], num_blocks, block_ids, "score", groups)
        assert_same_bits(block_ids[2:], expected)
