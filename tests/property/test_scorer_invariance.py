"""A row's scores and selection do not depend on how its prefill was split, nor on its batch neighbours."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer import IndexerConfig, IndexScorer
from tests.support.compare import assert_same_bits

TOPK = 4


def new_scorer(heads: int = 2, num_pages: int = 80) -> IndexScorer:
    config = IndexerConfig(heads, num_pages, topk_blocks=TOPK, local_blocks=0, backend="cpu")
    return IndexScorer(config)


def random(seed: int, *shape: int) -> torch.Tensor:
    """Values whose products do not all fit fp32: a different order of summation shows."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Rows(NamedTuple):
    """``[H, rows, S]`` and ``[H, rows, k]`` of some rows of a call."""

    scores: torch.Tensor
    block_ids: torch.Tensor

    def of(self, first: int, end: int) -> Rows:
        return Rows(self.scores[:, first:end], self.block_ids[:, first:end])


def scored(scorer: IndexScorer, q: torch.Tensor, seqs: list[int], lens: list[int]) -> Rows:
    """The rows of a call, whose ids are the same without a score buffer."""
    result = scorer.score(q, seqs, lens)
    assert result.scores is not None
    alone = scorer.score(q, seqs, lens, return_scores=False)
    assert_same_bits(alone.block_ids, result.block_ids)
    return Rows(result.scores, result.block_ids)


def assert_same_rows(actual: Rows, expected: Rows) -> None:
    """The same rows, though the two calls' score buffers may have different widths."""
    common = min(actual.scores.shape[2], expected.scores.shape[2])
    cells, expected_cells = (rows.scores[..., :common].contiguous() for rows in (actual, expected))
    assert_same_bits(cells, expected_cells)
    for rows in (actual, expected):
        assert bool((rows.scores[..., common:] == -torch.inf).all())
    assert_same_bits(actual.block_ids.contiguous(), expected.block_ids.contiguous())


@pytest.mark.parametrize("first", range(4))
def test_a_prefill_split_at_every_offset_of_a_block(first: int) -> None:
    """700 tokens, the last 130 of them queries, in two steps that meet at each token of a block."""
    keys, q = random(0, 700, 128), random(1, 130, 2, 128)
    whole_scorer = new_scorer()
    whole_seq = whole_scorer.add_sequence()
    whole_scorer.append_keys(whole_seq, keys)
    whole = scored(whole_scorer, q, [whole_seq], [130])
    pages = whole_scorer.pages[whole_scorer.block_table(whole_seq).long()]
    for split in range(1 + first, 130, 4):
        scorer = new_scorer()
        seq = scorer.add_sequence()
        scorer.append_keys(seq, keys[: 570 + split])
        assert_same_rows(scored(scorer, q[:split], [seq], [split]), whole.of(0, split))
        scorer.append_keys(seq, keys[570 + split :])
        assert_same_rows(scored(scorer, q[split:], [seq], [130 - split]), whole.of(split, 130))
        assert_same_bits(scorer.pages[scorer.block_table(seq).long()], pages)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.integers(0, 300), st.sampled_from([1, 2, 4]))
def test_a_prefill_in_any_steps(steps: list[int], prefix: int, heads: int) -> None:
    total = sum(steps)
    keys, q = random(prefix, prefix + total, 128), random(total, total, heads, 128)
    scorer = new_scorer(heads)
    whole_seq = scorer.add_sequence()
    scorer.append_keys(whole_seq, keys)
    whole = scored(scorer, q, [whole_seq], [total])
    seq = scorer.add_sequence()
    scorer.append_keys(seq, keys[:prefix])
    start = 0
    for step in steps:
        end = start + step
        scorer.append_keys(seq, keys[prefix + start : prefix + end])
        assert_same_rows(scored(scorer, q[start:end], [seq], [step]), whole.of(start, end))
        start = end


@settings(max_examples=25)
@given(st.data())
def test_rows_do_not_see_their_neighbours(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 900), min_size=1, max_size=6), label="tokens")
    query_lens = [data.draw(st.integers(0, min(tokens, 60)), label="queries") for tokens in lengths]
    scorer = new_scorer()
    seqs = []
    for seed, tokens in enumerate(lengths):
        seqs.append(scorer.add_sequence())
        scorer.append_keys(seqs[-1], random(seed, tokens, 128))
    queries = [random(100 + row, queries, 2, 128) for row, queries in enumerate(query_lens)]
    order = data.draw(st.permutations(range(len(lengths))), label="order")
    together = scored(
        scorer,
        torch.cat([queries[row] for row in order]),
        [seqs[row] for row in order],
        [query_lens[row] for row in order],
    )
    start = 0
    for row in order:
        alone = scored(scorer, queries[row], [seqs[row]], [query_lens[row]])
        assert_same_rows(alone, together.of(start, start + query_lens[row]))
        start += query_lens[row]


def test_a_fork_scores_like_its_parent_wherever_its_pages_lie() -> None:
    scorer = new_scorer()
    keys, q = random(0, 900, 128), random(1, 20, 2, 128)
    parent = scorer.add_sequence()
    scorer.append_keys(parent, keys[:450])
    fork = scorer.fork_sequence(parent)
    scorer.append_keys(parent, keys[450:])
    scorer.append_keys(fork, keys[450:])
    assert scorer.block_table(parent).tolist() != scorer.block_table(fork).tolist()
    expected = scored(scorer, q, [parent], [20])
    assert_same_rows(scored(scorer, q, [fork], [20]), expected)
    both = scored(scorer, torch.cat([q, q]), [fork, parent], [20, 20])
    assert_same_rows(both.of(20, 40), expected)


def test_a_reused_page_scores_without_its_old_keys() -> None:
    """The old keys would win every row: alone, in the same pages, and past the new sequence's end."""
    scorer = new_scorer(num_pages=3)
    q = random(1, 5, 2, 128)
    old = scorer.add_sequence()
    scorer.append_keys(old, (q[:, 0] * 100).repeat(76, 1))
    scorer.free_sequence(old)
    new = scorer.add_sequence()
    scorer.append_keys(new, random(0, 300, 128))
    fresh = new_scorer(num_pages=3)
    expected_seq = fresh.add_sequence()
    fresh.append_keys(expected_seq, random(0, 300, 128))
    assert_same_rows(scored(scorer, q, [new], [5]), scored(fresh, q, [expected_seq], [5]))
