"""Memory that runs out at each allocation of a call in turn: a named error, nothing half done.

Scores, group maxima, work lists, request lists, ids, copies of operands and pages are all allocated by torch:
the failures are injected there, once alone and once for good, so that undoing has no memory either.
"""

from __future__ import annotations

import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from indexer.pipeline import ScoreResult
from kernel.errors import InvalidArgumentError
from tests.support.compare import assert_same_bits
from tests.support.out_of_memory import OutOfMemoryAt
from tests.support.scorer_state import assert_consistent, state_of

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


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("return_scores", [True, False])
def test_scoring(filled: tuple[IndexScorer, list[int]], return_scores: bool, for_good: bool) -> None:
    """A batch of prefill and decode, with scores and by group maxima."""
    scorer, sequences = filled
    q = torch.randn(6, 4, 128, generator=torch.Generator().manual_seed(7))

    def score() -> ScoreResult:
        return scorer.score(q, sequences, query_lens=[1, 5], return_scores=return_scores)

    right, before = score(), state_of(scorer)
    failed = set()
    for allocation in range(MOST_ALLOCATIONS):
        with OutOfMemoryAt(allocation, for_good=for_good) as memory:
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
    assert allocation > 10
    assert failed == ({"q.shape[0]", "return_scores"} if return_scores else {"q.shape[0]"})
    for one in (found, score()):
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
