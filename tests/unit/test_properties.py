"""A row's scores and selection do not depend on how its prefill was split, nor on its batch neighbours."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from indexer import IndexerConfig, IndexScorer, OutOfPagesError, UnknownSequenceError
from kernel.backends.reference.backend import float_values
from kernel.backends.reference.quantizer import quantize_keys
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, SCALE_BYTES
from kernel.page import codes_of, scales_of
from tests.support.compare import assert_same_bits
from tests.support.scorer_state import assert_consistent, pages_of, state_of

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


# Any sequence of adds, appends, forks, frees and failures against a model that is a list of keys.

NUM_PAGES = 9
SIZES = st.one_of(st.integers(0, 140), st.sampled_from([127, 128, 129, 256, 300]))


class Keys:
    """A sequence of the model: the oracle's codes ``[n, 64]`` and scales ``[n, 8]`` of each key alone."""

    def __init__(self, codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> None:
        self.codes = codes
        self.scales = scales

    def __len__(self) -> int:
        return len(self.codes)

    def and_then(self, keys: torch.Tensor) -> Keys:
        codes, scales = quantize_keys(float_values(keys))
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        return Keys(np.concatenate([self.codes, packed]), np.concatenate([self.scales, scales]))

    def pages(self) -> torch.Tensor:
        blocks = -(-len(self) // BLOCK_TOKENS)
        unused = [(0, blocks * BLOCK_TOKENS - len(self)), (0, 0)]
        codes = np.pad(self.codes, unused).reshape(blocks, CODE_BYTES)
        scales = np.pad(self.scales, unused).reshape(blocks, SCALE_BYTES)
        return torch.from_numpy(np.concatenate([codes, scales], axis=1))


def random_keys(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()


class CacheMachine(RuleBasedStateMachine):
    """Drives one scorer and the model side by side."""

    sequences = Bundle("sequences")

    @initialize()
    def start(self) -> None:
        self.scorer = IndexScorer(IndexerConfig(1, NUM_PAGES, backend="cpu"))
        self.model: dict[int, Keys] = {}
        self.given_out: set[int] = set()
        self.seed = 0

    def keys(self, tokens: int) -> torch.Tensor:
        self.seed += 1
        return random_keys(tokens, self.seed)

    def is_new(self, seq: int) -> int:
        assert seq not in self.given_out
        self.given_out.add(seq)
        return seq

    @rule(target=sequences)
    def add(self) -> int:
        seq = self.is_new(self.scorer.add_sequence())
        self.model[seq] = Keys(np.zeros((0, 64), np.uint8), np.zeros((0, 8), np.uint8))
        return seq

    def pages_missing(self, seq: int, tokens: int) -> int:
        """Pages that an append of so many tokens lacks, from the model and its block tables alone."""
        length = len(self.model[seq])
        needed = -(-(length + tokens) // BLOCK_TOKENS) - -(-length // BLOCK_TOKENS)
        tables = {other: self.scorer.block_table(other).tolist() for other in self.model}
        if tokens and length % BLOCK_TOKENS:
            needed += sum(tables[seq][-1] in table for table in tables.values()) > 1
        used = {page for table in tables.values() for page in table}
        return needed - (NUM_PAGES - len(used))

    @rule(seq=sequences, tokens=SIZES)
    def append(self, seq: int, tokens: int) -> None:
        keys = self.keys(tokens)
        missing = self.pages_missing(seq, tokens)
        if missing > 0:
            before = state_of(self.scorer)
            with pytest.raises(OutOfPagesError, match=f", {missing} missing"):
                self.scorer.append_keys(seq, keys)
            assert state_of(self.scorer) == before
        else:
            self.scorer.append_keys(seq, keys)
            self.model[seq] = self.model[seq].and_then(keys)

    @rule(seq=sequences, tokens=st.integers(1, 300), written=st.integers(0, 300), interrupt=st.booleans())
    def append_while_the_backend_fails(self, seq: int, tokens: int, written: int, interrupt: bool) -> None:
        error = KeyboardInterrupt if interrupt else RuntimeError

        def insert(_: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
            some = slots[:written]
            codes_of(pages)[some // BLOCK_TOKENS, some % BLOCK_TOKENS] = 0xEE
            scales_of(pages)[some // BLOCK_TOKENS, some % BLOCK_TOKENS] = 0xEE
            raise error("injected")

        before = state_of(self.scorer)
        with (
            mock.patch.object(self.scorer._backend, "insert", insert),
            pytest.raises((error, OutOfPagesError)),
        ):
            self.scorer.append_keys(seq, self.keys(tokens))
        assert state_of(self.scorer) == before

    @rule(seq=sequences, token=st.integers(0, 99), dim=st.integers(0, 127))
    def append_what_is_not_finite(self, seq: int, token: int, dim: int) -> None:
        keys = self.keys(100)
        keys[token, dim] = float("nan")
        before = state_of(self.scorer)
        with pytest.raises(ValueError, match=rf"k\[{token}, {dim}\] = nan"):
            self.scorer.append_keys(seq, keys)
        assert state_of(self.scorer) == before

    @rule(target=sequences, seq=sequences)
    def fork(self, seq: int) -> int:
        child = self.is_new(self.scorer.fork_sequence(seq))
        self.model[child] = self.model[seq]
        return child

    @rule(seq=consumes(sequences))
    def free(self, seq: int) -> None:
        self.scorer.free_sequence(seq)
        del self.model[seq]
        with pytest.raises(UnknownSequenceError):
            self.scorer.free_sequence(seq)

    @invariant()
    def every_sequence_holds_its_keys(self) -> None:
        if not hasattr(self, "scorer"):
            return
        assert set(self.scorer.sequences) == set(self.model)
        for seq, keys in self.model.items():
            assert self.scorer.sequence_length(seq) == len(keys)
            assert torch.equal(pages_of(self.scorer, seq), keys.pages())
        assert_consistent(self.scorer)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=30, stateful_step_count=25)


@pytest.mark.nightly
def test_many_and_longer_runs() -> None:
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=500, stateful_step_count=60))
