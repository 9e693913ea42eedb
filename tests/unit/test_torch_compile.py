"""Where torch.compile traces its caller, a scorer gives the same bits and has the same state as elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from indexer import IndexerConfig, IndexScorer, ScoreResult
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits
from tests.support.process import ForkedProcess

GENERATOR = torch.Generator().manual_seed(1)
KEYS = torch.randn(2500, 128, generator=GENERATOR)
QUERIES = torch.randn(24, 2, 128, generator=GENERATOR)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_compiled_model_may_call_a_scorer(backend: str) -> None:
    """Appending, forking, scoring and freeing between operations that are compiled."""

    def step(scorer: IndexScorer, seq: int, keys: torch.Tensor, queries: torch.Tensor) -> ScoreResult:
        scorer.append_keys(seq, keys * 0.5)
        fork = scorer.fork_sequence(seq)
        scorer.append_keys(fork, keys[:1] * 2)
        result = scorer.score(queries * 0.5, [seq, fork], [20, 4])
        scorer.free_sequence(fork)
        return result

    compiled = torch.compile(step, backend="eager")
    scorers = [IndexScorer(IndexerConfig(2, 64, local_blocks=0, backend=backend)) for _ in range(2)]
    sequences = [scorer.add_sequence() for scorer in scorers]
    for _ in range(2):
        right = step(scorers[0], sequences[0], KEYS, QUERIES)
        found = compiled(scorers[1], sequences[1], KEYS, QUERIES)
        assert right.scores is not None
        assert found.scores is not None
        assert_same_bits(found.scores, right.scores)
        assert_same_bits(found.block_ids, right.block_ids)
        assert_same_bits(scorers[1].pages, scorers[0].pages)
        assert scorers[1].sequence_length(sequences[1]) == scorers[0].sequence_length(sequences[0])


def test_a_compiled_model_may_score_pages_of_its_own() -> None:
    call = random_call(((2500, 20), (300, 4)), heads=2, seed=3)
    scorer = IndexScorer(IndexerConfig(2, 1, local_blocks=0, backend="cpu"))

    def step(queries: torch.Tensor) -> ScoreResult:
        return scorer.score_paged(
            queries, call.pages, call.block_table, call.cu_seqlens_q, call.seq_lens, return_scores=False
        )

    compiled = torch.compile(step, backend="eager")
    assert_same_bits(compiled(call.q).block_ids, step(call.q).block_ids)


def score_and_look_for_a_compiler() -> None:
    scorer = IndexScorer(IndexerConfig(1, 4))
    sequence = scorer.add_sequence()
    scorer.append_keys(sequence, torch.ones(3, 128))
    scorer.score(torch.ones(3, 1, 128), [sequence])
    sys.exit("torch._dynamo" in sys.modules)


def test_who_compiles_nothing_waits_for_no_compiler() -> None:
    """Importing it takes seconds."""
    assert ForkedProcess(score_and_look_for_a_compiler).wait(120) == 0
