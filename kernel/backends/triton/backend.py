"""The triton backend: plans a call, keeps its workspaces and launches the kernels on one GPU.

Short requests are decoded straight from their pages. Longer ones are cut into chunks whose keys are
dequantised to a workspace and scored tile by tile, see :mod:`kernel.backends.triton.plan`.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch

from kernel.backends.base import Order, Precision
from kernel.backends.triton.decode import MAX_ROWS, decode_table, score_requests
from kernel.backends.triton.insert import insert_keys
from kernel.backends.triton.plan import (
    GROUP_BLOCKS,
    DeviceChunk,
    PrefillTuning,
    chunks,
    device_chunk,
    splits_of,
    tuning_for,
)
from kernel.backends.triton.prefill import dequantize_pages, score_tiles
from kernel.backends.triton.topk import DecodeRows, select_decoded, select_grouped, select_scores
from kernel.batch import Request, ScoreBatch
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, MAX_SEQ_BLOCKS
from kernel.nvfp4 import build_lut

WORKSPACE_BLOCKS = MAX_SEQ_BLOCKS
"""Blocks of keys dequantised at a time: the longest context, 256 MiB as float16."""
_LARGE_DEVICE = 64 << 30
"""Bytes of memory of a GPU on which twice as many scores are kept."""


def score_groups(device: torch.device) -> int:
    """Groups of 16 scores kept for a selection: 256 MiB and 16 MiB of maxima, on a GPU of 64 GiB or more
    twice that. The rows of a selection are as many as fit, and a large GPU needs many to be busy."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= _LARGE_DEVICE
    return 1 << (23 if large else 22)


class Buffers:
    """Named device buffers, kept between calls: they grow to what a call needs, up to fixed limits.

    Their contents are dead when the next call begins; calls run one after another on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storage: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous buffer, unwritten."""
        size = math.prod(shape) * dtype.itemsize
        storage = self._storage.get(name)
        if storage is None or storage.numel() < size:
            self._storage.pop(name, None)
            storage = torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)
            self._storage[name] = storage
        return storage[:size].view(dtype).view(shape)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread for a while; nothing for the interpreter's CPU.

    Triton launches on the current device, on its current stream, wherever the arguments lie.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class TritonBackend:
    """Triton kernels on one GPU, whichever is the current one.

    ``exact`` multiplies E4M3 values widened to float16, ``fast`` multiplies them as they are, with the
    coarser accumulation of the hardware. Keeps workspaces between calls (at most 530 MiB, on a GPU of 64 GiB
    or more 800): calls run one after another, on one stream. No operation reads from the device.
    """

    name = "triton"
    max_decode_queries = 16

    def __init__(self, device: torch.device, precision: Precision = "exact") -> None:
        self.device = device
        self.precision: Precision = precision
        self.tuning = tuning_for(device)
        self.buffers = Buffers(device)
        self.score_groups = score_groups(device)
        self._planned: tuple[object, list[DeviceChunk]] | None = None
        self.decode_table = decode_table(build_lut(device), self.tuning.hopper)

    @property
    def prefill_tuning(self) -> PrefillTuning:
        """Launch parameters of this precision."""
        return self.tuning.prefill_exact if self.precision == "exact" else self.tuning.prefill_fast

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.insert`. A slot past the cache is skipped like a negative
        one."""
        with current_device(self.device):
            insert_keys(
                keys.contiguous(), pages, slots.contiguous(), ptx=self.tuning.ptx, hopper=self.tuning.hopper
            )

    def score(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score`."""
        short, long = self._by_length(batch)
        with current_device(self.device):
            if long.requests:
                keys: torch.Tensor | None = None
                for chunk in self.chunks(long, None):
                    keys = self.dequantized(long, chunk, keys)
                    self.score_chunk(long, chunk, keys, scores, None, None)
            if short.requests:
                starts = [request.query_start for request in short.requests]
                self._decode(batch, short.requests, starts, scores, grouped=False)

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """See :meth:`kernel.backends.base.Backend.topk`."""
        with current_device(self.device):
            select_scores(scores, num_blocks.contiguous(), block_ids, order)

    def select(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        """See :meth:`kernel.backends.base.Backend.select`."""
        short, long = self._by_length(batch)
        with current_device(self.device):
            self._select_prefill(long, block_ids, order)
            self._select_decode(batch, short.requests, block_ids, order)

    def _by_length(self, batch: ScoreBatch) -> tuple[ScoreBatch, ScoreBatch]:
        return batch.split_by_length(min(self.max_decode_queries, MAX_ROWS // batch.num_heads))

    def _select_prefill(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        keys: torch.Tensor | None = None
        for chunk in self.chunks(batch, self.score_groups):
            keys = self.dequantized(batch, chunk, keys)
            scores, maxima, row_info = self.score_buffers(chunk)
            self.score_chunk(batch, chunk, keys, scores, maxima, row_info)
            select_grouped(scores, maxima, row_info[0], row_info[1], chunk.rows, block_ids, order)

    def _select_decode(
        self, batch: ScoreBatch, requests: tuple[Request, ...], block_ids: torch.Tensor, order: Order
    ) -> None:
        while requests:
            groups = -(-max(request.num_blocks for request in requests) // GROUP_BLOCKS)
            starts: list[int] = []
            rows = 0
            for request in requests:
                if starts and (rows + request.query_len * batch.num_heads) * groups > self.score_groups:
                    break
                starts.append(rows // batch.num_heads)
                rows += request.query_len * batch.num_heads
            taken, requests = requests[: len(starts)], requests[len(starts) :]
            scores = self.buffers.take("scores", (groups, rows, GROUP_BLOCKS), torch.float32)
            decoded = self._decode(batch, taken, starts, scores, grouped=True)
            select_decoded(scores, decoded, block_ids, order, pdl=self.tuning.hopper)

    def chunks(self, batch: ScoreBatch, max_score_groups: int | None) -> list[DeviceChunk]:
        """The parts that a call is run in; those of a selection keep at most ``self.score_groups``.

        The last plan is kept, on the device: the layers of a model make the same call one after another.
        """
        shape = (batch.requests, batch.num_heads, batch.block_table.shape[1], max_score_groups)
        if self._planned is None or self._planned[0] != shape:
            plan = chunks(
                batch.requests,
                batch.num_heads,
                batch.block_table.shape[1],
                max_blocks=WORKSPACE_BLOCKS,
                max_score_groups=max_score_groups,
            )
            self._planned = (shape, [device_chunk(chunk, self.device) for chunk in plan])
        return self._planned[1]

    def score_buffers(self, chunk: DeviceChunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Buffers of grouped scores, their maxima and the rows of a chunk, for :func:`score_tiles`."""
        groups = -(-chunk.num_blocks // GROUP_BLOCKS)
        return (
            self.buffers.take("scores", (groups, chunk.rows, GROUP_BLOCKS), torch.float32),
            self.buffers.take("maxima", (groups, chunk.rows), torch.float32),
            self.buffers.take("row info", (2, chunk.rows), torch.int32),
        )

    def dequantized(self, batch: ScoreBatch, chunk: DeviceChunk, keys: torch.Tensor | None) -> torch.Tensor:
        """The chunk's keys, dequantised unless the previous chunk had the same."""
        if keys is not None and not chunk.keys_change:
            return keys
        blocks = chunk.table_cells.shape[0]
        dtype = torch.float16 if self.precision == "exact" else torch.uint8
        keys = self.buffers.take("keys", (blocks * BLOCK_TOKENS, HEAD_DIM), dtype)
        page_ids = batch.block_table.flatten()[chunk.table_cells]
        dequantize_pages(batch.pages, page_ids, batch.lut, keys, self.tuning.ptx)
        return keys

    def score_chunk(
        self,
        batch: ScoreBatch,
        chunk: DeviceChunk,
        keys: torch.Tensor,
        scores: torch.Tensor,
        maxima: torch.Tensor | None,
        row_info: torch.Tensor | None,
    ) -> None:
        """Score a chunk on its dequantised keys, see :func:`score_tiles`."""
        tuning = self.prefill_tuning
        score_tiles(
            batch.q.view(torch.uint8).view(-1, HEAD_DIM),
            keys,
            chunk.tiles,
            scores,
            maxima,
            row_info,
            num_heads=batch.num_heads,
            init_blocks=batch.init_blocks,
            local_blocks=batch.local_blocks,
            splits=splits_of(
                chunk.tiles.shape[0],
                chunk.num_blocks,
                self.tuning.multiprocessors,
                tuning.programs_per_multiprocessor,
            ),
            tuning=tuning,
            ptx=self.tuning.ptx,
            hopper=self.tuning.hopper,
        )

    def _decode(
        self,
        batch: ScoreBatch,
        requests: tuple[Request, ...],
        out_starts: list[int],
        scores: torch.Tensor,
        *,
        grouped: bool,
    ) -> DecodeRows:
        rows = DecodeRows.of(requests, out_starts, self.device)
        blocks = sum(request.num_blocks for request in requests)
        self.decode(batch, rows, scores, grouped=grouped, blocks=blocks)
        return rows

    def decode(
        self, batch: ScoreBatch, rows: DecodeRows, scores: torch.Tensor, *, grouped: bool, blocks: int
    ) -> None:
        """Scores requests of few queries, see :func:`kernel.backends.triton.decode.score_requests`."""
        exact = self.precision == "exact"
        score_requests(
            batch,
            self.decode_table,
            rows,
            scores,
            grouped=grouped,
            exact=exact,
            blocks=blocks,
            tuning=self.tuning,
        )
