"""The cpu backend's top-k against sorting rows one by one."""

from __future__ import annotations

import math

import pytest
import torch

from kernel.backends.base import Order
from kernel.backends.cpu import CpuBackend, topk
from tests.support.compare import assert_same_bits

SPECIAL = torch.tensor([0.0, -0.0, torch.nan, -torch.nan, -torch.inf, torch.inf, 1e29, 1e30, 1e-45, -1e-45])


def by_sorting(scores: torch.Tensor, num_blocks: torch.Tensor, k: int, order: Order) -> torch.Tensor:
    ids = torch.full((*scores.shape[:2], k), -1, dtype=torch.int32)
    for head in range(scores.shape[0]):
        for token in range(scores.shape[1]):
            row = scores[head, token, : int(num_blocks[token])].tolist()
            ranked = sorted(
                range(len(row)),
                key=lambda block: (math.inf if math.isnan(row[block]) else -row[block], block),
            )
            found = ranked[:k] if order == "score" else sorted(ranked[:k])
            ids[head, token, : len(found)] = torch.tensor(found, dtype=torch.int32)
    return ids


def rows_of_ties(heads: int, tokens: int, blocks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Few distinct scores, special values among them, and garbage past each row's blocks."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.cat((SPECIAL, torch.tensor([-3.0, -2.5, 1.0, 1.0000001, 2.0, 3e38, -3e38])))
    scores = values[torch.randint(0, len(values), (heads, tokens, blocks), generator=generator)]
    num_blocks = torch.randint(0, blocks + 1, (tokens,), generator=generator, dtype=torch.int32)
    return scores, num_blocks


@pytest.mark.parametrize("order", ["score", "block"])
@pytest.mark.parametrize("k", [1, 2, 15, 16, 17, 63, 64])
def test_ties_and_special_values(k: int, order: Order) -> None:
    scores, num_blocks = rows_of_ties(2, 30, 70, seed=k)
    ids = torch.full((2, 30, k), -7, dtype=torch.int32)
    CpuBackend().topk(scores, num_blocks, ids, order)
    assert_same_bits(ids, by_sorting(scores, num_blocks, k, order))


def test_cells_past_the_blocks_are_not_read() -> None:
    scores, num_blocks = rows_of_ties(4, 20, 40, seed=1)
    results = []
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        filled = scores.where(torch.arange(40) < num_blocks[:, None], garbage)
        ids = torch.full((4, 20, 16), -7, dtype=torch.int32)
        CpuBackend().topk(filled, num_blocks, ids, "score")
        results.append(ids)
    assert all(torch.equal(ids, results[0]) for ids in results)


def test_rows_of_minus_infinity_still_have_their_blocks() -> None:
    scores = torch.full((1, 2, 5), -torch.inf)
    scores[0, 1] = torch.nan
    ids = torch.empty((1, 2, 6), dtype=torch.int32)
    CpuBackend().topk(scores, torch.tensor([3, 5], dtype=torch.int32), ids, "score")
    assert ids.tolist() == [[[0, 1, 2, -1, -1, -1], [0, 1, 2, 3, 4, -1]]]


@pytest.mark.parametrize("order", ["score", "block"])
def test_strided_scores_and_ids_in_chunks(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    monkeypatch.setattr(topk, "_CHUNK_CELLS", 97)
    scores, num_blocks = rows_of_ties(4, 33, 50, seed=2)
    wide_scores = torch.full((33, 4, 80), torch.nan)
    wide_scores[..., :50] = scores.transpose(0, 1)
    wide_ids = torch.full((33, 2, 4, 40), -7, dtype=torch.int32)
    ids = wide_ids[:, 1, :, 4:36:2].transpose(0, 1)
    CpuBackend().topk(wide_scores.transpose(0, 1), num_blocks, ids, order)
    assert_same_bits(ids, by_sorting(scores, num_blocks, 16, order))
    untouched = wide_ids.clone()
    untouched[:, 1, :, 4:36:2] = -7
    assert bool((untouched == -7).all())


@pytest.mark.parametrize("shape", [(4, 0, 8), (1, 3, 0), (2, 3, 8)])
def test_rows_without_blocks(shape: tuple[int, int, int]) -> None:
    ids = torch.full((*shape[:2], 16), -7, dtype=torch.int32)
    CpuBackend().topk(torch.zeros(shape), torch.zeros(shape[1], dtype=torch.int32), ids, "block")
    assert bool((ids == -1).all())


@pytest.mark.parametrize("pending", [7, 16, 256])
def test_running_selection(monkeypatch: pytest.MonkeyPatch, pending: int) -> None:
    monkeypatch.setattr(topk, "_PENDING_BLOCKS", pending)
    scores, num_blocks = rows_of_ties(1, 40, 100, seed=3)
    num_blocks[0] = 100
    running = topk.RunningTopk(num_blocks, 16)
    for columns in torch.split(scores[0], 7, dim=1):
        running.add(columns.t())
    assert_same_bits(running.block_ids("score")[None], by_sorting(scores, num_blocks, 16, "score"))
