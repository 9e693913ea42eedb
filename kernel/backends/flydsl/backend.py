"""The gfx950 backend: what :class:`kernel.backends.base.Backend` asks for.

Scores of prefill and decode come from the prefill kernel. Insert and top-k have no gfx950 kernel yet: they
are the torch operations of the cpu backend on this device's tensors, exact and slower than a kernel would be.
"""

from __future__ import annotations

import torch

from kernel.backends.base import Order, Precision
from kernel.backends.cpu import CpuBackend
from kernel.backends.cpu.topk import select_topk
from kernel.backends.flydsl.launch import PrefillLauncher
from kernel.backends.flydsl.runtime import Device
from kernel.backends.flydsl.selection import pieces, select_from_maxima
from kernel.batch import ScoreBatch
from kernel.plan import MAXIMA_BLOCKS


class FlydslBackend:
    """FlyDSL kernels on a gfx950, or on the simulated one.

    Args:
        name: ``flydsl`` or ``flydsl-sim``.
        device: where to launch.
        precision: either; the accumulation is fp32 and meets both bounds.

    Raises:
        DeviceUnavailableError: what is missing.
    """

    def __init__(self, name: str, device: Device, precision: Precision) -> None:
        self.name = name
        self.device = device.torch_device
        self.precision: Precision = precision
        self._score = PrefillLauncher(device)
        self._torch = CpuBackend(precision)

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.insert`."""
        self._torch.insert(keys, pages, slots)

    def score_prefill(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score_prefill`."""
        self._score(batch, scores)

    score_decode = score_prefill
    """One kernel: the same bits, though a tile of few rows leaves most of the matrix unit's work unused."""

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """See :meth:`kernel.backends.base.Backend.topk`."""
        select_topk(scores, num_blocks, block_ids, order)

    def select(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        """See :meth:`kernel.backends.base.Backend.select`."""
        num_blocks = batch.num_blocks_per_query().to(self.device)
        for rows, piece in pieces(batch):
            shape = (piece.num_heads, piece.total_q, piece.num_score_blocks)
            scores = torch.empty(shape, dtype=torch.float32, device=self.device)
            groups = (*shape[:2], -(-shape[2] // MAXIMA_BLOCKS))
            maxima = torch.empty(groups, dtype=torch.float32, device=self.device)
            self._score(piece, scores, maxima)
            select_from_maxima(scores, maxima, num_blocks[rows], block_ids[:, rows], order)
