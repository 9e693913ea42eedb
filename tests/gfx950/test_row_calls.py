"""Top-k and insert through FlyDSL's launcher on the simulated device: views, refusals, failures, sizes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from indexer.pipeline import ScoreResult
from kernel.backends import registry
from kernel.backends.base import Order
from kernel.backends.flydsl import backend as chunks_module
from kernel.backends.flydsl.backend import chunks
from kernel.backends.flydsl.geometry import MAX_BLOCKS
from kernel.backends.flydsl.launch import InsertLauncher, TopkLauncher
from kernel.backends.reference import ReferenceBackend
from kernel.errors import InvalidArgumentError, LaunchError
from kernel.gfx950.hip import simulated_device
from kernel.step import Lengths
from tests.gfx950.scorers import group_maxima
from tests.support.allocations import OutOfMemoryAt
from tests.support.calls import CPU, RAGGED, random_call, sparse_scores
from tests.support.compare import assert_same_bits, in_block_order, oracle_inserted, selected
from tests.support.scorer_state import assert_consistent, state_of


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


# ---- Selection in pieces of bounded memory: every row once, and the ids that the oracle gives ----


@pytest.mark.parametrize("order", ["score", pytest.param("block", marks=pytest.mark.nightly)])
def test_of_the_kernels_scores_equals_the_oracles(order: Order) -> None:
    """A context of 69 blocks, where k = 2 goes through maxima, beside a short request."""
    call = random_call([(8720, 5), (300, 3), (0, 0)], 4, seed=21).forcing(0, 1)
    batch = call.batch()
    expected = torch.full((4, 8, 2), -7, dtype=torch.int32)
    ReferenceBackend().select(batch, expected, order)
    found = torch.full_like(expected, -7)
    registry.create("flydsl-sim").select(batch, found, order)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("cells", [1, 100, 2000, 1 << 20])
def test_chunks_cover_every_row_once(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    """Within the memory, or one query at a time; rows of requests left out are in no chunk."""
    monkeypatch.setattr(chunks_module, "_CELLS", cells)
    batch = random_call(RAGGED, 4).batch()
    batch = batch.subset(request for request in batch.requests if request.table_row != 3)
    rows = torch.zeros(batch.total_q, dtype=torch.int32)
    for chunk in chunks(Lengths.of(batch.requests), 4):
        first, tokens = int(chunk.query_starts[0]), int(chunk.query_lens.sum())
        own = slice(first, first + tokens)
        rows[own] += 1
        assert tokens == 1 or 4 * tokens * chunk.max_blocks <= cells
        num_blocks = torch.from_numpy(chunk.blocks_per_query(batch.total_q))
        assert_same_bits(num_blocks[own], batch.num_blocks_per_query()[own])
        assert int(num_blocks.count_nonzero()) == tokens
    expected = torch.zeros_like(rows)
    for request in batch.requests:
        expected[request.query_start : request.query_start + request.query_len] = 1
    assert_same_bits(rows, expected)


# Memory that runs out at each allocation of a call in turn: a named error, nothing half done.
#
# Scores, group maxima, work lists, request lists, ids, copies of operands and pages are all allocated by
# torch: the failures are injected there, once alone and once for good, so that undoing has no memory either.

MOST_ALLOCATIONS = 400
KEYS = 34 * 128 - 5
"""Of the longer sequence: so many blocks that the best one is selected through group maxima."""


@pytest.fixture(scope="module")
def filled() -> tuple[IndexScorer, list[int]]:
    generator = torch.Generator().manual_seed(6)
    scorer = IndexScorer(
        IndexerConfig(
            num_index_heads=4, num_pages=40, topk_blocks=1, local_blocks=0, backend="flydsl-sim", device="cpu"
        )
    )
    sequences = [scorer.add_sequence(), scorer.add_sequence()]
    for sequence, keys in zip(sequences, (KEYS, 70)):
        scorer.append_keys(sequence, torch.randn(keys, 128, generator=generator).to(torch.bfloat16))
    return scorer, sequences


@pytest.mark.parametrize(
    ("return_scores", "for_good"),
    [
        (True, False),
        (False, True),
        pytest.param(True, True, marks=pytest.mark.nightly),
        pytest.param(False, False, marks=pytest.mark.nightly),
    ],
)
def test_scoring(
    filled: tuple[IndexScorer, list[int]],
    return_scores: bool,
    for_good: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch of prefill and decode, with scores and by group maxima."""
    scorer, sequences = filled
    q = torch.randn(6, 4, 128, generator=torch.Generator().manual_seed(7))

    def score() -> ScoreResult:
        return scorer.score(q, sequences, query_lens=[1, 5], return_scores=return_scores)

    def forget() -> None:  # what a part of a call left would spare the next one allocations
        scorer._plans.clear()
        scorer._cache._tables._last = None

    right, before = score(), state_of(scorer)
    failed = set()
    for allocation in range(MOST_ALLOCATIONS):
        forget()
        with monkeypatch.context() as patch, OutOfMemoryAt(allocation, for_good=for_good) as memory:
            # What its kernels would compute nobody sees: they are launched and not run.
            patch.setattr(simulated_device(), "run", lambda _launch: None)
            try:
                found = score()
            except InvalidArgumentError as error:
                failed.add(error.argument)
                found = None
        assert (found is None) == bool(memory.failed)
        assert state_of(scorer) == before
        if found is not None:
            break
    else:
        pytest.fail("a call that never ended")
    assert allocation > 15
    assert failed == ({"q.shape[0]", "return_scores"} if return_scores else {"q.shape[0]"})
    forget()
    for one in (score(), score()):
        assert_same_bits(one.block_ids, right.block_ids)
        if right.scores is not None and one.scores is not None:
            assert_same_bits(one.scores, right.scores)


@pytest.mark.parametrize("for_good", [False, True])
def test_appending(filled: tuple[IndexScorer, list[int]], for_good: bool) -> None:
    """To a page that a fork shares, and to fresh ones; the keys are strided, so that they are copied, too."""
    scorer, (_, sequence) = filled
    keys = torch.randn(130, 256, generator=torch.Generator().manual_seed(8))[:, ::2]
    fork = scorer.fork_sequence(sequence)
    before = state_of(scorer)
    failed = set()
    for allocation in range(MOST_ALLOCATIONS):
        with OutOfMemoryAt(allocation, for_good=for_good) as memory:
            try:
                scorer.append_keys(fork, keys)
            except InvalidArgumentError as error:
                failed.add(error.argument)
        assert_consistent(scorer)
        if not memory.failed:
            break
        assert state_of(scorer) == before
    assert failed == {"k.shape[0]"}
    assert allocation > 5
    assert scorer.sequence_length(fork) == 200
    assert_consistent(scorer)
    again = scorer.fork_sequence(sequence)
    scorer.append_keys(again, keys)
    pages = [scorer.pages[scorer.block_table(one).long()] for one in (fork, again)]
    assert_same_bits(*pages)
    scorer.free_sequence(fork)
    scorer.free_sequence(again)
