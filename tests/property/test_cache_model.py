"""Any sequence of adds, appends, forks, frees and failures against a model that is a list of keys."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import settings
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
from tests.support.scorer_state import assert_consistent, pages_of, state_of

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
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=25)


@pytest.mark.nightly
def test_many_and_longer_runs() -> None:
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=500, stateful_step_count=60))
