"""What a backend is."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from kernel.batch import ScoreBatch

Precision = Literal["exact", "fast"]
"""``exact``: score error at most ``2^-16 * sum_i |q_i k_i|``. ``fast``: ``2^-9`` of it."""
Order = Literal["score", "block"]
"""Order of a row's block ids: score descending, or block id ascending; ``-1`` last in both."""

ScaleChoice = Literal["six", "four_over_six"]
"""How insert chooses a group's scale. ``six``: amax/6, the contract. ``four_over_six``: amax/4 where the
group's largest error, as it is scored, is then strictly smaller. Pages of either are read alike."""

SCORE_TOLERANCE: dict[Precision, float] = {"exact": 2.0**-16, "fast": 2.0**-9}
"""Largest score error allowed, in units of ``sum_i |q_i k_i|``."""


class Backend(Protocol):
    """Operations on checked arguments. Every output tensor is given by the caller and written in place."""

    name: str
    device: torch.device
    precision: Precision
    max_decode_queries: int
    """Queries up to which a request is decoded: scored by a kernel that reads its pages once and is bound by
    memory, where its heads' rows fit that kernel. 0 for a backend with one path. Either path gives the same
    bits."""

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantise keys to NVFP4 and scatter them into pages.

        Args:
            keys: ``[n, 128]`` float32, bfloat16 or float16, finite.
            pages: ``[num_pages, 9216]`` uint8, written in place.
            slots: ``[n]`` int64, ``page_id * 128 + token``; a negative slot is skipped. Distinct.
        """
        ...

    def score(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """Score every row of the batch's requests.

        ``score = max over the causal tokens of the block of q . k``; sentinels as the contract has them;
        ``-inf`` at and past the row's ``nb``.

        Args:
            batch: the call.
            scores: ``[H, total_q, S]`` float32, any strides with ``stride(2) == 1``; all ``S`` cells of a
                row of the batch's requests are written, other rows are left alone.
        """
        ...

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """Select each row's best blocks: score descending, ties to the lower id, NaN as ``-inf``.

        Args:
            scores: ``[H, total_q, S]`` float32; only the first ``num_blocks`` cells of a row are read.
            num_blocks: ``[total_q]`` int32, at most ``S``.
            block_ids: ``[H, total_q, k]`` int32, written; ``-1`` where a row has fewer than ``k`` blocks.
            order: see :data:`Order`.
        """
        ...

    def select(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        """Score and select without a score buffer: the ids that score and :meth:`topk` would give.

        Rows of requests that are not in the batch are left alone. Memory does not grow with the context,
        but for the oracle's.
        """
        ...
