"""Scores: the maximum over the causal tokens of a block of q . k, against the oracle and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel.backends.base import Backend
from tests.contract import simulated
from tests.support.calls import Lengths, Values, random_call, staircase_call
from tests.support.compare import (
    assert_same_bits,
    assert_within_bounds,
    oracle_scores,
    scores_of,
    selected,
    selection_of,
)

HEADS = (1, 2, 4)
PREFIXES = [range(first, 128, 8) for first in range(8)]
"""Every ``prefix mod 128``, in parts."""


def lengths_of(prefixes: range) -> list[tuple[int, int]]:
    """Two requests for each prefix, with none, one or two whole blocks before it."""
    return [(128 * (prefix % 3) + prefix + queries, queries) for prefix in prefixes for queries in (1, 3)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("values", ["exact", "bytes"])
@pytest.mark.parametrize("seed", [0, 1])
def test_equal_the_oracle_where_partial_sums_are_exact(
    backend: Backend, ragged: Lengths, heads: int, values: Values, seed: int
) -> None:
    """Where every partial sum is exactly representable in fp32, all backends agree bit for bit."""
    call = random_call(ragged, heads, seed=seed, values=values)
    assert_same_bits(scores_of(backend, call), oracle_scores(call))


@pytest.mark.parametrize("heads", HEADS)
def test_lie_within_the_bound_of_the_oracle(backend: Backend, ragged: Lengths, heads: int) -> None:
    """Backends differ by at most 2^-16 * sum_i |q_i k_i| (2^-9 when fast) on any bytes."""
    call = random_call(ragged, heads, seed=7, values="inexact").forcing(1, 1)
    assert_within_bounds(scores_of(backend, call), call, backend.precision)


@pytest.mark.parametrize("prefixes", PREFIXES, ids=lambda part: f"from {part.start}")
@pytest.mark.parametrize("heads", HEADS)
def test_of_every_prefix_see_exactly_the_causal_tokens(backend: Backend, heads: int, prefixes: range) -> None:
    """pos = seq_len - q_len + j, and a row sees the keys 0..pos, for every prefix mod 128."""
    lengths = lengths_of(prefixes)
    call = staircase_call(lengths, heads)
    scores = scores_of(backend, call)
    row = 0
    for seq_len, query_len in lengths:
        for position in range(seq_len - query_len, seq_len):
            steps = [min(127, position - 128 * block) for block in range(scores.shape[2])]
            expected = [float(step) if step >= 0 else -torch.inf for step in steps]
            assert scores[:, row].tolist() == [expected] * heads, f"position {position}"
            row += 1


@pytest.mark.parametrize("prefixes", PREFIXES, ids=lambda part: f"from {part.start}")
@pytest.mark.parametrize("heads", HEADS)
def test_of_every_prefix_equal_the_oracle(backend: Backend, heads: int, prefixes: range) -> None:
    """The same sweep on random pages whose bytes past the last key would win."""
    call = random_call(lengths_of(prefixes), heads, seed=3)
    assert_same_bits(scores_of(backend, call), oracle_scores(call))


def test_of_a_prefill_climb_and_fall_with_the_position(backend: Backend) -> None:
    """In a prefill of more than three blocks a row sees no key after its own and no later block."""
    scores = scores_of(backend, staircase_call([(400, 400)]))[0]
    positions, blocks = torch.arange(400)[:, None], torch.arange(4)
    steps = (positions - 128 * blocks).clamp(max=127).float()
    assert_same_bits(scores, torch.where(steps >= 0, steps, -torch.inf))


@pytest.mark.parametrize(("heads", "queries"), [(1, 4700), (2, 2400), (4, 1200)])
def test_of_a_prefill_of_thousands_of_rows(backend: Backend, heads: int, queries: int) -> None:
    """A backend that takes rows in chunks goes on where it stopped: more than 4,096 rows in one request."""
    call = random_call([(queries + 333, queries), (5, 5)], heads, seed=12)
    expected = oracle_scores(call)
    assert_same_bits(scores_of(backend, call), expected)
    expected_ids = selected(expected, call.batch().num_blocks_per_query(), 4)
    assert_same_bits(selection_of(backend, call, 4), expected_ids)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("total_q", [1, 2, 3, 4, 5, 8])
def test_are_head_major_whatever_the_number_of_queries(backend: Backend, heads: int, total_q: int) -> None:
    """scores[h, token, block] is head-major, q token-major; a mix-up only hides where total_q == H."""
    call = random_call([(200 + total_q, total_q)], heads, seed=total_q)
    scores = scores_of(backend, call)
    assert scores.shape == (heads, total_q, 2)
    assert_same_bits(scores, oracle_scores(call))


def test_of_one_hot_queries_read_each_dimension(backend: Backend) -> None:
    """Dim 2i is the low nibble of byte i, dim 2i+1 the high one: a one-hot query reads its own dim."""
    call = random_call([(256, 128)], 1, seed=5)
    one_hot = torch.eye(128).to(torch.float8_e4m3fn)[:, None, :]
    call = type(call)(one_hot, call.pages, call.block_table, call.cu_seqlens_q, call.seq_lens)
    assert_same_bits(scores_of(backend, call), oracle_scores(call))


def test_past_nb_are_minus_infinity_in_every_column(backend: Backend) -> None:
    """Blocks at or past nb are -inf, also in columns past the longest request."""
    call = random_call([(129, 130 - 2), (5, 5), (260, 1)], 2, seed=9)
    scores = scores_of(backend, call, columns=9)
    num_blocks = call.batch().num_blocks_per_query()
    past = torch.arange(9) >= num_blocks[:, None]
    assert bool((scores[:, past] == -torch.inf).all())
    assert bool(torch.isfinite(scores[:, ~past]).all())


def test_zero_is_plus_zero(backend: Backend) -> None:
    """Zero queries, zero scales and NaN scales all score +0.0."""
    call = random_call([(150, 20)], 1, seed=2)
    call.q.view(torch.uint8)[0:5] = 0x00
    call.q.view(torch.uint8)[5:10] = 0x80
    call.pages[:, 8192:][:, ::2] = 0x7F
    call.pages[:, 8192:][:, 1::2] = 0x80
    expected = torch.zeros(1, 20, 2)
    assert_same_bits(scores_of(backend, call), expected)


def test_of_an_empty_batch_are_empty(backend: Backend) -> None:
    """batch = 0 is legal, and so is a batch without a single query or key."""
    assert scores_of(backend, random_call([], 4)).shape == (4, 0, 0)
    assert scores_of(backend, random_call([(0, 0), (300, 0)], 4)).shape == (4, 0, 0)


def test_of_requests_that_share_pages(backend: Backend) -> None:
    """Block tables of several requests may name one page, and one table the same page twice."""
    call = random_call([(384, 10), (384, 10), (384, 10)], 2, seed=11)
    call.block_table[1] = call.block_table[0]
    call.block_table[2, 1] = call.block_table[2, 0]
    scores = scores_of(backend, call)
    assert_same_bits(scores, oracle_scores(call))


# Sentinels: a row's last local_blocks get 1e29, its first init_blocks 1e30, both get the former.

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
def test_ragged_batches_equal_the_oracle(backend: Backend, ragged: Lengths, forced: tuple[int, int]) -> None:
    """nb is each row's own, so the sentinels of a prefill move with its rows; more than nb is all."""
    call = random_call(ragged, 2, seed=4).forcing(*forced)
    assert_same_bits(scores_of(backend, call), oracle_scores(call))


@pytest.mark.parametrize("forced", [(0, 1), (0, 3), (17, 0), (15, 2), (16, 16), (1, 17)])
def test_prefills_across_many_blocks_equal_the_oracle(backend: Backend, forced: tuple[int, int]) -> None:
    """A backend that takes blocks in groups forces the blocks of rows whose nb ends in an earlier group."""
    lengths = [(128 * 19, 500), (128 * 34 + 7, 300), (128 * 66, 140)]
    if backend.name == simulated.NAME:
        lengths = [(128 * 19, 20), (128 * 34 + 7, 9)]
    call = random_call(lengths, 1, seed=5).forcing(*forced)
    expected = oracle_scores(call)
    assert_same_bits(scores_of(backend, call), expected)
    expected_ids = selected(expected, call.batch().num_blocks_per_query(), 16)
    assert_same_bits(selection_of(backend, call, 16), expected_ids)


def test_a_sentinel_hides_only_its_own_block(backend: Backend) -> None:
    """local_blocks = 1 changes the row's own block and no other cell."""
    call = random_call([(700, 300)], 4, seed=8)
    plain, forced = scores_of(backend, call), scores_of(backend, call.forcing(0, 1))
    own = (torch.arange(400, 700) // 128)[:, None] == torch.arange(6)
    assert bool((forced[:, own] == LOCAL).all())
    assert_same_bits(forced[:, ~own], plain[:, ~own])


def test_forced_blocks_are_selected_first(backend: Backend) -> None:
    """Score descending: init blocks, then local ones, then the best of the others; ties to the lower id."""
    call = random_call([(128 * 20, 2)], 1, seed=6).forcing(2, 3)
    best_others = scores_of(backend, call.forcing(0, 0))[0, :, 2:17].argsort(
        dim=1, descending=True, stable=True
    )
    selected = selection_of(backend, call, topk=8)[0]
    for row in range(2):
        assert selected[row].tolist() == [0, 1, 17, 18, 19, *(best_others[row, :3] + 2).tolist()]
