"""What a scoring call gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernel.backends.base import Precision


@dataclass(frozen=True, eq=False)
class ScoreResult:
    """Selected blocks of every row, on the scorer's device.

    Attributes:
        block_ids: ``[H, total_q, k]`` int32, logical blocks of the row's request (not pages); -1 where a row
            has fewer than ``k`` blocks.
        scores: ``[H, total_q, S]`` float32, ``-inf`` at and past a row's ``nb``; None when not asked for.
        num_blocks: ``[total_q]`` int32, the causal blocks ``nb`` of each query token.
        backend: name of the backend that ran.
        precision: its precision.
        timings: seconds of each stage of the call, in order.
    """

    block_ids: torch.Tensor
    scores: torch.Tensor | None
    num_blocks: torch.Tensor
    backend: str
    precision: Precision
    timings: Mapping[str, float]
