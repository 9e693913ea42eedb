"""The oracle behind the interface every backend has."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.backends.base import Order, Precision, ScaleChoice
from kernel.backends.reference.page_bytes import write_token
from kernel.backends.reference.quantizer import quantize_keys
from kernel.backends.reference.scorer import score_batch
from kernel.backends.reference.selection import best_blocks, in_block_order
from kernel.batch import ScoreBatch
from kernel.contract import BLOCK_TOKENS


class ReferenceBackend:
    """See :class:`kernel.backends.base.Backend`. Tensors are used in place through numpy views."""

    name = "reference"
    device = torch.device("cpu")
    precision: Precision = "exact"

    def __init__(self, scale_choice: ScaleChoice = "six") -> None:
        self._scale_choice: ScaleChoice = scale_choice

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantise keys to NVFP4 and scatter them into pages."""
        codes, scale_bytes = quantize_keys(float_values(keys), self._scale_choice)
        page_bytes = pages.numpy()
        for key, slot in enumerate(slots.tolist()):
            if slot >= 0:
                page, token = divmod(slot, BLOCK_TOKENS)
                write_token(page_bytes[page], token, codes[key], scale_bytes[key])

    def score_prefill(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """Score every row of the batch's requests."""
        score_batch(batch, scores.numpy())

    def score_decode(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """Score every row of the batch's requests."""
        score_batch(batch, scores.numpy())

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """Select each row's best blocks."""
        for head_scores, head_ids in zip(scores.numpy(), block_ids.numpy()):
            head_ids[:] = _selected(head_scores, num_blocks.numpy(), head_ids.shape[1], order)

    def select(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        """Score and select; rows of requests that are not in the batch are left alone.

        The scores are all made first, so memory grows with queries times context.
        """
        num_blocks = batch.num_blocks_per_query()
        shape = (batch.num_heads, batch.total_q, batch.num_score_blocks)
        scores = np.full(shape, -np.inf, dtype=np.float32)
        score_batch(batch, scores)
        for request in batch.requests:
            rows = slice(request.query_start, request.query_start + request.query_len)
            self.topk(torch.from_numpy(scores[:, rows]), num_blocks[rows], block_ids[:, rows], order)


def float_values(tensor: torch.Tensor) -> NDArray[np.float64]:
    """The values of a bfloat16, float16 or float32 tensor."""
    if tensor.dtype == torch.bfloat16:
        # A bfloat16 is the upper half of a float32.
        upper_half = tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return (upper_half << 16).view(np.float32).astype(np.float64)
    return tensor.numpy().astype(np.float64)


def _selected(
    scores: NDArray[np.float32], num_blocks: NDArray[np.int32], topk: int, order: Order
) -> NDArray[np.int32]:
    block_ids = best_blocks(scores, num_blocks, topk)
    return block_ids if order == "score" else in_block_order(block_ids)
