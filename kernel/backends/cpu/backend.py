"""The cpu backend: blocked float32 torch, a bounded part of a call at a time.

    tile         rows (token, head) that are multiplied together: ``keys @ queries^T``
    tile batch   short requests, each of one tile, all of one width: a product for each, everything else for
                 all of them at once. Laid out when a step is planned
    chunk        consecutive query tokens of a longer request, at most ``CHUNK_ROWS`` rows
    group        at most 32 blocks, whose keys are dequantised once for a chunk
    part         a chunk and some groups

Tile batches and parts are tasks, which threads take as they become free.

Products have tokens down and rows across, so that the maximum over a block's tokens runs over whole vectors.
Blocks that no row of a tile sees are left out.

BLAS picks its kernel, and with it the order of summation, by the shape of the product (one row is a
matrix-vector product, for one). A row's score must not depend on the rows beside it, so rows are padded to
one of a few widths, and a width is used only if it gave the bits of the widest one in a trial. Where even the
widest tile sums differently from place to place, products are made in float64, at half the speed: an E4M3
product is a multiple of 2^-18 and 128 of them stay below 2^25, so every float64 sum is exact and no order
matters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernel.backends.base import Order, PlannedBackend, Precision, ScaleChoice
from kernel.backends.cpu.plan import KEY_ROWS, TASK_COST, TASKS_A_THREAD, Layout, TileBatch
from kernel.backends.cpu.topk import SharedTopk, select_rows, select_topk
from kernel.batch import INIT_SCORE, LOCAL_SCORE, Request, ScoreBatch
from kernel.checks import check_slots
from kernel.contract import BLOCK_TOKENS, GROUP_DIMS, GROUPS, HEAD_DIM, TOKEN_CODE_BYTES
from kernel.nvfp4 import E4M3_NAN, build_lut, dequantize, quantize_keys
from kernel.page import blocks_of, codes_of, scales_of
from kernel.step import Plan, Step, host_plan, planned_lengths
from kernel.threads import on_one_thread, run_tasks

CHUNK_ROWS = 4096
"""Most rows of a chunk: a group's keys are dequantised once for all of them."""
ROW_WIDTHS = (512, 256, 128, 64, 32, 16)
"""Rows of a tile, widest first."""
PRODUCT_CELLS = 1 << 20
"""Most cells of a product: 4 MiB in float32, so that the maximum is taken in the last-level cache."""
MAX_GROUP_BLOCKS = 32
"""Most blocks multiplied at a time."""
SHARED_CHUNK_ROWS = 1024
"""Least rows of a chunk among several: reading a block's keys takes 3 % of the time of their products."""
INSERT_TOKENS = 2048
"""Keys that are quantised at a time."""
_LAYOUT = ("layout",)
"""Under which a plan keeps its :class:`kernel.backends.cpu.plan.Layout`."""
_GROUP_BYTES = GROUP_DIMS // 2
"""Code bytes that share a scale."""


class CpuBackend(PlannedBackend):
    """Blocked float32 torch. Scores are within the ``exact`` bound whatever ``precision`` says.

    A call's workspace is some 20 MiB for each thread, whatever the context. Instances hold no state between
    calls and may be used from several threads.
    """

    name = "cpu"

    def __init__(self, precision: Precision = "exact", scale_choice: ScaleChoice = "six") -> None:
        self._scale_choice: ScaleChoice = scale_choice
        self.device = torch.device("cpu")
        self.precision: Precision = precision
        self._tiles = RowTiles()
        self._pair_table = build_pair_table(self._tiles.dtype)
        every_byte = torch.arange(256, dtype=torch.uint8, device="cpu")
        self._query_table = every_byte.view(torch.float8_e4m3fn).to(self._tiles.dtype)
        self._lut = build_lut(self.device)

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.insert`."""
        check_slots(slots, pages.shape[0])
        kept = slots >= 0
        if not bool(kept.all()):
            keys, slots = keys[kept], slots[kept]
        codes = torch.empty((keys.shape[0], TOKEN_CODE_BYTES), dtype=torch.uint8, device="cpu")
        scales = torch.empty((keys.shape[0], GROUPS), dtype=torch.uint8, device="cpu")

        def quantize(start: int, _: None) -> None:
            rows = slice(start, start + INSERT_TOKENS)
            codes[rows], scales[rows] = quantize_keys(keys[rows], self._scale_choice)

        starts = range(0, keys.shape[0], INSERT_TOKENS)
        with on_one_thread() as threads:
            run_tasks((partial(quantize, start) for start in starts), lambda: None, min(threads, len(starts)))
        page_ids, tokens = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
        codes_of(pages)[page_ids, tokens] = codes
        scales_of(pages)[page_ids, tokens] = scales

    def plan(self, step: Step) -> Plan:
        """See :meth:`kernel.backends.base.Backend.plan`. Lengths on the host are laid out once, here."""
        plan = host_plan(step)
        if not plan.header.max_query_len:
            plan.keep(_LAYOUT, self._laid_out(plan, torch.get_num_threads()))
        return plan

    def _laid_out(self, plan: Plan, threads: int) -> Layout:
        kept: Layout | None = plan.runs.get(_LAYOUT)
        if kept is not None:
            return kept
        columns = plan.tensors[0].shape[1]
        return Layout.of(planned_lengths(plan), plan.header, columns, self._tiles.widths, threads)

    def score_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score_plan`."""
        if plan.header.max_query_len:
            scores.fill_(-torch.inf)

        def score_tiles(tiles: TileBatch, _: Workspace) -> None:
            found = self._tile_batch_scores(plan, tiles, q, pages)
            by_head = found.view(-1, plan.header.num_heads, tiles.num_blocks).transpose(0, 1)
            scores[:, :, : tiles.num_blocks].index_copy_(1, tiles.tokens, by_head)
            scores[:, :, tiles.num_blocks :].index_fill_(1, tiles.tokens, -torch.inf)

        def score_part(chunk: Chunk, first: int, stop: int, workspace: Workspace) -> None:
            rows = scores[:, chunk.tokens]
            for start, found in chunk.scores(first, stop, workspace):
                rows[:, :, start : start + found.shape[0]] = found.permute(2, 1, 0)
            if stop == chunk.last_block:
                rows[:, :, stop:] = -torch.inf

        def tasks(layout: Layout, threads: int) -> Iterator[Task]:
            yield from (partial(score_tiles, tiles) for tiles in layout.tile_batches)
            for chunk in self._chunks(plan, layout.longer, q, pages, threads):
                yield from (partial(score_part, chunk, *part) for part in chunk.parts)

        self._run(plan, tasks)

    def select_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, block_ids: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.select_plan`."""
        if plan.header.max_query_len:
            block_ids.fill_(-1)
        heads, _, k = block_ids.shape
        order: Order = "block" if plan.header.by_block else "score"

        def select_tiles(tiles: TileBatch, _: Workspace) -> None:
            found = select_rows(self._tile_batch_scores(plan, tiles, q, pages), tiles.row_blocks, k, order)
            block_ids.index_copy_(1, tiles.tokens, found.view(-1, heads, k).transpose(0, 1))

        def select_part(chunk: Chunk, best: SharedTopk, first: int, stop: int, workspace: Workspace) -> None:
            selection = best.add(
                (start, found.flatten(1)) for start, found in chunk.scores(first, stop, workspace)
            )
            if selection is not None:
                ids = selection.block_ids(order)
                block_ids[:, chunk.tokens] = ids.view(-1, heads, k).transpose(0, 1)

        def tasks(layout: Layout, threads: int) -> Iterator[Task]:
            yield from (partial(select_tiles, tiles) for tiles in layout.tile_batches)
            for chunk in self._chunks(plan, layout.longer, q, pages, threads):
                best = SharedTopk(chunk.row_blocks, k, len(chunk.parts))
                yield from (partial(select_part, chunk, best, *part) for part in chunk.parts)

        self._run(plan, tasks)

    def _run(self, plan: Plan, tasks: Callable[[Layout, int], Iterator[Task]]) -> None:
        with on_one_thread() as threads:
            layout = self._laid_out(plan, threads)
            threads = max(min(threads, layout.tasks), 1)
            run_tasks(tasks(layout, threads), self._workspace, threads)

    def _workspace(self) -> Workspace:
        return Workspace(self._pair_table)

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """See :meth:`kernel.backends.base.Backend.topk`."""
        select_topk(scores, num_blocks, block_ids, order)

    # ---- Tile batches ----

    def _tile_batch_scores(
        self, plan: Plan, tiles: TileBatch, q: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        """``[rows, S]`` float32, the rows of ``tiles.tokens``: sentinels in, -inf at and past ``nb``."""
        width, total = tiles.width, tiles.first_blocks[-1]
        queries = self._tile_queries(q, tiles)
        cells = plan.tensors[0].view(-1).index_select(0, tiles.table_cells)
        page_ids = cells.clamp_(0, pages.shape[0] - 1)
        group = min(group_blocks(width), total)
        reader = KeyReader(self._pair_table, group)
        dtype = self._tiles.dtype
        products = torch.empty((group, BLOCK_TOKENS, width), dtype=dtype, device="cpu")
        maxima = torch.empty((total + 1, width), dtype=dtype, device="cpu")
        maxima[total].fill_(-torch.inf)  # what rows past their request's blocks have
        diagonal, request = tiles.diagonal.numpy(), 0
        for first in range(0, total, group):
            stop = min(first + group, total)
            keys = reader.read(pages, page_ids[first:stop])
            start = first
            while start < stop:
                last = tiles.first_blocks[request + 1]
                end = min(last, stop)
                product = products[start - first : end - first].view(-1, width)
                tokens = slice(BLOCK_TOKENS * (start - first), BLOCK_TOKENS * (end - first))
                torch.mm(keys[tokens], queries[request], out=product)
                start, request = end, request + (end == last)
            torch.amax(products[: stop - first], 1, out=maxima[first:stop])
            begin, end = diagonal.searchsorted((first, stop)).tolist()
            if begin < end:
                places = tiles.diagonal[begin:end]
                seen = products.index_select(0, places - first)
                seen.masked_fill_(tiles.unseen[begin:end], -torch.inf)
                maxima.index_copy_(0, places, seen.amax(1))
        scores = maxima.view(-1).index_select(0, tiles.score_cells).view(-1, tiles.num_blocks).float()
        if tiles.init is not None:
            scores.masked_fill_(tiles.init, INIT_SCORE)
        if tiles.local is not None:
            scores.masked_fill_(tiles.local, LOCAL_SCORE)
        return scores

    def _tile_queries(self, q: torch.Tensor, tiles: TileBatch) -> tuple[torch.Tensor, ...]:
        """The queries of each request, ``[128, width]`` of the tiles' dtype."""
        encoded = q.view(torch.uint8).view(-1, HEAD_DIM).index_select(0, tiles.query_rows)
        shape = (len(tiles.first_blocks) - 1, HEAD_DIM, tiles.width)
        indices = torch.empty(shape, dtype=torch.int64, device="cpu")
        indices.copy_(encoded.view(-1, tiles.width, HEAD_DIM).transpose(1, 2))
        return self._query_table.index_select(0, indices.view(-1)).view(shape).unbind()

    # ---- Longer requests ----

    def _chunks(
        self, plan: Plan, requests: tuple[Request, ...], q: torch.Tensor, pages: torch.Tensor, threads: int
    ) -> Iterator[Chunk]:
        """Yields every query token of the requests, in chunks."""
        if not requests:
            return
        header = plan.header
        table = plan.tensors[0].clamp(0, pages.shape[0] - 1)
        forced = header.init_blocks, header.local_blocks
        batch = ScoreBatch(q, pages, table, self._lut, requests, *forced)
        rows = sum(request.query_len for request in requests) * batch.num_heads
        chunk_rows = CHUNK_ROWS
        if threads > 1:
            tiles = -(-rows // (TASKS_A_THREAD * threads * ROW_WIDTHS[0]))
            chunk_rows = min(max(tiles * ROW_WIDTHS[0], SHARED_CHUNK_ROWS), CHUNK_ROWS)
        chunk_tokens = chunk_rows // batch.num_heads
        chunks = sum(-(-request.query_len // chunk_tokens) for request in requests)
        parts = 1 if threads == 1 else -(-TASKS_A_THREAD * threads // chunks)
        for request in batch.requests:
            page_ids = batch.block_table[request.table_row, : request.num_blocks].long()
            # The last chunk, which sees most, first: short ones at the end keep all threads busy.
            for start in reversed(range(0, request.query_len, chunk_tokens)):
                end = min(start + chunk_tokens, request.query_len)
                first = request.prefix_len + start
                tokens = slice(request.query_start + start, request.query_start + end)
                yield self._chunk(batch, tokens, first, page_ids, parts)

    def _chunk(
        self, batch: ScoreBatch, tokens: slice, first_position: int, page_ids: torch.Tensor, parts: int
    ) -> Chunk:
        queries = batch.q[tokens].flatten(0, 1)
        tiles = self._tiles.split(queries, first_position, batch.num_heads)
        end = first_position + tokens.stop - tokens.start
        positions = torch.arange(first_position, end, dtype=torch.int64, device="cpu")
        last_block = blocks_of(end)
        least = -(-TASK_COST // (queries.shape[0] + KEY_ROWS))
        size = max(-(-last_block // parts), least)
        return Chunk(
            batch=batch,
            tokens=tokens,
            page_ids=page_ids,
            tiles=tiles,
            row_blocks=(positions // BLOCK_TOKENS + 1).repeat_interleave(batch.num_heads),
            last_block=last_block,
            group=group_blocks(max(tile.queries.shape[1] for tile in tiles)),
            parts=[(first, min(first + size, last_block)) for first in range(0, last_block, size)],
        )


class Workspace:
    """A thread's buffers, made when they are first needed."""

    def __init__(self, pair_table: torch.Tensor) -> None:
        self._pair_table = pair_table

    @functools.cached_property
    def keys(self) -> KeyReader:
        """Of parts."""
        return KeyReader(self._pair_table, MAX_GROUP_BLOCKS)

    @functools.cached_property
    def maxima(self) -> TileMaxima:
        """Of tiles."""
        return TileMaxima(self._pair_table.real.dtype)


Task = Callable[[Workspace], None]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some consecutive query tokens of a request."""

    batch: ScoreBatch
    tokens: slice
    """The tokens' places in ``q``."""
    page_ids: torch.Tensor
    """Of the request's blocks, int64."""
    tiles: list[RowTile]
    row_blocks: torch.Tensor
    """``[rows]`` int64: ``nb`` of each row."""
    last_block: int
    """That some row sees, exclusive."""
    group: int
    """Most blocks whose scores are computed at a time."""
    parts: list[tuple[int, int]]
    """First and last block, exclusive, of each task."""

    def scores(self, first: int, end: int, workspace: Workspace) -> Iterator[tuple[int, torch.Tensor]]:
        """First block and scores ``[blocks, tokens, H]`` float32 of each group of a part: sentinels in, -inf
        at and past a row's ``nb``."""
        for start in range(first, end, self.group):
            yield start, self._group_scores(start, min(start + self.group, end), workspace)

    def _group_scores(self, first: int, stop: int, workspace: Workspace) -> torch.Tensor:
        keys = workspace.keys.read(self.batch.pages, self.page_ids[first:stop])
        shape = (stop - first, self.row_blocks.shape[0])
        scores = torch.full(shape, -torch.inf, dtype=torch.float32, device="cpu")
        for tile in self.tiles:
            seen = min(stop, blocks_of(tile.last_position + 1)) - first
            if seen > 0:
                seen_keys = keys[: seen * BLOCK_TOKENS]
                workspace.maxima.write(tile, seen_keys, first * BLOCK_TOKENS, out=scores[:seen, tile.rows])
        _force(scores, first, self.row_blocks, self.batch.init_blocks, self.batch.local_blocks)
        return scores.view(stop - first, -1, self.batch.num_heads)


def _force(scores: torch.Tensor, first_block: int, row_blocks: torch.Tensor, init: int, local: int) -> None:
    """Write the sentinels into ``[blocks, rows]``; the local value wins over the init value."""
    stop = first_block + scores.shape[0]
    if first_block >= init and (not local or stop <= int(row_blocks.min()) - local):
        return
    blocks = torch.arange(first_block, stop, dtype=torch.int64, device="cpu")[:, None]
    causal = blocks < row_blocks
    if first_block < init:
        scores.masked_fill_(causal & (blocks < init), INIT_SCORE)
    if local:
        scores.masked_fill_(causal & (blocks >= row_blocks - local), LOCAL_SCORE)


# ---- Keys of pages as floats: one gather by table for each code byte, two values at a time ----


@functools.cache
def build_pair_table(dtype: torch.dtype) -> torch.Tensor:
    """Both values of every (scale byte, code byte).

    Returns:
        ``[65536]`` pairs, index ``scale * 256 + code``: 512 KiB in float32, which stays in L2.
    """
    every_byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    values = dequantize(every_byte.expand(256, 256), every_byte[:, None].expand(256, 256 // _GROUP_BYTES))
    return torch.view_as_complex(values.to(dtype).view(-1, 2))


class KeyReader:
    """Dequantises pages, a bounded number at a time, into one buffer of keys."""

    def __init__(self, pair_table: torch.Tensor, max_blocks: int) -> None:
        self._table = pair_table
        self._indices = torch.empty(
            (max_blocks, BLOCK_TOKENS, GROUPS, _GROUP_BYTES), dtype=torch.int64, device="cpu"
        )
        self._pairs = torch.empty(self._indices.numel(), dtype=pair_table.dtype, device="cpu")

    def read(self, pages: torch.Tensor, page_ids: torch.Tensor) -> torch.Tensor:
        """Keys of pages.

        Args:
            pages: ``[num_pages, 9216]`` uint8, any page stride.
            page_ids: ``[n]`` int64, n at most ``max_blocks``.

        Returns:
            ``[n * 128, 128]`` of the table's values, valid until the next read.
        """
        taken = pages.index_select(0, page_ids)
        indices = self._indices[: page_ids.shape[0]]
        codes = codes_of(taken).view(indices.shape)
        torch.add(codes, scales_of(taken)[..., None].long(), alpha=256, out=indices)
        pairs = self._pairs[: indices.numel()]
        torch.index_select(self._table, 0, indices.view(-1), out=pairs)
        return torch.view_as_real(pairs).view(-1, HEAD_DIM)


# ---- Products of keys and queries in tile shapes that give the same bits on this machine ----


def group_blocks(width: int) -> int:
    """Most blocks that are multiplied at a time with tiles of a width."""
    return min(MAX_GROUP_BLOCKS, PRODUCT_CELLS // (width * BLOCK_TOKENS))


@dataclass(frozen=True, eq=False)
class RowTile:
    """The queries of some consecutive rows, ready to be multiplied."""

    rows: slice
    """Rows, counted within the chunk."""
    queries: torch.Tensor
    """``[128, width]``, zero past the rows."""
    positions: torch.Tensor
    """``[width]`` int64: position of each row's token, ascending."""
    first_position: int
    last_position: int


class RowTiles:
    """The widths and the number format whose scores do not depend on the tile."""

    def __init__(self) -> None:
        self.dtype, self.widths = agreeing_shapes()

    def split(self, queries: torch.Tensor, first_position: int, num_heads: int) -> list[RowTile]:
        """Cut the queries of consecutive tokens into tiles.

        Args:
            queries: ``[tokens * H, 128]`` float8_e4m3fn.
            first_position: position of the first token.
            num_heads: H.
        """
        tiles = []
        start, total = 0, queries.shape[0]
        while start < total:
            width = self._width(total - start)
            end = min(start + width, total)
            padded = torch.zeros((HEAD_DIM, width), dtype=self.dtype, device="cpu")
            padded[:, : end - start] = queries[start:end].float().t()
            rows = torch.arange(start, start + width, dtype=torch.int64, device="cpu").clamp_(max=end - 1)
            tiles.append(
                RowTile(
                    rows=slice(start, end),
                    queries=padded,
                    positions=first_position + rows // num_heads,
                    first_position=first_position + start // num_heads,
                    last_position=first_position + (end - 1) // num_heads,
                )
            )
            start = end
        return tiles

    def _width(self, rows: int) -> int:
        """Width of the next tile of ``rows`` remaining ones: at most a quarter of it is padding."""
        covering = self.widths[0]
        for width in self.widths:
            if width < rows:
                return covering if 4 * rows >= 3 * covering else width
            covering = width
        return covering


class TileMaxima:
    """Block maxima of a tile's products, through one product buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._product = torch.empty(PRODUCT_CELLS, dtype=dtype, device="cpu")

    def write(self, tile: RowTile, keys: torch.Tensor, first_position: int, out: torch.Tensor) -> None:
        """Largest ``q . k`` over the causal tokens of each block, -inf where there is none.

        Args:
            tile: the rows.
            keys: ``[n * 128, 128]``, n at most ``group_blocks`` of the width.
            first_position: position of ``keys[0]``, a multiple of 128.
            out: ``[n, rows]`` float32, written.
        """
        tokens, width = keys.shape[0], tile.queries.shape[1]
        product = self._product[: tokens * width].view(tokens, width)
        torch.mm(keys, tile.queries, out=product)
        whole_tokens = (tile.first_position + 1 - first_position) // BLOCK_TOKENS * BLOCK_TOKENS
        if whole_tokens < tokens:
            masked = max(whole_tokens, 0)
            positions = torch.arange(
                first_position + masked, first_position + tokens, dtype=torch.int64, device="cpu"
            )
            product[masked:].masked_fill_(positions[:, None] > tile.positions, -torch.inf)
        blocks = product.view(-1, BLOCK_TOKENS, width)[:, :, : out.shape[1]]
        if product.dtype == out.dtype:
            torch.amax(blocks, 1, out=out)
        else:
            out.copy_(blocks.amax(1))


@functools.cache
def agreeing_shapes() -> tuple[torch.dtype, tuple[int, ...]]:
    """The format to multiply in and the row widths that agree bit for bit, found by a trial of 0.1 s."""
    with on_one_thread() as threads:
        return _tried_shapes(threads)


def _tried_shapes(threads: int) -> tuple[torch.dtype, tuple[int, ...]]:
    generator = torch.Generator("cpu").manual_seed(0)
    queries = _inexact_values(ROW_WIDTHS[0], generator)
    tokens = group_blocks(ROW_WIDTHS[0]) * BLOCK_TOKENS
    keys = _inexact_values(MAX_GROUP_BLOCKS * BLOCK_TOKENS, generator)
    transposed = queries.t().contiguous()
    product = torch.cat([_product(part, transposed) for part in torch.split(keys, tokens)])
    key_order = torch.randperm(tokens, generator=generator, dtype=torch.int64, device="cpu")
    query_order = torch.randperm(queries.shape[0], generator=generator, dtype=torch.int64, device="cpu")
    moved = _product(keys[key_order], queries[query_order].t().contiguous())
    if not torch.equal(moved, product[key_order][:, query_order]):
        return torch.float64, ROW_WIDTHS
    agreeing = set[int]()

    def try_width(width: int, _: None) -> None:
        if _agrees(keys, queries[:width], product[:, :width]):
            agreeing.add(width)

    run_tasks((partial(try_width, width) for width in ROW_WIDTHS), lambda: None, threads)
    if ROW_WIDTHS[0] not in agreeing:
        return torch.float64, ROW_WIDTHS
    return torch.float32, tuple(width for width in ROW_WIDTHS if width in agreeing)


def _agrees(keys: torch.Tensor, queries: torch.Tensor, product: torch.Tensor) -> bool:
    """Whether every number of blocks that may be multiplied at a time gives the bits of ``product``."""
    transposed = queries.t().contiguous()
    last = group_blocks(queries.shape[0]) * BLOCK_TOKENS
    counts = range(BLOCK_TOKENS, last + 1, BLOCK_TOKENS)
    return all(torch.equal(_product(keys[:tokens], transposed), product[:tokens]) for tokens in counts)


def _product(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    # Into a given tensor, as in earnest: autocast would round the product to its own dtype.
    out = torch.empty((keys.shape[0], queries.shape[1]), dtype=torch.float32, device="cpu")
    return torch.mm(keys, queries, out=out)


def _inexact_values(rows: int, generator: torch.Generator) -> torch.Tensor:
    """``[rows, 128]`` E4M3 values over all exponents, so that float32 sums depend on their order."""
    encoded = torch.randint(0, 256, (rows, HEAD_DIM), dtype=torch.uint8, generator=generator, device="cpu")
    encoded[(encoded & 0x7F) == E4M3_NAN] = 0
    values: torch.Tensor = encoded.view(torch.float8_e4m3fn).float()
    return values
