"""The gfx950 backend: each operation of :class:`kernel.backends.base.Backend` by FlyDSL kernels.

torch only allocates. ``select`` works through the batch in chunks whose scores take bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kernel.backends.base import Order, Precision
from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.launch import (
    DecodeLauncher,
    InsertLauncher,
    PrefillLauncher,
    TopkLauncher,
)
from kernel.backends.flydsl.runtime import Device
from kernel.batch import Request, ScoreBatch
from kernel.plan import MAXIMA_BLOCKS

_CELLS = 1 << 26
"""Score cells of a chunk: 256 MiB."""


def chunks(batch: ScoreBatch) -> Iterator[tuple[slice, ScoreBatch]]:
    """Splits a batch so that the scores of a chunk take ``_CELLS`` cells at most, or are one query's.

    Returns:
        For each chunk its rows of ``q``, all of the batch's requests, and the batch of these rows.
    """
    run: list[Request] = []
    for request in _short_requests(batch):
        together = [*run, request]
        rows = sum(other.query_len for other in together)
        cells = batch.num_heads * rows * max(other.num_blocks for other in together)
        follows = not run or run[-1].query_start + run[-1].query_len == request.query_start
        if run and (cells > _CELLS or not follows):
            yield _chunk(batch, run)
            together = [request]
        run = together
    if run:
        yield _chunk(batch, run)


def _short_requests(batch: ScoreBatch) -> Iterator[Request]:
    """Requests with queries, split so that the scores of each take ``_CELLS`` cells at most."""
    for request in batch.requests:
        step = max(_CELLS // (batch.num_heads * max(request.num_blocks, 1)), 1)
        for first in range(0, request.query_len, step):
            queries = min(step, request.query_len - first)
            yield replace(
                request,
                query_start=request.query_start + first,
                query_len=queries,
                seq_len=request.prefix_len + first + queries,
            )


def _chunk(batch: ScoreBatch, requests: list[Request]) -> tuple[slice, ScoreBatch]:
    start, last = requests[0].query_start, requests[-1]
    rows = slice(start, last.query_start + last.query_len)
    moved = tuple(replace(request, query_start=request.query_start - start) for request in requests)
    return rows, replace(batch, q=batch.q[rows], requests=moved)


class FlydslBackend:
    """FlyDSL kernels on a gfx950, or on the simulated one.

    Args:
        name: ``flydsl`` or ``flydsl-sim``.
        device: where to launch.
        precision: either; the accumulation is fp32 and meets both bounds.

    Raises:
        DeviceUnavailableError: something is missing, or a setting is unknown.
    """

    max_decode_queries = 16

    def __init__(self, name: str, device: Device, precision: Precision) -> None:
        self.name = name
        self.device = device.torch_device
        self.precision: Precision = precision
        self._prefill = PrefillLauncher(device)
        self._decode = DecodeLauncher(device, geometry.chosen_layout())
        self._insert = InsertLauncher(device)
        self._topk = TopkLauncher(device)

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.insert`."""
        self._insert(keys, pages, slots)

    def score(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score`."""
        self._score(batch, scores)

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """See :meth:`kernel.backends.base.Backend.topk`."""
        self._topk(scores, num_blocks, block_ids, order)

    def select(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        """See :meth:`kernel.backends.base.Backend.select`."""
        num_blocks = batch.num_blocks_per_query().to(self.device)
        for rows, chunk in chunks(batch):
            shape = (chunk.num_heads, chunk.total_q, chunk.num_score_blocks)
            scores = torch.empty(shape, dtype=torch.float32, device=self.device)
            maxima = None
            if shape[2] > 2 * MAXIMA_BLOCKS * block_ids.shape[2]:  # shorter rows are quicker scanned whole
                groups = (*shape[:2], -(-shape[2] // MAXIMA_BLOCKS))
                maxima = torch.empty(groups, dtype=torch.float32, device=self.device)
            self._score(chunk, scores, maxima, fill=False)
            self._topk(scores, num_blocks[rows], block_ids[:, rows], order, maxima)

    def _score(
        self,
        batch: ScoreBatch,
        scores: torch.Tensor,
        maxima: torch.Tensor | None = None,
        *,
        fill: bool = True,
    ) -> None:
        """Scores requests of few query rows with the decode kernel, the others with prefill.

        Without ``fill``, cells past a request's blocks may stay unwritten.
        """
        short, long = batch.split_by_length(
            min(self.max_decode_queries, geometry.MAX_ROWS // batch.num_heads)
        )
        if short.requests:
            self._decode(short, scores, maxima, fill=fill)
        if long.requests:
            self._prefill(long, scores, maxima)
