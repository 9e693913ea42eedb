"""IndexScorer against the oracle behind the same calls, against sums by hand, and on its callers' terms."""

from __future__ import annotations

import math

import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from kernel.backends.base import Order
from kernel.contract import PAGE_BYTES
from tests.support.compare import assert_same_bits
from tests.support.filled_scorer import LENGTHS, QUERY_LENS, all_queries, exact, filled, new_scorer


@pytest.mark.parametrize("order", ["score", "block"])
@pytest.mark.parametrize(("heads", "init", "local"), [(1, 0, 0), (2, 1, 1), (4, 2, 0), (4, 0, 0)])
def test_scores_and_selection_are_the_oracle_s(heads: int, init: int, local: int, order: Order) -> None:
    results = []
    for backend in ("cpu", "reference"):
        scorer = new_scorer(backend, heads)
        seqs = filled(scorer)
        assert scorer.block_table(seqs[0]).tolist() != list(range(6)), "the pages should be permuted"
        q = all_queries(heads)
        result = scorer.score(q, seqs, QUERY_LENS, init_blocks=init, local_blocks=local, order=order)
        alone = scorer.score(
            q, seqs, QUERY_LENS, init_blocks=init, local_blocks=local, order=order, return_scores=False
        )
        assert alone.scores is None
        assert_same_bits(alone.block_ids, result.block_ids)
        assert_same_bits(alone.num_blocks, result.num_blocks)
        results.append((scorer, result))
    (scorer, result), (oracle_scorer, oracle) = results
    assert_same_bits(scorer.pages, oracle_scorer.pages)
    assert result.scores is not None
    assert oracle.scores is not None
    assert_same_bits(result.scores, oracle.scores)
    assert_same_bits(result.block_ids, oracle.block_ids)
    assert_same_bits(result.num_blocks, oracle.num_blocks)
    assert (result.backend, result.precision) == ("cpu", "exact")
    assert (oracle.backend, oracle.precision) == ("reference", "exact")


def test_a_hand_made_selection() -> None:
    scorer = new_scorer()
    seq = scorer.add_sequence()
    keys = torch.zeros(400, 128)
    keys[10, 0], keys[130, 0], keys[300, 0], keys[399, 0] = 2.0, 6.0, 4.0, 6.0
    scorer.append_keys(seq, keys)
    q = torch.zeros(2, 4, 128)
    q[:, :, 0] = torch.tensor([1.0, 2.0, -1.0, 0.0])
    result = scorer.score(q, [seq])
    assert result.scores is not None
    assert result.num_blocks.tolist() == [4, 4]
    assert result.scores[:, 0].tolist() == [[2, 6, 4, 0], [4, 12, 8, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert result.scores[:, 1].tolist() == [[2, 6, 4, 6], [4, 12, 8, 12], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert result.block_ids[:, 0].tolist() == [[1, 2, 0, 3, -1], [1, 2, 0, 3, -1], *[[0, 1, 2, 3, -1]] * 2]
    assert result.block_ids[:, 1].tolist() == [[1, 3, 2, 0, -1], [1, 3, 2, 0, -1], *[[0, 1, 2, 3, -1]] * 2]


def test_configured_defaults_and_overrides_of_a_call() -> None:
    scorer = IndexScorer(
        IndexerConfig(1, 8, topk_blocks=3, init_blocks=1, local_blocks=1, order="block", backend="cpu")
    )
    seq = scorer.add_sequence()
    scorer.append_keys(seq, exact(torch.Generator().manual_seed(0), 640, 128))
    q = exact(torch.Generator().manual_seed(1), 1, 1, 128)
    configured = scorer.score(q, [seq])
    assert configured.scores is not None
    assert configured.scores[0, 0, 0] == torch.tensor(1e30)
    assert configured.scores[0, 0, 4] == torch.tensor(1e29)
    ids = configured.block_ids[0, 0].tolist()
    assert ids == sorted(ids)
    assert {0, 4} < set(ids)
    changed = scorer.score(q, [seq], topk=7, init_blocks=0, local_blocks=0, order="score")
    assert changed.scores is not None
    assert changed.scores.abs().max() < 1e5
    assert changed.block_ids.shape == (1, 1, 7)
    best = changed.scores[0, 0][changed.block_ids[0, 0, :5].long()]
    assert best.tolist() == sorted(best.tolist(), reverse=True)
    everything = scorer.score(q, [seq], init_blocks=10**30, local_blocks=10**30)
    assert everything.scores is not None
    assert bool((everything.scores == torch.tensor(1e29)).all()), "a block that is both gets the local value"


def test_how_rows_are_told_apart() -> None:
    scorer = new_scorer()
    a, b = filled(scorer)[:2]
    q = all_queries(4)[:4]
    assert_same_bits(scorer.score(q, [a]).block_ids, scorer.score(q, [a], [4]).block_ids)
    each = scorer.score(q[:2], [a, b])
    assert_same_bits(each.block_ids, scorer.score(q[:2], [a, b], [1, 1]).block_ids)
    assert_same_bits(each.block_ids[:, 1:], scorer.score(q[1:2], [b]).block_ids)
    twice = scorer.score(q, [a, b, a, a], (2, 0, 1, 1))
    assert_same_bits(twice.block_ids[:, :2], scorer.score(q[:2], [a]).block_ids)
    assert_same_bits(twice.block_ids[:, 3:], scorer.score(q[3:], [a]).block_ids)


@pytest.mark.parametrize("return_scores", [True, False])
def test_calls_without_rows(return_scores: bool) -> None:
    scorer = new_scorer()
    empty = scorer.add_sequence()
    batches: list[tuple[list[int], list[int] | None]] = [
        ([], None),
        ([], []),
        ([empty], None),
        ([empty, empty], [0, 0]),
    ]
    for sequences, lens in batches:
        result = scorer.score(torch.zeros(0, 4, 128), sequences, lens, return_scores=return_scores)
        assert result.block_ids.shape == (4, 0, 5)
        assert result.num_blocks.shape == (0,)
        if return_scores:
            assert result.scores is not None
            assert result.scores.shape == (4, 0, 0)


@pytest.mark.parametrize("return_scores", [True, False])
@pytest.mark.parametrize("total_q", [1, 2, 4, 5])
def test_as_many_queries_as_heads_is_no_special_case(total_q: int, return_scores: bool) -> None:
    scorer = new_scorer(heads=4)
    seq = filled(scorer)[1]
    q = all_queries(4)[:total_q]
    together = scorer.score(q, [seq], return_scores=return_scores).block_ids
    for head in range(4):
        lone_head = torch.zeros_like(q)
        lone_head[:, 0] = q[:, head]
        assert_same_bits(together[head], scorer.score(lone_head, [seq]).block_ids[0])
    assert len({tuple(ids) for ids in together.flatten(0, 1).tolist()}) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_query_dtypes(dtype: torch.dtype) -> None:
    scorer = new_scorer()
    seq = filled(scorer)[0]
    q = all_queries(4)[:3]
    expected, actual = scorer.score(q, [seq]), scorer.score(q.to(dtype), [seq])
    assert expected.scores is not None
    assert actual.scores is not None
    assert_same_bits(actual.scores, expected.scores)
    assert ("quantize_query" in actual.timings) == (dtype != torch.float8_e4m3fn)


def test_queries_saturate() -> None:
    scorer = new_scorer()
    seq = scorer.add_sequence()
    scorer.append_keys(seq, torch.eye(128)[:1] * 6)
    q = torch.zeros(1, 4, 128)
    q[0, :, 0] = torch.tensor([1e30, 465.0, 448.0, -1e30])
    result = scorer.score(q, [seq])
    assert result.scores is not None
    assert result.scores.flatten().tolist() == [2688.0, 2688.0, 2688.0, -2688.0]


def test_strided_queries_that_require_a_gradient() -> None:
    scorer = new_scorer()
    seq = filled(scorer)[0]
    q = all_queries(4)[:3].float()
    strided = q.transpose(0, 1).contiguous().requires_grad_().transpose(0, 1)
    result = scorer.score(strided, [seq])
    assert result.scores is not None
    assert not result.scores.requires_grad
    assert_same_bits(result.block_ids, scorer.score(q, [seq]).block_ids)


def test_score_paged_equals_score_and_touches_nothing() -> None:
    scorer = new_scorer()
    seqs = filled(scorer)
    q = all_queries(4)
    expected = scorer.score(q, seqs, QUERY_LENS)
    assert expected.scores is not None

    memory = torch.full((64, PAGE_BYTES + 48), 0xFF, dtype=torch.uint8)
    memory[:, :PAGE_BYTES] = scorer.pages
    table = torch.full((len(seqs), 25), 2**31 - 1, dtype=torch.int32)
    for row, seq in zip(table, seqs):
        row[: len(scorer.block_table(seq))] = scorer.block_table(seq)
    cu_seqlens_q = torch.tensor([0, *QUERY_LENS]).cumsum(0).int()
    seq_lens = torch.tensor([tokens for tokens, _ in LENGTHS], dtype=torch.int32)
    inputs = (q, memory[:, :PAGE_BYTES].view(64, 128, 72), table, cu_seqlens_q, seq_lens)
    copies = [tensor.clone() for tensor in (*inputs, memory)]

    stranger = new_scorer(num_pages=0)
    wide = torch.full((4, q.shape[0] + 2, 40), math.nan)
    buffer = wide[:, 1:-1, 3:33]
    result = stranger.score_paged(*inputs, scores=buffer)
    assert result.scores is not None
    assert result.scores.data_ptr() == buffer.data_ptr()
    assert_same_bits(buffer[..., :19].contiguous(), expected.scores)
    assert bool((buffer[..., 19:] == -math.inf).all())
    assert int(wide.isnan().sum()) == wide.numel() - buffer.numel(), "cells around the buffer were written"
    assert_same_bits(result.block_ids, expected.block_ids)
    assert_same_bits(stranger.score_paged(*inputs, return_scores=False).block_ids, expected.block_ids)
    for tensor, copy in zip((*inputs, memory), copies):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("block", [0, 500, 1022])
def test_a_needle_in_a_long_context_is_found(block: int) -> None:
    generator = torch.Generator().manual_seed(block)
    scorer = IndexScorer(IndexerConfig(4, 1024, topk_blocks=4, backend="cpu"))
    seq = scorer.add_sequence()
    keys = torch.randn(1024 * 128, 128, generator=generator).bfloat16()
    q = torch.randn(3, 4, 128, generator=generator).bfloat16()
    for head in range(4):
        keys[(block - head) % 1023 * 128 + 77] = q[1, head] * 3
    scorer.append_keys(seq, keys)
    result = scorer.score(q, [seq])
    assert result.scores is not None
    for head in range(4):
        needle = (block - head) % 1023
        assert result.block_ids[head, 1, :2].tolist() == [1023, needle], "the local block, then the needle"
        assert int(result.scores[head, 1, :1023].argmax()) == needle
        assert needle not in result.block_ids[head, 1, 2:].tolist()
