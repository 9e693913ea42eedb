"""The gfx950 backend: what :class:`kernel.backends.base.Backend` asks for.

Every operation is a FlyDSL kernel: torch only allocates.
"""

from __future__ import annotations

import torch

from kernel.backends.base import Order, Precision
from kernel.backends.flydsl import decode_layout
from kernel.backends.flydsl.insert_launch import InsertLauncher
from kernel.backends.flydsl.launch import PrefillLauncher
from kernel.backends.flydsl.pieces import pieces
from kernel.backends.flydsl.runtime import Device
from kernel.backends.flydsl.score_decode_launch import DecodeLauncher, by_rows
from kernel.backends.flydsl.topk_launch import TopkLauncher
from kernel.batch import ScoreBatch
from kernel.plan import MAXIMA_BLOCKS


class FlydslBackend:
    """FlyDSL kernels on a gfx950, or on the simulated one.

    Args:
        name: ``flydsl`` or ``flydsl-sim``.
        device: where to launch.
        precision: either; the accumulation is fp32 and meets both bounds.

    Raises:
        DeviceUnavailableError: what is missing, or a setting that there is not.
    """

    def __init__(self, name: str, device: Device, precision: Precision) -> None:
        self.name = name
        self.device = device.torch_device
        self.precision: Precision = precision
        self._prefill = PrefillLauncher(device)
        self._decode = DecodeLauncher(device, decode_layout.chosen())
        self._insert = InsertLauncher(device)
        self._topk = TopkLauncher(device)

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.insert`."""
        self._insert(keys, pages, slots)

    def score_prefill(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score_prefill`."""
        self._prefill(batch, scores)

    def score_decode(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score_decode`."""
        self._score(batch, scores)

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """See :meth:`kernel.backends.base.Backend.topk`."""
        self._topk(scores, num_blocks, block_ids, order)

    def select(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        """See :meth:`kernel.backends.base.Backend.select`."""
        num_blocks = batch.num_blocks_per_query().to(self.device)
        for rows, piece in pieces(batch):
            shape = (piece.num_heads, piece.total_q, piece.num_score_blocks)
            scores = torch.empty(shape, dtype=torch.float32, device=self.device)
            maxima = None
            if (
                shape[2] > 2 * MAXIMA_BLOCKS * block_ids.shape[2]
            ):  # else the scores are quicker read themselves
                groups = (*shape[:2], -(-shape[2] // MAXIMA_BLOCKS))
                maxima = torch.empty(groups, dtype=torch.float32, device=self.device)
            self._score(piece, scores, maxima, fill=False)
            self._topk(scores, num_blocks[rows], block_ids[:, rows], order, maxima)

    def _score(
        self,
        batch: ScoreBatch,
        scores: torch.Tensor,
        maxima: torch.Tensor | None = None,
        *,
        fill: bool = True,
    ) -> None:
        """Requests of few query rows by the decode kernel, the others by prefill.

        Without ``fill`` cells past a request's blocks may stay as they were.
        """
        few, many = by_rows(batch)
        if few.requests:
            self._decode(few, scores, maxima, fill=fill)
        if many.requests:
            self._prefill(many, scores, maxima)
