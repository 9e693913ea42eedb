"""The gfx950 backend: each operation of :class:`kernel.backends.base.Backend` by FlyDSL kernels.

A plan holds what the launches of a run read; a run launches, and torch only allocates. ``select`` works
through the query tokens in chunks whose scores take bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from kernel.backends.base import Order, PlannedBackend, Precision
from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.geometry import OPERAND_BYTES
from kernel.backends.flydsl.launch import (
    DecodeLauncher,
    DeviceRequests,
    InsertLauncher,
    PrefillLauncher,
    Run,
    TopkLauncher,
    request_fields,
)
from kernel.backends.flydsl.runtime import Device
from kernel.batch import ScoreBatch
from kernel.nvfp4 import build_lut
from kernel.plan import MAXIMA_BLOCKS
from kernel.step import DeviceLengths, Lengths, Plan, Step, uploaded

_CELLS = 1 << 26
"""Score cells of a chunk: 256 MiB."""
_CHUNK_NUMBERS = 4
"""Numbers of a plan for each chunk."""
_GROUPED_BLOCKS = 2 * MAXIMA_BLOCKS
"""Blocks of a row, for each id selected, up to which scanning the row is quicker than its groups."""


def chunks(lengths: Lengths, num_heads: int) -> Iterator[Lengths]:
    """Splits requests, and long ones between queries, into chunks of consecutive query tokens.

    The scores of a chunk take ``_CELLS`` cells at most, or are one query's.
    """
    lengths = _short_requests(lengths, num_heads)
    ends = lengths.query_starts + lengths.query_lens
    first = 0
    while first < len(lengths):
        rest = lengths[first:]
        cells = num_heads * np.cumsum(rest.query_lens) * np.maximum.accumulate(rest.num_blocks)
        parted = cells > _CELLS
        parted[1:] |= rest.query_starts[1:] != ends[first:-1]
        parted[0] = False
        size = int(np.argmax(parted)) or len(rest)
        yield rest[:size]
        first += size


def _short_requests(lengths: Lengths, num_heads: int) -> Lengths:
    """Requests with queries, split so that the scores of each take ``_CELLS`` cells at most."""
    longest = np.maximum(_CELLS // (num_heads * np.maximum(lengths.num_blocks, 1)), 1)
    parts = -(-lengths.query_lens // longest)
    owner = np.repeat(np.arange(len(lengths)), parts)
    first = (np.arange(owner.size) - (np.cumsum(parts) - parts)[owner]) * longest[owner]
    of = lengths[owner]
    queries = np.minimum(of.query_lens - first, longest[owner])
    return Lengths(of.table_rows, of.query_starts + first, queries, of.prefix_lens + first + queries)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Query tokens of a plan that are scored together.

    Attributes:
        first: the first of them, in ``q``.
        tokens: how many.
        num_blocks: blocks of the longest row.
        grouped: whether the prefill items start at groups of 16 blocks, so that maxima may be written.
        requests: those of few query rows, ``[4, n]`` int32, see :func:`request_fields`.
        work: prefill items of the others, ``[items, WORK_ITEM_DWORDS]`` int32.
    """

    first: int
    tokens: int
    num_blocks: int
    grouped: bool
    requests: torch.Tensor
    work: torch.Tensor

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The chunk's part of a tensor with a dimension of query tokens."""
        if self.tokens == tensor.shape[dim]:
            return tensor
        return tensor.narrow(dim, self.first, self.tokens)


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
        self._device = device
        self._prefill = PrefillLauncher(device)
        self._decode = DecodeLauncher(device, geometry.chosen_layout())
        self._insert = InsertLauncher(device)
        self._topk = TopkLauncher(device)
        self._lut = build_lut(self.device)

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.insert`."""
        self._insert(keys, pages, slots)

    # ---- Plans ----
    #
    # numbers: of each chunk the first token, the tokens, the blocks, whether it is grouped
    # tensors: block table, nb of every token, the requests and the work of each chunk; of lengths on the
    #          device only the table, the lengths and the row numbers

    def plan(self, step: Step) -> Plan:
        """See :meth:`kernel.backends.base.Backend.plan`."""
        lengths = step.lengths
        if isinstance(lengths, DeviceLengths):
            rows = torch.arange(lengths.seq_lens.shape[0], dtype=torch.int32, device=self.device)
            return Plan.of(step, (), (lengths.cu_seqlens_q, lengths.seq_lens, rows))
        most = min(self.max_decode_queries, geometry.MAX_ROWS // step.num_heads)
        numbers: list[int] = []
        arrays = [lengths.blocks_per_query(step.total_q)]
        for chunk in chunks(lengths, step.num_heads):
            first = int(chunk.query_starts[0])
            # Such items serve every run, but balance short rows worse.
            grouped = chunk.max_blocks > _GROUPED_BLOCKS * geometry.CLASSES[0]
            numbers += [first, int(chunk.query_lens.sum()), chunk.max_blocks, int(grouped)]
            moved = replace(chunk, query_starts=chunk.query_starts - first)
            short = moved.query_lens <= most
            arrays.append(request_fields(moved[short]))
            columns = step.block_table.shape[1]
            arrays.append(self._prefill.work(moved[~short], step.num_heads, columns, grouped=grouped))
        return Plan.of(step, numbers, uploaded(arrays, self.device))

    def _chunks(self, plan: Plan) -> Iterator[_Chunk]:
        """The chunks of a plan."""
        numbers, tensors = plan.own_numbers, plan.tensors[2:]
        for at in range(len(numbers) // _CHUNK_NUMBERS):
            first, tokens, num_blocks, grouped = numbers[_CHUNK_NUMBERS * at : _CHUNK_NUMBERS * (at + 1)]
            yield _Chunk(first, tokens, num_blocks, bool(grouped), *tensors[2 * at : 2 * at + 2])

    def score_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score_plan`."""
        if plan.header.max_query_len:
            scores.fill_(-torch.inf)  # rows of no request
        self._run(plan, self._add_score, q, pages, scores)

    def _add_score(
        self, run: Run, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor
    ) -> None:
        if plan.header.max_query_len:
            self._score_bounded(run, plan, q, pages, scores, None, None)
        for chunk in self._chunks(plan):
            self._score(run, plan, chunk, q, pages, chunk.of(scores, 1), None, fill=True)

    def select_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, block_ids: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.select_plan`."""
        self._run(plan, self._add_select, q, pages, block_ids)

    def _add_select(
        self, run: Run, plan: Plan, q: torch.Tensor, pages: torch.Tensor, block_ids: torch.Tensor
    ) -> None:
        header = plan.header
        order: Order = "block" if header.by_block else "score"
        k = block_ids.shape[2]
        if header.max_query_len:
            shape = (header.num_heads, header.total_q, header.num_score_blocks)
            scores, maxima = self._buffers(run, shape, k)
            num_blocks = run.workspace(
                partial(torch.zeros, header.total_q, dtype=torch.int32, device=self.device)
            )
            self._score_bounded(run, plan, q, pages, scores, maxima, num_blocks)
            self._topk(scores, num_blocks, block_ids, order, maxima, run)
        for chunk in self._chunks(plan):
            grouped = chunk.grouped or not chunk.work.shape[0]
            shape = (header.num_heads, chunk.tokens, chunk.num_blocks)
            scores, maxima = self._buffers(run, shape, k, grouped=grouped)
            self._score(run, plan, chunk, q, pages, scores, maxima, fill=False)
            self._topk(scores, chunk.of(plan.tensors[1], 0), chunk.of(block_ids, 1), order, maxima, run)

    def _run(
        self,
        plan: Plan,
        add: Callable[[Run, Plan, torch.Tensor, torch.Tensor, torch.Tensor], None],
        q: torch.Tensor,
        pages: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Run what ``add`` launches at the first run of a plan on such tensors.

        Runs of several chunks are not kept: their workspaces follow one another in the same memory.
        """
        if len(plan.own_numbers) > _CHUNK_NUMBERS:
            add(Run(), plan, q, pages, out)
            return
        given = q, pages, out, plan.tensors[0]
        alignment = q.data_ptr() % OPERAND_BYTES
        key = (add.__name__, self._device.compute_units, alignment, *plan.key(pages, out))
        run = plan.runs.get(key)
        if run is None:
            run = Run(*given)
            add(run, plan, q, pages, out)
            if run.finish():
                plan.keep(key, run)
            return
        run(*given)

    def _buffers(
        self, run: Run, shape: tuple[int, int, int], k: int, *, grouped: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores, and their group maxima where rows are long enough to gain from them."""
        empty = partial(torch.empty, dtype=torch.float32, device=self.device)
        scores = run.workspace(partial(empty, shape))
        if not grouped or shape[2] <= _GROUPED_BLOCKS * k:
            return scores, None
        return scores, run.workspace(partial(empty, (*shape[:2], -(-shape[2] // MAXIMA_BLOCKS))))

    def _score(
        self,
        run: Run,
        plan: Plan,
        chunk: _Chunk,
        q: torch.Tensor,
        pages: torch.Tensor,
        scores: torch.Tensor,
        maxima: torch.Tensor | None,
        *,
        fill: bool,
    ) -> None:
        """Scores requests of few query rows with the decode kernel, the others with prefill.

        Without ``fill``, cells past a request's blocks may stay unwritten.
        """
        batch = self._batch(plan, chunk.of(q, 0), pages)
        if chunk.requests.shape[1]:
            self._decode.launch(batch, DeviceRequests.of(chunk.requests), scores, maxima, fill=fill, run=run)
        self._prefill.launch(batch, chunk.work, scores, maxima, run)

    def _batch(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor) -> ScoreBatch:
        """What launches take of a plan."""
        header = plan.header
        return ScoreBatch(q, pages, plan.tensors[0], self._lut, (), header.init_blocks, header.local_blocks)

    def _score_bounded(
        self,
        run: Run,
        plan: Plan,
        q: torch.Tensor,
        pages: torch.Tensor,
        scores: torch.Tensor,
        maxima: torch.Tensor | None,
        num_blocks: torch.Tensor | None,
    ) -> None:
        """Scores requests whose lengths only the device knows; cells past their blocks stay unwritten."""
        header = plan.header
        offsets, seq_lens, rows = plan.tensors[1:]
        self._decode.launch(
            self._batch(plan, q, pages),
            DeviceRequests(rows, offsets[:-1], offsets[1:], seq_lens),
            scores,
            maxima,
            fill=False,
            num_blocks=num_blocks,
            max_query_len=header.max_query_len,
            max_blocks=header.num_score_blocks,
            run=run,
        )

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """See :meth:`kernel.backends.base.Backend.topk`."""
        self._topk(scores, num_blocks, block_ids, order)
