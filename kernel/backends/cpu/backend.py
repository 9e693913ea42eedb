"""The cpu backend: what :class:`kernel.backends.base.Backend` asks for, from the parts beside this file."""

from __future__ import annotations

import torch

from kernel.backends.base import Order, Precision, ScaleChoice
from kernel.backends.cpu.score import ScoreStream
from kernel.backends.cpu.topk import RunningTopk, select_topk
from kernel.batch import ScoreBatch
from kernel.contract import BLOCK_TOKENS
from kernel.errors import InvalidArgumentError
from kernel.nvfp4 import quantize_keys
from kernel.page import codes_of, scales_of


class CpuBackend:
    """Blocked float32 torch. Scores are within the ``exact`` bound whatever ``precision`` says.

    A call's workspace is some tens of MiB, whatever the context. Instances hold no state between calls and
    may be used from several threads.
    """

    name = "cpu"
    max_decode_queries = 0

    def __init__(self, precision: Precision = "exact", scale_choice: ScaleChoice = "six") -> None:
        self._scale_choice: ScaleChoice = scale_choice
        self.device = torch.device("cpu")
        self.precision: Precision = precision
        self._stream = ScoreStream()

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.insert`."""
        limit = pages.shape[0] * BLOCK_TOKENS
        if slots.numel() and int(slots.max()) >= limit:
            raise InvalidArgumentError(
                "slots", int(slots.max()), f"must be below {limit}", "use pages of this cache"
            )
        kept = slots >= 0
        if not bool(kept.all()):
            keys, slots = keys[kept], slots[kept]
        codes, scales = quantize_keys(keys, self._scale_choice)
        page_ids, tokens = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
        codes_of(pages)[page_ids, tokens] = codes
        scales_of(pages)[page_ids, tokens] = scales

    def score(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score`."""
        for chunk in self._stream.chunks(batch):
            rows = scores[:, chunk.tokens]
            end = 0
            for part in chunk.parts:
                end = part.first_block + part.scores.shape[0]
                rows[:, :, part.first_block : end] = part.scores.permute(2, 1, 0)
            rows[:, :, end:] = -torch.inf

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """See :meth:`kernel.backends.base.Backend.topk`."""
        select_topk(scores, num_blocks, block_ids, order)

    def select(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        """See :meth:`kernel.backends.base.Backend.select`."""
        heads, _, k = block_ids.shape
        for chunk in self._stream.chunks(batch):
            running = RunningTopk(chunk.num_blocks.repeat_interleave(heads), k)
            for part in chunk.parts:
                running.add(part.scores.flatten(1))
            block_ids[:, chunk.tokens] = running.block_ids(order).view(-1, heads, k).transpose(0, 1)
