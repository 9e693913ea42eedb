"""The gfx950 backend: each operation of :class:`kernel.backends.base.Backend` by FlyDSL kernels.

torch only allocates. ``select`` works through the batch in chunks whose scores take bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kernel.backends.base import Order, PlannedBackend, Precision
from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.launch import (
    DecodeLauncher,
    DeviceRequests,
    InsertLauncher,
    PrefillLauncher,
    TopkLauncher,
)
from kernel.backends.flydsl.runtime import Device
from kernel.batch import Request, ScoreBatch
from kernel.contract import BLOCK_TOKENS
from kernel.nvfp4 import build_lut
from kernel.plan import MAXIMA_BLOCKS
from kernel.step import Plan, PlanHeader, Step, host_plan, planned_batch

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


class FlydslBackend(PlannedBackend):
    """FlyDSL kernels on a gfx950, or on the simulated one.

    Args:
        name: ``flydsl`` or ``flydsl-sim``.
        device: where to launch.
        precision: either; the accumulation is fp32 and meets both bounds.

    Raises:
        DeviceUnavailableError: something is missing, or a setting is unknown.
    """

    max_decode_queries = 16
    max_device_rows = geometry.MAX_ROWS

    def __init__(self, name: str, device: Device, precision: Precision) -> None:
        self.name = name
        self.device = device.torch_device
        self.precision: Precision = precision
        self._prefill = PrefillLauncher(device)
        self._decode = DecodeLauncher(device, geometry.chosen_layout())
        self._insert = InsertLauncher(device)
        self._topk = TopkLauncher(device)
        self._lut = build_lut(self.device)

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.insert`."""
        self._insert(keys, pages, slots)

    def plan(self, step: Step) -> Plan:
        """See :meth:`kernel.backends.base.Backend.plan`."""
        return host_plan(step)

    def score_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score_plan`."""
        header = plan.header
        if header.max_query_len:
            scores.fill_(-torch.inf)  # rows of no request
            self._decode_step(plan, header, q, pages, scores, None, fill=True)
        else:
            self._score(planned_batch(plan, q, pages, self._lut)[1], scores)

    def select_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, block_ids: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.select_plan`."""
        header = plan.header
        order: Order = "block" if header.by_block else "score"
        k = block_ids.shape[2]
        if header.max_query_len:
            shape = (header.num_heads, header.total_q, header.num_score_blocks)
            scores, maxima = self._buffers(shape, k)
            self._decode_step(plan, header, q, pages, scores, maxima, fill=False)
            self._topk(scores, device_num_blocks(plan, header), block_ids, order, maxima)
            return
        batch = planned_batch(plan, q, pages, self._lut)[1]
        for rows, chunk in chunks(batch):
            scores, maxima = self._buffers((chunk.num_heads, chunk.total_q, chunk.num_score_blocks), k)
            self._score(chunk, scores, maxima, fill=False)
            self._topk(scores, plan.tensors[1][rows], block_ids[:, rows], order, maxima)

    def _buffers(self, shape: tuple[int, int, int], k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores, and their group maxima where rows are long enough to gain from them."""
        scores = torch.empty(shape, dtype=torch.float32, device=self.device)
        if shape[2] <= 2 * MAXIMA_BLOCKS * k:  # quicker scanned whole
            return scores, None
        groups = (*shape[:2], -(-shape[2] // MAXIMA_BLOCKS))
        return scores, torch.empty(groups, dtype=torch.float32, device=self.device)

    def _decode_step(
        self,
        plan: Plan,
        header: PlanHeader,
        q: torch.Tensor,
        pages: torch.Tensor,
        scores: torch.Tensor,
        maxima: torch.Tensor | None,
        *,
        fill: bool,
    ) -> None:
        """Scores requests whose lengths only the device knows."""
        forced = header.init_blocks, header.local_blocks
        batch = ScoreBatch(q, pages, plan.tensors[0], self._lut, (), *forced)
        self._decode.launch(batch, device_requests(plan, header), scores, maxima, fill=fill)

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """See :meth:`kernel.backends.base.Backend.topk`."""
        self._topk(scores, num_blocks, block_ids, order)

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


# ---- Lengths on the device: row maps by torch, launches that a graph captures ----


def device_requests(plan: Plan, header: PlanHeader) -> DeviceRequests:
    """The requests of a plan of device lengths, clamped as the contract of a plan says."""
    offsets, seq_lens = plan.tensors[1:]
    starts = offsets[:-1].clamp(0, header.total_q)
    queries = (offsets[1:].clamp(0, header.total_q) - starts).clamp(0, header.max_query_len)
    keys = seq_lens.clamp(0, header.num_score_blocks * BLOCK_TOKENS)
    missing = (queries - keys).clamp_min(0)  # queries that stand before the first key
    rows = torch.arange(seq_lens.shape[0], dtype=torch.int32, device=seq_lens.device)
    return DeviceRequests(rows, starts + missing, starts + queries, keys)


def device_num_blocks(plan: Plan, header: PlanHeader) -> torch.Tensor:
    """``nb`` of every query token, 0 for tokens of no request: ``[total_q]`` int32."""
    requests = device_requests(plan, header)
    tokens = torch.arange(header.total_q, dtype=torch.int32, device=requests.seq_lens.device)
    after = requests.query_ends - tokens[:, None]
    owned = (requests.query_starts <= tokens[:, None]) & (after > 0)
    blocks = ((requests.seq_lens - after) // BLOCK_TOKENS + 1) * owned
    return blocks.amax(1).to(torch.int32) if blocks.shape[1] else blocks.sum(1).to(torch.int32)
