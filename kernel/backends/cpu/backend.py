"""The cpu backend: what :class:`kernel.backends.base.Backend` asks for, from the parts beside this file."""

from __future__ import annotations

import torch

from kernel.backends.base import Order, Precision
from kernel.backends.cpu.score import Scorer
from kernel.backends.cpu.topk import RunningTopk, select_topk
from kernel.batch import ScoreBatch
from kernel.errors import InvalidArgumentError
from kernel.nvfp4 import quantize_keys
from kernel.page import BLOCK_TOKENS, codes_of, scales_of


class CpuBackend:
    """Blocked float32 torch. Scores are within the ``exact`` bound whatever ``precision`` says.

    A call's workspace is some tens of MiB, whatever the context. Instances hold no state between calls and
    may be used from several threads.
    """

    name = "cpu"

    def __init__(self, precision: Precision = "exact") -> None:
        self.device = torch.device("cpu")
        self.precision: Precision = precision
        self._scorer = Scorer()

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
        codes, scales = quantize_keys(keys)
        page_ids, tokens = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
        codes_of(pages)[page_ids, tokens] = codes
        scales_of(pages)[page_ids, tokens] = scales

    def score_prefill(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score_prefill`."""
        for request in batch.requests:
            rows = scores[:, request.query_start : request.query_start + request.query_len]
            rows[:, :, request.num_blocks :] = -torch.inf
            for part in self._scorer.parts(batch, request):
                rows[:, part.tokens, part.blocks] = part.scores.permute(2, 1, 0)

    score_decode = score_prefill
    """One path: a row's bits are the same because the code is."""

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """See :meth:`kernel.backends.base.Backend.topk`."""
        select_topk(scores, num_blocks, block_ids, order)

    def select(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        """See :meth:`kernel.backends.base.Backend.select`."""
        for request in batch.requests:
            rows = block_ids[:, request.query_start : request.query_start + request.query_len]
            running: RunningTopk | None = None
            for part in self._scorer.parts(batch, request):
                if part.blocks.start == 0:
                    running = RunningTopk(part.scores.shape[1] * part.scores.shape[2], block_ids.shape[2])
                assert running is not None  # noqa: S101 - parts start at block 0
                running.add(part.scores.flatten(1), part.num_blocks_of_rows, part.blocks.start)
                if part.is_last:
                    ids = running.block_ids(order).view(*part.scores.shape[1:], -1)
                    rows[:, part.tokens] = ids.transpose(0, 1)
