"""The triton backend: plans a step and launches the kernels on one GPU.

Short requests are decoded straight from their pages. Longer ones are cut into chunks whose keys are
dequantised to a workspace and scored tile by tile, see :mod:`kernel.backends.triton.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.backends.base import Order, PlannedBackend, Precision
from kernel.backends.triton.check import call_values
from kernel.backends.triton.decode import decode_table, score_requests
from kernel.backends.triton.insert import insert_keys
from kernel.backends.triton.launch import ALIGNMENT, Launches
from kernel.backends.triton.plan import (
    GROUP_BLOCKS,
    MAX_ROWS,
    PrefillTuning,
    chunks,
    splits_of,
    tuning_for,
)
from kernel.backends.triton.prefill import dequantize_pages, score_tiles
from kernel.backends.triton.topk import (
    MANY_DECODED_ROWS,
    DecodeRows,
    select_decoded,
    select_grouped,
    select_scores,
)
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, MAX_SEQ_BLOCKS
from kernel.nvfp4 import build_lut
from kernel.step import DeviceLengths, Lengths, Plan, PlanHeader, Step, uploaded

WORKSPACE_BLOCKS = MAX_SEQ_BLOCKS
"""Blocks of keys dequantised at a time: the longest context, 256 MiB as float16."""
_KEPT_SELECTIONS = 64
"""Shapes whose selections from given scores are kept."""
_LARGE_DEVICE = 64 << 30
"""Bytes of memory of a GPU on which twice as many scores are kept."""


def score_groups(device: torch.device) -> int:
    """Groups of 16 scores kept for a selection: 256 MiB and 16 MiB of maxima, on a GPU of 64 GiB or more
    twice that. The rows of a selection are as many as fit, and a large GPU needs many to be busy."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= _LARGE_DEVICE
    return 1 << (23 if large else 22)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread for a while; nothing for the interpreter's CPU.

    Triton launches on the current device, on its current stream, wherever the arguments lie.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


class TritonBackend(PlannedBackend):
    """Triton kernels on one GPU, whichever is the current one.

    ``exact`` multiplies E4M3 values widened to float16, ``fast`` multiplies them as they are, with the
    coarser accumulation of the hardware. Workspaces are allocated by torch for a run and released after it,
    at most 530 MiB, on a GPU of 64 GiB or more 800. No operation reads from the device.
    """

    name = "triton"
    max_device_rows = MAX_ROWS

    def __init__(self, device: torch.device, precision: Precision = "exact") -> None:
        self.device = device
        self.precision: Precision = precision
        self.tuning = tuning_for(device)
        self.max_decode_queries = self.tuning.decode_queries
        self.score_groups = score_groups(device)
        self.lut = build_lut(device)
        self._topk: dict[tuple[object, ...], Launches] = {}
        self.decode_table = decode_table(self.lut, self.tuning.hopper)

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

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """See :meth:`kernel.backends.base.Backend.topk`."""
        if not scores.numel():
            block_ids.fill_(-1)
            return
        given = scores, num_blocks.contiguous(), block_ids
        shapes = (*scores.shape, *scores.stride(), *block_ids.shape, *block_ids.stride())
        key = (order, *shapes, *[tensor.data_ptr() % ALIGNMENT for tensor in given])
        with current_device(self.device):
            launches = self._topk.get(key)
            if launches is None:
                launches = Launches(self.device, given)
                select_scores(launches, *given, order)
                if len(self._topk) >= _KEPT_SELECTIONS:
                    self._topk.clear()
                self._topk[key] = launches
            launches(*given)

    def call_values(
        self,
        q: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        num_pages: int,
    ) -> torch.Tensor:
        """See :meth:`kernel.backends.base.Backend.call_values`."""
        with current_device(self.device):
            return call_values(
                q, block_table.contiguous(), cu_seqlens_q.contiguous(), seq_lens.contiguous(), num_pages
            )

    # ---- Plans ----
    #
    # numbers: how many decode parts and prefill chunks, the fields of each part, the fields of each chunk
    # tensors: block table, nb of every token, the five row maps of each part and what it knows of each row,
    #          tiles and table cells of each chunk; of lengths on the device only the table, the lengths and
    #          the row numbers

    def plan(self, step: Step) -> Plan:
        """See :meth:`kernel.backends.base.Backend.plan`."""
        lengths = step.lengths
        if isinstance(lengths, DeviceLengths):
            table_rows = torch.arange(lengths.seq_lens.shape[0], dtype=torch.int32, device=self.device)
            return Plan.of(step, (), (lengths.cu_seqlens_q, lengths.seq_lens, table_rows))
        short = self.tuning.decoded(lengths, step.num_heads, self.max_decode_queries)
        parts = list(self._decode_parts(lengths[short & (lengths.query_lens > 0)], step.num_heads))
        prefill = list(
            chunks(
                lengths[~short],
                step.num_heads,
                step.block_table.shape[1],
                max_blocks=WORKSPACE_BLOCKS,
                max_score_groups=self.score_groups,
            )
        )
        numbers = [len(parts), len(prefill)]
        num_blocks = lengths.blocks_per_query(step.total_q)
        arrays: list[NDArray[Any]] = [num_blocks]
        for part in parts:
            ends = np.cumsum(part.query_lens)
            # Requests without rows fill each row map up to an aligned length.
            maps = np.zeros((5, -(-len(part) // 4) * 4), dtype=np.int32)
            maps[0, : len(part)] = part.table_rows
            maps[1, : len(part)] = part.query_starts
            maps[2, : len(part)] = part.query_starts + part.query_lens
            maps[3, : len(part)] = part.seq_lens
            maps[4, : len(part)] = ends - part.query_lens
            arrays += [maps, _row_info(part, num_blocks, step.num_heads)]
            most = int(part.query_lens.max())
            numbers += [most, part.max_blocks, int(part.num_blocks.sum()), int(ends[-1])]
        for chunk in prefill:
            splits = splits_of(
                chunk.tiles.shape[0],
                chunk.num_blocks,
                self.tuning.multiprocessors,
                self.prefill_tuning.programs_per_multiprocessor,
            )
            arrays += [chunk.tiles, chunk.table_cells if chunk.keys_change else chunk.table_cells[:0]]
            numbers += [chunk.rows, chunk.num_blocks, splits]
        return Plan.of(step, numbers, uploaded(arrays, self.device))

    def _decode_parts(self, lengths: Lengths, num_heads: int) -> Iterator[Lengths]:
        """Splits requests so that the scores of each part fit the score buffer, or are one request's."""
        while len(lengths):
            groups = -(-lengths.max_blocks // GROUP_BLOCKS)
            rows = np.cumsum(lengths.query_lens) * num_heads
            fit = max(int(np.searchsorted(rows * groups, self.score_groups, side="right")), 1)
            yield lengths[:fit]
            lengths = lengths[fit:]

    def score_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score_plan`."""
        if not q.shape[0] or not scores.shape[2]:
            return
        if plan.header.max_query_len:
            scores.fill_(-torch.inf)  # rows of no request
        self._run(plan, self._add_score, q, pages, scores)

    def _add_score(
        self, launches: Launches, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor
    ) -> None:
        for rows in self._decode_rows(plan):
            # The rows lie where they lie in q, not one after another.
            in_q = replace(rows, out_starts=rows.query_starts)
            self._decode(launches, q, pages, plan, in_q, scores, False)
        for chunk, keys in self._prefill_chunks(launches, plan, pages):
            self._score_chunk(launches, q, plan.header, chunk, keys, scores, None, None)

    def select_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, block_ids: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.select_plan`."""
        if not q.shape[0]:
            return
        if plan.header.max_query_len and not plan.tensors[2].shape[0]:
            block_ids.fill_(-1)  # rows of no request
            return
        self._run(plan, self._add_select, q, pages, block_ids)

    def _add_select(
        self, launches: Launches, plan: Plan, q: torch.Tensor, pages: torch.Tensor, block_ids: torch.Tensor
    ) -> None:
        heads, by_block = plan.header.num_heads, bool(plan.header.by_block)
        for rows in self._decode_rows(plan):
            launches.used = 0
            groups = -(-rows.num_blocks // GROUP_BLOCKS)
            scores = launches.empty((groups, rows.tokens * heads, GROUP_BLOCKS))
            self._decode(launches, q, pages, plan, rows, scores, True)
            select_decoded(launches, scores, rows, block_ids, by_block, pdl=self.tuning.hopper)
        for chunk, keys in self._prefill_chunks(launches, plan, pages):
            groups = -(-chunk.num_blocks // GROUP_BLOCKS)
            scores = launches.empty((groups, chunk.rows, GROUP_BLOCKS))
            maxima = launches.empty((groups, chunk.rows))
            row_info = launches.empty((2, chunk.rows), torch.int32)
            self._score_chunk(launches, q, plan.header, chunk, keys, scores, maxima, row_info)
            of_rows = row_info[0], row_info[1], chunk.rows
            select_grouped(launches, scores, maxima, *of_rows, block_ids, by_block)

    def _run(
        self,
        plan: Plan,
        add: Callable[[Launches, Plan, torch.Tensor, torch.Tensor, torch.Tensor], None],
        q: torch.Tensor,
        pages: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Run the launches that ``add`` makes at the first run of a plan on such tensors."""
        given = q.view(torch.uint8), pages, out, plan.tensors[0]
        alignments = [tensor.data_ptr() % ALIGNMENT for tensor in given]
        key = (add.__name__, self.precision, *alignments, *plan.key(pages, out))
        with current_device(self.device):
            launches = plan.runs.get(key)
            if launches is None:
                launches = Launches(self.device, given)
                add(launches, plan, *given[:3])
                plan.keep(key, launches)
            launches(*given)

    def _decode_rows(self, plan: Plan) -> Iterator[DecodeRows]:
        """The decode parts of a plan."""
        header, numbers = plan.header, plan.own_numbers
        if header.max_query_len:
            offsets, seq_lens, table_rows = plan.tensors[1:]
            starts, most = offsets[:-1], header.num_score_blocks
            total = seq_lens.shape[0] * most
            ends = offsets[1:]
            if seq_lens.shape[0] and most:
                yield DecodeRows(
                    table_rows,
                    starts,
                    ends,
                    seq_lens,
                    starts,
                    header.max_query_len,
                    most,
                    total,
                    header.total_q,
                )
            return
        for part in range(numbers[0]):
            maps, row_info = plan.tensors[2 + 2 * part : 4 + 2 * part]
            table_rows, starts, ends, seq_lens, out_starts = maps.unbind()
            most, num_blocks, total, tokens = numbers[2 + 4 * part : 6 + 4 * part]
            yield DecodeRows(
                table_rows, starts, ends, seq_lens, out_starts, most, num_blocks, total, tokens, row_info
            )

    def _prefill_chunks(
        self, launches: Launches, plan: Plan, pages: torch.Tensor
    ) -> Iterator[tuple[_RunChunk, torch.Tensor]]:
        """The prefill chunks of a plan, each with its keys, dequantised."""
        if plan.header.max_query_len:
            return
        numbers = plan.own_numbers
        tensors, fields = plan.tensors[2 + 2 * numbers[0] :], numbers[2 + 4 * numbers[0] :]
        dtype = torch.float16 if self.precision == "exact" else torch.uint8
        keys, end_of_keys = None, 0
        for at in range(numbers[1]):
            tiles, table_cells = tensors[2 * at : 2 * at + 2]
            blocks = table_cells.shape[0]
            launches.used = end_of_keys
            if keys is None or blocks:
                launches.used = 0
                keys = launches.empty((blocks * BLOCK_TOKENS, HEAD_DIM), dtype)
                end_of_keys = launches.used
                dequantize_pages(
                    launches, pages, plan.tensors[0], table_cells, self.lut, keys, self.tuning.ptx
                )
            yield _RunChunk(tiles, *fields[3 * at : 3 * at + 3]), keys

    def _score_chunk(
        self,
        launches: Launches,
        q: torch.Tensor,
        header: PlanHeader,
        chunk: _RunChunk,
        keys: torch.Tensor,
        scores: torch.Tensor,
        maxima: torch.Tensor | None,
        row_info: torch.Tensor | None,
    ) -> None:
        """Score a chunk on its dequantised keys, see :func:`score_tiles`."""
        score_tiles(
            launches,
            q,
            keys,
            chunk.tiles,
            scores,
            maxima,
            row_info,
            num_heads=header.num_heads,
            init_blocks=header.init_blocks,
            local_blocks=header.local_blocks,
            splits=chunk.splits,
            tuning=self.prefill_tuning,
            ptx=self.tuning.ptx,
            hopper=self.tuning.hopper,
        )

    def _decode(
        self,
        launches: Launches,
        q: torch.Tensor,
        pages: torch.Tensor,
        plan: Plan,
        rows: DecodeRows,
        scores: torch.Tensor,
        grouped: bool,
    ) -> None:
        """Scores requests of few queries, see :func:`kernel.backends.triton.decode.score_requests`."""
        header = plan.header
        score_requests(
            launches,
            q,
            pages,
            plan.tensors[0],
            self.decode_table,
            rows,
            scores,
            grouped=grouped,
            exact=self.precision == "exact",
            init_blocks=header.init_blocks,
            local_blocks=header.local_blocks,
            tuning=self.tuning,
        )


def _row_info(part: Lengths, num_blocks: NDArray[np.int32], num_heads: int) -> NDArray[np.int32]:
    """``nb`` and the number in ``q`` of each row of a decode part, ``[2, rows]``; no columns where the rows
    are few, and the selection works them out."""
    tokens = int(part.query_lens.sum())
    if tokens * num_heads < MANY_DECODED_ROWS:
        return np.zeros((2, 0), dtype=np.int32)
    skipped = np.cumsum(part.query_lens) - part.query_lens
    token = np.repeat(part.query_starts - skipped, part.query_lens) + np.arange(tokens)
    rows = (token * num_heads)[:, None] + np.arange(num_heads)
    return np.stack((np.repeat(num_blocks[token], num_heads), rows.reshape(-1).astype(np.int32)))


@dataclass(frozen=True)
class _RunChunk:
    """A prefill chunk of a plan."""

    tiles: torch.Tensor
    rows: int
    num_blocks: int
    splits: int
