"""Top-k by the contract's sentence, one row at a time in plain Python: it checks the oracle's as well."""

from __future__ import annotations

import math

import torch


def selected_row(scores: list[float], num_blocks: int, topk: int) -> list[int]:
    """Score descending, ties to the lower id, NaN as -inf, -1 where there are fewer than ``topk`` blocks."""

    def score(block: int) -> float:
        return -math.inf if math.isnan(scores[block]) else scores[block]

    best = sorted(range(num_blocks), key=lambda block: (-score(block), block))[:topk]
    return best + [-1] * (topk - len(best))


def selected(scores: torch.Tensor, num_blocks: torch.Tensor, topk: int) -> torch.Tensor:
    """Block ids ``[H, total_q, topk]`` of scores ``[H, total_q, S]``."""
    rows = [
        [selected_row(row, nb, topk) for row, nb in zip(head, num_blocks.tolist(), strict=True)]
        for head in scores.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int32).view(*scores.shape[:2], topk)


def in_block_order(block_ids: torch.Tensor) -> torch.Tensor:
    """The same set ascending, -1 last."""
    rows = [
        sorted(block for block in row if block >= 0) + [-1] * row.count(-1)
        for row in block_ids.flatten(0, 1).tolist()
    ]
    return torch.tensor(rows, dtype=torch.int32).view(block_ids.shape)
