"""Sentinels: a row's last local_blocks get 1e29, its first init_blocks 1e30, both get the former."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel.backends.base import Backend
from tests.support.calls import RAGGED, random_call, staircase_call
from tests.support.compare import assert_same_bits, oracle_scores
from tests.support.run import scores_of, selection_of
from tests.support.selection import selected

LOCAL, INIT = float(np.float32(1e29)), float(np.float32(1e30))


@pytest.mark.parametrize("local_blocks", [0, 1, 2, 3])
@pytest.mark.parametrize("init_blocks", [0, 1, 2, 3])
def test_overlaps_have_the_local_value(backend: Backend, init_blocks: int, local_blocks: int) -> None:
    """Every overlap of init and local blocks, for rows of 1 to 7 blocks, told by hand from the sentence."""
    lengths = [(128 * blocks - residue, 1) for blocks in range(1, 8) for residue in (0, 1, 127)]
    call = staircase_call(lengths, heads=2).forcing(init_blocks, local_blocks)
    scores = scores_of(backend, call, columns=8)
    for row, (seq_len, _) in enumerate(lengths):
        num_blocks = (seq_len - 1) // 128 + 1
        expected = []
        for block in range(8):
            if block >= num_blocks:
                expected.append(-torch.inf)
            elif block >= num_blocks - local_blocks:
                expected.append(LOCAL)
            elif block < init_blocks:
                expected.append(INIT)
            else:
                expected.append(float(min(127, seq_len - 1 - 128 * block)))
        assert scores[:, row].tolist() == [expected, expected], f"seq_len {seq_len}"


@pytest.mark.parametrize("forced", [(0, 1), (1, 0), (2, 2), (0, 3), (1000, 0), (0, 1000), (1000, 1000)])
def test_ragged_batches_equal_the_oracle(backend: Backend, forced: tuple[int, int]) -> None:
    """nb is each row's own, so the sentinels of a prefill move with its rows; more than nb is all."""
    call = random_call(RAGGED, 2, seed=4).forcing(*forced)
    assert_same_bits(scores_of(backend, call), oracle_scores(call))


@pytest.mark.parametrize("forced", [(0, 1), (0, 3), (17, 0), (15, 2), (16, 16), (1, 17)])
def test_prefills_across_many_blocks_equal_the_oracle(backend: Backend, forced: tuple[int, int]) -> None:
    """A backend that takes blocks in groups forces the blocks of rows whose nb ends in an earlier group."""
    lengths = [(128 * 19, 500), (128 * 34 + 7, 300), (128 * 66, 140)]
    call = random_call(lengths, 1, seed=5).forcing(*forced)
    assert_same_bits(scores_of(backend, call), oracle_scores(call))
    expected = selected(oracle_scores(call), call.batch().num_blocks_per_query(), 16)
    assert_same_bits(selection_of(backend, call, 16), expected)


def test_a_sentinel_hides_only_its_own_block(backend: Backend) -> None:
    """local_blocks = 1 changes the row's own block and no other cell."""
    call = random_call([(700, 300)], 4, seed=8)
    plain, forced = scores_of(backend, call), scores_of(backend, call.forcing(0, 1))
    own = (torch.arange(400, 700) // 128)[:, None] == torch.arange(6)
    assert bool((forced[:, own] == LOCAL).all())
    assert_same_bits(forced[:, ~own], plain[:, ~own])


def test_forced_blocks_are_selected_first(backend: Backend) -> None:
    """Score descending: init blocks, then local ones, then the best of the others; ties to the lower id."""
    call = random_call([(128 * 40, 2)], 1, seed=6).forcing(2, 3)
    best_others = scores_of(backend, call.forcing(0, 0))[0, :, 2:37].argsort(
        dim=1, descending=True, stable=True
    )
    selected = selection_of(backend, call, topk=8)[0]
    for row in range(2):
        assert selected[row].tolist() == [0, 1, 37, 38, 39, *(best_others[row, :3] + 2).tolist()]
