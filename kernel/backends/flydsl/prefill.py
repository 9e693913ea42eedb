"""Prefill scores of NVFP4 key pages on gfx950.

    scores[head, token, block] = max over the causal tokens t of the block of  q[token, head] . k[t]
    maxima[head, token, group] = max of the scores of 16 consecutive blocks, sentinels included

One workgroup scores one work item of :mod:`kernel.plan`: up to 512 query rows (row = token * H + head, so
that heads share the work on keys) of one request, against a run of the request's blocks. Each block is one
page of 9,216 bytes; the four waves dequantise it together to E4M3 in LDS, a quarter each, while the matrix
units work on the block before.

    memory, 9,216 B a page       registers         LDS, 2 slots of 16 KB        registers
    codes, scales -----------> 32 + 4 B a lane --> E4M3 keys [128][128] ------> A: 16 keys
                  two blocks               LUT     one barrier a block          B: 16 query rows, loaded once
                  ahead                                                         D: fp32 [16 tokens][16 rows]

    lane = 16 g + n     A, B: row n, 16-byte columns g and g + 4 of its 128 bytes
                        D: tokens 4 g .. 4 g + 3 of row n

Keys are A, so that a lane's four accumulators are four consecutive TOKENS of one query row: the max over
tokens stays in the lane until the block is done. N-tile nt of wave w holds the queries

    token = 128 (w div H) + 16 nt + (16 / H) (w mod H) + n div H,     head = n mod H

so a wave's N-tiles lie 16 tokens apart for every H. Then the causal mask of M-tile m depends on nt - m alone,
and with H = 4 the four waves share the work near the diagonal evenly.

The mask is the start value of the accumulators: 0, or so negative that no score reaches it. Blocks fully
visible to every row of the item take an unrolled path without mask or sentinels, four blocks a trip; the
masked path takes one block a trip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import flydsl.expr as fx
from flydsl.expr.typing import T

from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl import ops as d
from kernel.backends.flydsl.geometry import Launch, PrefillArguments
from kernel.backends.flydsl.jit import launcher
from kernel.backends.flydsl.ops import Value
from kernel.backends.flydsl.prefill_block import BlockScorer, StartValue, every_tile, score_unaligned_diagonal
from kernel.batch import INIT_SCORE, LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.plan import MAXIMA_BLOCKS, STORE_BLOCKS, WORK_ITEM_DWORDS


@dataclass
class Carried:
    """Loop-carried state from one block to the next, in registers."""

    raw: list[Value]
    """This lane's part of the next block's page."""
    page_ids: list[Value]
    """Pages of the four blocks after that."""
    keys: Value
    """This block's first M-tile, as operand A."""
    maxima: list[Value]
    """Maxima so far of the current 16 blocks, for each of the lane's rows."""

    def values(self) -> list[Value]:
        return [*self.raw, *self.page_ids, self.keys, *self.maxima]

    @staticmethod
    def of(values: list[Value]) -> Carried:
        return Carried(values[:3], values[3:7], values[7], values[8:10])


class ItemScorer:
    """Traces the kernel's body.

    Args:
        heads: index heads, H.
        arguments: the kernel's arguments.
        workgroup: number of the workgroup and of its work item.
        thread: this lane's number in the workgroup.
    """

    def __init__(self, heads: int, arguments: PrefillArguments, workgroup: Value, thread: Value) -> None:
        self.heads, self.log_heads = heads, geo.log2(heads)
        self.arguments = arguments
        self.thread = thread
        self.lane = thread & (geo.LANES - 1)
        self.wave = d.uniform(d.shift_right(thread, geo.LOG_LANES))

        item = d.scalar_load(WORK_ITEM_DWORDS, arguments.work + d.zext(workgroup) * (WORK_ITEM_DWORDS * 4))
        fields = [fx.Int32(d.element(item, k)) for k in range(WORK_ITEM_DWORDS)]
        table_offset, self.first_token, self.num_tokens, self.position = fields[:4]
        self.first_block, self.end_block = fields[4:6]
        self.fill_end = d.min_i32(fields[6], arguments.score_blocks)
        self.table = arguments.table + d.zext(table_offset) * 4
        self.wave_token = d.shift_right(self.wave, self.log_heads) * BLOCK_TOKENS + (
            self.wave & (heads - 1)
        ) * (geo.MFMA_ROWS // heads)
        # A wave without rows stands before every block: the masked path computes nothing for it.
        has_rows = self.wave_token < self.num_tokens
        self.wave_position = fx.Int32(
            d.select(has_rows, self.position + self.wave_token, fx.Int32(-2 * BLOCK_TOKENS))
        )
        # A block below unmasked_end is fully visible to every row and gets no sentinel.
        self.unmasked_end = d.min_i32(
            d.shift_right(self.position + 1, geo.LOG_BLOCK),
            d.shift_right(self.position, geo.LOG_BLOCK) + 1 - arguments.local_blocks,
        )
        self.aligned = (self.position & (BLOCK_TOKENS - 1)) == 0
        self.wants_maxima = arguments.maxima != 0
        self.minus_infinity = d.f32(float("-inf"))
        self.block = BlockScorer(self.log_heads, self.wave, self.lane, self.wave_position)
        self._place_rows()

    # ---- addresses ----
    def _place_rows(self) -> None:
        """Addresses of this lane's scores: it holds N-tiles lane // 16 and 4 + lane // 16 once reduced."""
        args = self.arguments
        self.lane_token = (
            self.wave_token
            + self.block.quarter * geo.MFMA_ROWS
            + d.shift_right(self.block.row, self.log_heads)
        )
        self.live = [
            self.lane_token + geo.REDUCED_TOKENS * j < self.num_tokens for j in range(geo.REDUCED_ROWS)
        ]
        cell = d.zext(self.block.row & (self.heads - 1)) * args.score_head_stride
        cell = cell + d.zext(self.first_token + self.lane_token) * args.score_token_stride
        self.scores_at = d.offset(d.pointer(args.scores, d.GLOBAL), cell * 4)

    def _maxima_at(self) -> Value:
        """Address of this lane's maxima, computed once in 16 blocks: no registers are held for it."""
        args = self.arguments
        lane = fx.Int32(d.pin(self.lane))
        token = (
            self.wave_token
            + (lane & (geo.LANES - geo.MFMA_ROWS))
            + d.shift_right(lane & (geo.MFMA_ROWS - 1), self.log_heads)
        )
        cell = d.zext(lane & (self.heads - 1)) * args.maxima_head_stride
        cell = cell + d.zext(self.first_token + token) * args.maxima_token_stride
        return d.offset(d.pointer(args.maxima, d.GLOBAL), cell * 4)

    # ---- queries and pages ----
    def _load_queries(self) -> list[list[Value]]:
        """For each N-tile the two columns of this lane's row; rows past the end repeat the last token."""
        columns = []
        for nt in range(geo.N_TILES):
            token = self.wave_token + (d.shift_right(self.block.row, self.log_heads) + nt * geo.MFMA_ROWS)
            token = self.first_token + d.min_i32(token, self.num_tokens - 1)
            row = d.zext(token * self.heads + (self.block.row & (self.heads - 1)))
            address = row * HEAD_DIM + d.zext(self.block.quarter * geo.OPERAND_BYTES)
            base = d.offset(d.pointer(self.arguments.q, d.GLOBAL), address)
            columns.append([d.load(4, d.offset(base, c * HEAD_DIM // 2)) for c in range(2)])
        return columns

    def _page_id(self, block: Value) -> Value:
        """Page of a block, of the item's last block past its end: columns beyond may hold anything."""
        column = d.min_i32(block, self.end_block - 1)
        return d.scalar_load(1, self.table + d.zext(column) * 4)

    def _load_page(self, page_id: Value) -> list[Value]:
        """This lane's 32 code bytes and 4 scale bytes, bounded by a descriptor of the page."""
        page_id = d.clamped(page_id, 0, self.arguments.num_pages - 1)
        page = d.buffer(self.arguments.pages + d.zext(page_id) * self.arguments.page_stride, PAGE_BYTES)
        codes = [d.buffer_load(4, page, self.block.code_offset + geo.OPERAND_BYTES * k) for k in range(2)]
        return [*codes, d.buffer_load(1, page, self.block.scale_offset)]

    def _prologue(self) -> Carried:
        """Issue all loads before the first wait; then dequantise the first block."""
        first, second = (self._page_id(self.first_block + k) for k in range(2))
        page_ids = [self._page_id(self.first_block + (2 + k)) for k in range(STORE_BLOCKS)]
        raw, next_raw = self._load_page(first), self._load_page(second)
        lut_offset = self.thread * geo.LUT_ENTRY_BYTES
        entry = d.load(2, d.offset(d.pointer(self.arguments.lut, d.GLOBAL), d.zext(lut_offset)))
        d.fence()
        columns = self._load_queries()
        d.fence()
        # The LUT holds magnitudes; the sign of a scale byte, the upper half of the entries, is added here.
        signs = d.shift_right(self.thread, geo.log2(geo.LUT_ENTRIES) - 1) * d.as_int32(0x80808080)
        entry = d.pack([fx.Int32(d.element(entry, k)) ^ signs for k in range(2)], T.i32)
        d.store(entry, d.offset(self.block.lds, lut_offset + geo.LUT_AT), geo.LUT_ENTRY_BYTES)
        d.lds_barrier()
        for step in self.block.dequantise_steps(raw, 0):
            step()
        d.lds_barrier()
        keys = self.block.read_keys(0, 0)
        self.block.queries = [
            d.concatenate(*(d.even_then_odd(column) for column in pair)) for pair in columns
        ]
        return Carried(next_raw, page_ids, keys, [self.minus_infinity] * geo.REDUCED_ROWS)

    # ---- four blocks ----
    def _unmasked_group(self, block: Value, carried: Carried) -> Carried:
        """Four blocks fully visible to every row, without masks or sentinels."""
        page_ids: list[Value] = []

        def fetch_ids() -> None:
            page_ids.extend(self._page_id(block + (STORE_BLOCKS + 2 + k)) for k in range(STORE_BLOCKS))

        def hold_ids() -> None:
            page_ids[:] = [d.pin_scalar(page_id) for page_id in page_ids]

        late = {0: fetch_ids, 1: hold_ids}
        previous, states = None, []
        raw, keys = carried.raw, carried.keys
        for k in range(STORE_BLOCKS):
            ahead = self._load_page(carried.page_ids[k])
            slots = (k % 2 * geo.SLOT_BYTES, (k + 1) % 2 * geo.SLOT_BYTES)
            previous, keys = self.block.score(
                slots, keys, raw, self.block.whole_start, previous=previous, late=late.get(k)
            )
            states.append(previous)
            raw = ahead
        states[-1].scores = self.block.finish(states[-1])
        scores = [[state.scores[j] for state in states] for j in range(geo.REDUCED_ROWS)]
        left = Carried(raw, page_ids, keys, carried.maxima)
        return self._finish_group(block, scores, left, lambda: self._store_scores(block, scores))

    def _masked_group(self, block: Value, carried: Carried) -> Carried:
        """Up to four blocks with causal masks and sentinels, one a trip; none past the item's end."""
        token = self.position + fx.Int32(d.pin(self.lane_token))
        num_blocks = [
            d.shift_right(token + geo.REDUCED_TOKENS * j, geo.LOG_BLOCK) + 1 for j in range(geo.REDUCED_ROWS)
        ]
        wave_last = self.wave_position + (geo.WAVE_TOKENS - geo.MFMA_ROWS + (geo.MFMA_ROWS - 1) // self.heads)

        def trip(b: fx.Int32, values: list[Value]) -> list[Value]:
            raw, page_ids, keys, scores = values[:3], values[3:7], values[7], values[8:]
            k = b - block
            ahead = self._load_page(page_ids[0])
            current = (k & 1) * geo.SLOT_BYTES
            following = d.i32(geo.SLOT_BYTES) - current

            def next_page_id() -> Value:
                return self._page_id(b + (STORE_BLOCKS + 2))

            def seen(start: StartValue, first_tile: Callable[[int], int] = every_tile) -> list[Value]:
                ids: list[Value] = []
                pinned = [d.pin(x) for x in raw]
                state, after = self.block.score(
                    (current, following),
                    keys,
                    pinned,
                    start,
                    late=lambda: ids.append(next_page_id()),
                    first_tile=first_tile,
                )
                return [*self.block.finish(state), *ids, after]

            def unaligned() -> list[Value]:
                page_id = next_page_id()
                pinned = [d.pin(x) for x in raw]
                highest, after = score_unaligned_diagonal(self.block, (current, following), keys, pinned, b)
                return [*highest, page_id, after]

            def diagonal() -> list[Value]:
                return d.if_else(
                    self.aligned,
                    types,
                    lambda: seen(
                        self.block.diagonal_start(self.wave_position & (geo.MFMA_ROWS - 1)),
                        lambda m: max(m - 1, 0),
                    ),
                    unaligned,
                )

            def later() -> list[Value]:
                """A block after all of this wave's rows: only its part of the next block is dequantised."""
                for step in self.block.dequantise_steps([d.pin(x) for x in raw], following):
                    step()
                d.lds_barrier()
                return [
                    *[self.minus_infinity] * geo.REDUCED_ROWS,
                    next_page_id(),
                    self.block.read_keys(following, 0),
                ]

            # Uniform in the wave; each path passes exactly one barrier.
            types = [T.f32] * geo.REDUCED_ROWS + [T.i32, keys.type]
            *highest, page_id, keys = d.if_else(
                b * BLOCK_TOKENS + (BLOCK_TOKENS - 1) <= self.wave_position,
                types,
                lambda: seen(self.block.whole_start),
                lambda: d.if_else(b * BLOCK_TOKENS <= wave_last, types, diagonal, later),
            )
            for j in range(geo.REDUCED_ROWS):
                score = self._with_sentinels(highest[j], b, num_blocks[j])
                for i in range(STORE_BLOCKS):
                    at = STORE_BLOCKS * j + i
                    scores[at] = d.select(k == i, score, scores[at])
            return [*ahead, *page_ids[1:], page_id, keys, *scores]

        unscored = [self.minus_infinity] * (geo.REDUCED_ROWS * STORE_BLOCKS)
        end = d.min_i32(block + STORE_BLOCKS, self.end_block)
        values = d.for_range(block, end, 1, [*carried.raw, *carried.page_ids, carried.keys, *unscored], trip)
        scores = [values[8:12], values[12:]]
        left = Carried(values[:3], values[3:7], values[7], carried.maxima)
        return self._finish_group(block, scores, left, lambda: self._store_within_row(block, scores))

    def _with_sentinels(self, score: Value, block: Value, num_blocks: Value) -> Value:
        score = d.select(block < self.arguments.init_blocks, d.f32(INIT_SCORE), score)
        score = d.select(num_blocks <= block + self.arguments.local_blocks, d.f32(LOCAL_SCORE), score)
        return d.select(num_blocks <= block, self.minus_infinity, score)

    def _finish_group(
        self, block: Value, scores: list[list[Value]], carried: Carried, store: Callable[[], None]
    ) -> Carried:
        """Store four scores a row and take them into the maxima."""
        # Pinned, the wait for the page comes before the stores and does not include them.
        carried.raw = [d.pin(x) for x in carried.raw]
        store()
        best = list(carried.maxima)
        for j, row in enumerate(scores):
            for score in row:
                best[j] = d.max_f32(best[j], score)
        following = block + STORE_BLOCKS
        ends = ((following & (MAXIMA_BLOCKS - 1)) == 0) | (following >= self.end_block)

        def flush() -> list[Value]:
            d.if_then(self.wants_maxima, lambda: self._store_maxima(block, best))
            return [self.minus_infinity] * geo.REDUCED_ROWS

        maxima = d.if_else(ends, [T.f32] * geo.REDUCED_ROWS, flush, lambda: best)
        carried.maxima = maxima
        return carried

    def _store_scores(self, block: Value, rows: list[list[Value]]) -> None:
        """Four scores a row, 16 bytes; rows may start at any cell, so aligned to a cell only."""
        at = d.offset(self.scores_at, d.zext(block) * 4)
        for scores, live in zip(rows, self.live):
            row = d.pack(scores, T.f32)
            d.if_then(live, lambda row=row, at=at: d.store(row, at, 4))  # type: ignore[misc]
            at = d.offset(at, self.arguments.score_token_stride * (4 * geo.REDUCED_TOKENS))

    def _store_last_scores(self, block: Value, rows: list[list[Value]]) -> None:
        """As :meth:`_store_scores`, but nothing at or past ``fill_end``, the end of the row."""
        for i in range(STORE_BLOCKS - 1):
            at = d.offset(self.scores_at, d.zext(block + i) * 4)
            for scores, live in zip(rows, self.live):
                kept = live & (block + i < self.fill_end)
                d.if_then(kept, lambda score=scores[i], at=at: d.store(score, at, 4))  # type: ignore[misc]
                at = d.offset(at, self.arguments.score_token_stride * (4 * geo.REDUCED_TOKENS))

    def _store_within_row(self, block: Value, rows: list[list[Value]]) -> None:
        d.if_then(
            block + STORE_BLOCKS <= self.fill_end,
            lambda: self._store_scores(block, rows),
            lambda: self._store_last_scores(block, rows),
        )

    def _store_maxima(self, block: Value, rows: list[Value]) -> None:
        at = d.offset(self._maxima_at(), d.zext(d.shift_right(block, geo.LOG_MAXIMA)) * 4)
        for row, live in zip(rows, self.live):
            d.if_then(live, lambda row=row, at=at: d.store(row, at, 4))  # type: ignore[misc]
            at = d.offset(at, self.arguments.maxima_token_stride * (4 * geo.REDUCED_TOKENS))

    # ---- the item ----
    def run(self) -> None:
        """Masked groups up to the init blocks' end, unmasked ones, masked ones again.

        Two trips of an outer loop give one copy of each group's code. Each has a loop of its own: with a
        branch in a single loop LLVM copies all carried values at its end.
        """
        first, end = self.first_block, self.end_block
        unmasked_first = d.max_i32(first, (self.arguments.init_blocks + (STORE_BLOCKS - 1)) & -STORE_BLOCKS)
        unmasked_end = d.min_i32(self.unmasked_end, end) & -STORE_BLOCKS
        has_unmasked = unmasked_first < unmasked_end
        # Chains of minima become vector instructions; loop bounds must be scalar.
        unmasked_first = d.uniform(d.select(has_unmasked, unmasked_first, end))
        unmasked_end = d.uniform(d.select(has_unmasked, unmasked_end, end))

        def part(trip: fx.Int32, values: list[Value]) -> list[Value]:
            last = trip == 1
            for group, start, stop in (
                (
                    self._unmasked_group,
                    d.select(last, unmasked_first, first),
                    d.select(last, unmasked_end, first),
                ),
                (
                    self._masked_group,
                    d.select(last, unmasked_end, first),
                    d.select(last, end, unmasked_first),
                ),
            ):
                values = d.for_range(
                    start,
                    stop,
                    STORE_BLOCKS,
                    values,
                    lambda block, carried, group=group: group(block, Carried.of(carried)).values(),  # type: ignore[misc]
                )
            return values

        d.for_range(0, 2, 1, self._prologue().values(), part)
        self._fill_rest()

    def _fill_rest(self) -> None:
        """-inf from the item's end to ``fill_end``: blocks that none of its rows sees."""

        def fill(block: fx.Int32, _: list[Value]) -> list[Value]:
            self._store_within_row(block, [[self.minus_infinity] * STORE_BLOCKS] * geo.REDUCED_ROWS)
            starts = ((block & (MAXIMA_BLOCKS - 1)) == 0) & self.wants_maxima
            d.if_then(starts, lambda: self._store_maxima(block, [self.minus_infinity] * geo.REDUCED_ROWS))
            return []

        end = (self.end_block + (STORE_BLOCKS - 1)) & -STORE_BLOCKS
        d.for_range(end, self.fill_end, STORE_BLOCKS, [], fill)


def build(heads: int) -> Launch:
    """The launcher for ``heads`` heads: of :class:`PrefillArguments`, the number of work items, a stream."""

    def trace(arguments: PrefillArguments) -> None:
        ItemScorer(heads, arguments, fx.block_idx.x, fx.thread_idx.x).run()

    return launcher(
        "score_prefill",
        geo.prefill_name(heads),
        PrefillArguments,
        trace,
        grid=("num_items",),
        waves_per_simd=geo.WAVES_PER_SIMD,
    )
