"""Decode scores of NVFP4 key pages on gfx950, bound by memory.

    scores[head, token, block] = max over the causal tokens t of the block of  q[token, head] . k[t]
    maxima[head, token, group] = max of the scores of 16 consecutive blocks, sentinels included

A request has at most 16 query rows (row = token * H + head): one N-tile of the matrix instruction. A wave
reads its own pages, each byte once and by one wave, and dequantises in the layout that the MFMA wants:
nothing is shared but the look-up table.

    memory, 9,216 B a page        in flight: 4 pages in registers            registers
    codes, scales --------------> or 2 in LDS, by wave         --LUT in LDS--> A: 16 keys (8 times a page)
                  non-temporal    refilled part by part                      B: 16 query rows
                                                                             D: fp32 [16 tokens][16 rows]

Which of the two ``Layout`` s is faster only the device can tell: the scores are the same bits.

The speed limit is memory: 9,216 B a page at 8 TB/s over 256 CUs are about 700 clocks of a CU, and a page's
302 vector instructions, 4 clocks each and spread over four SIMDs, are about 302.

The grid depends on no length (``decode_share.py``), so that a captured launch serves any lengths. Lengths,
offsets and page ids read from memory are clamped: nothing is read or written outside the buffers.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl.expr.typing import T

from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl import ops as d
from kernel.backends.flydsl.decode_page import (
    LDS_BYTES,
    LUT_AT,
    STAGED_LDS_BYTES,
    TRIP_BLOCKS,
    PageScorer,
    RegisterPages,
    StagedPages,
    load_argument,
)
from kernel.backends.flydsl.decode_share import (
    RequestOutput,
    RequestPart,
    Share,
    clear_spread_maxima,
    store_spread_maxima,
)
from kernel.backends.flydsl.geometry import DecodeArguments, Launch, Layout
from kernel.backends.flydsl.jit import launcher
from kernel.backends.flydsl.ops import Value
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES

_HIDDEN = -3e38
"""Start value of a masked token; scores stay within 128 * 448 * 448 < 2^25."""


class RequestScorer:
    """Traces the scores of one request's part.

    Args:
        heads: index heads, H.
        arguments: the kernel's arguments.
        share: whose part it is.
        part: the request and the wave's blocks of it.
        page: scores single pages.
    """

    def __init__(
        self, heads: int, arguments: DecodeArguments, share: Share, part: RequestPart, page: PageScorer
    ) -> None:
        self.heads, self.log_heads = heads, geo.log2(heads)
        self.arguments, self.share, self.part, self.page = arguments, share, part, page
        self.minus_infinity = d.f32(float("-inf"))
        self.local_blocks = load_argument("local_blocks")
        self.rows = part.query_len * heads
        self.position = part.seq_len - part.query_len
        known = d.less_unsigned(part.table_row, load_argument("table_height"))
        row = fx.Int32(d.select(known, part.table_row, d.i32(0)))
        self.table_row = load_argument("table") + d.zext(row) * d.zext(load_argument("table_width")) * 4

    def run(self) -> None:
        """Score the wave's blocks of the request."""
        part = self.part
        # The ring reads only pages of blocks that are fully visible to some row and get no sentinel there.
        whole = d.shift_right(part.seq_len, geo.LOG_BLOCK)
        unforced = d.shift_right(part.seq_len + (BLOCK_TOKENS - 1), geo.LOG_BLOCK) - self.local_blocks
        self.needed_end = d.min_i32(d.min_i32(whole, unforced), part.end)
        step = d.shift_left(1, part.log_step)

        self.page.drain()
        # All loads are issued before the first wait; the queries' first, so that their wait includes no page.
        depth = self.page.depth
        ids = [self._page_id(part.first + k) for k in range(depth)]
        ahead_ids = self._ids_ahead(part.first, step)
        queries = self._load_queries()
        d.fence()
        diagonal = self._diagonal_scores(queries)
        ring = [self.page.load(self._page(part.first + k, ids[k]), k) for k in range(depth)]
        # The first row sees the least.
        seen = d.shift_right(self.position, geo.LOG_BLOCK) + 1 - self.local_blocks
        unmasked_end = d.min_i32(seen, d.shift_right(self.position + 1, geo.LOG_BLOCK))
        self.output = RequestOutput(
            self.heads, self.arguments, self.share, part, self.rows, self.row_position, diagonal, unmasked_end
        )
        self.page.queries = _as_operand(queries)

        def trip(block: fx.Int32, values: list[Value]) -> list[Value]:
            ring, ids, best = self._unpacked(values)
            after: list[Value] = []

            def fetch_ids() -> None:
                after.extend(self._ids_ahead(block + step, step))

            scores = []
            for k in range(TRIP_BLOCKS):
                slot = k % depth
                page = self._page(self._ahead(block, step, k), ids[k])
                late = fetch_ids if k == 0 else None
                score, ring[slot] = self.page.score(ring[slot], slot, page, pages_after=depth - 1, late=late)
                scores.append(score)
            # Pinned: LLVM would sink the loads into the block of their use and wait a whole latency there.
            after = [d.pin_scalar(page_id) for page_id in after]
            best = self.output.store(block, scores, best)
            return [*(value for page in ring for value in page), *after, best]

        carried = [*(value for page in ring for value in page), *ahead_ids, self.minus_infinity]
        trips = d.shift_right(part.end - part.first + (step - TRIP_BLOCKS), part.log_step)
        middle = part.first + d.shift_left(trips, part.log_step)
        carried = d.for_range(part.first, middle, step, carried, trip)
        ring, ids, best = self._unpacked(carried)
        rest = part.end - middle
        d.if_then(rest > 0, lambda: self._tail(middle, rest, ring, ids, best))
        self.output.finish()

    def _tail(
        self, block: fx.Int32, rest: fx.Int32, ring: list[list[Value]], ids: list[Value], best: Value
    ) -> None:
        """The last one to three blocks."""
        most, depth = TRIP_BLOCKS - 1, self.page.depth

        def scores(k: int) -> list[Value]:
            ahead, slot = k + depth, k % depth
            page = self._page(block + ahead, ids[k]) if ahead < most else None
            after = min(depth - 1, max(most, depth) - 1 - k)
            score, loaded = self.page.score(ring[slot], slot, page, pages_after=after)
            if page is not None:
                ring[slot] = loaded
            left = most - 1 - k
            if not left:
                return [score]
            none = [self.minus_infinity] * left
            return [score, *d.if_else(rest > k + 1, [T.f32] * left, lambda: scores(k + 1), lambda: none)]

        found = [*scores(0), self.minus_infinity]
        for value in ring[-1]:
            d.keep(value)
        self.output.store(block, found, best, end=self.part.end)

    def _unpacked(self, values: list[Value]) -> tuple[list[list[Value]], list[Value], Value]:
        """Loop-carried state: the pages in flight, the ids of the pages to request, the maxima so far."""
        count, depth = self.page.values, self.page.depth
        ring = [values[count * k : count * (k + 1)] for k in range(depth)]
        return ring, values[count * depth : -1], values[-1]

    # ---- queries and pages ----
    def _load_queries(self) -> list[Value]:
        """32 bytes of this lane's row; rows past the end repeat the last one."""
        row = self.part.query_start * self.heads + d.min_i32(self.share.row(), self.rows - 1)
        address = d.zext(row) * HEAD_DIM + d.zext(self.share.quarter() * (HEAD_DIM // 4))
        base = d.offset(d.pointer(load_argument("q"), d.GLOBAL), address)
        return [d.load(4, d.offset(base, geo.OPERAND_BYTES * half)) for half in range(2)]

    def _page_id(self, block: fx.Int32) -> Value:
        """Page of a block, of the request's last block past its end: columns beyond may hold anything."""
        column = d.min_i32(block, self.part.num_blocks - 1)
        return d.scalar_load(1, self.table_row + d.zext(column) * 4)

    def _ahead(self, block: fx.Int32, step: fx.Int32, k: int) -> fx.Int32:
        """The block whose page is requested while the k-th block of a trip from ``block`` is scored."""
        trips, within = divmod(k + self.page.depth, TRIP_BLOCKS)
        return block + step + within if trips else block + within

    def _ids_ahead(self, block: fx.Int32, step: fx.Int32) -> list[Value]:
        """Pages that a trip requests."""
        return [self._page_id(self._ahead(block, step, k)) for k in range(TRIP_BLOCKS)]

    def _page(self, block: fx.Int32, page_id: Value, *, diagonal: bool = False) -> Value:
        """Descriptor of a page, of the cache's nearest one where there is no such page. Of 0 bytes where the
        page is not needed: loads then give 0 without traffic or a branch."""
        page_id = d.clamped(page_id, 0, self.arguments.num_pages - 1)
        needed = (block >= self.arguments.init_blocks) & (block < self.needed_end) if not diagonal else None
        size = d.i32(PAGE_BYTES) if needed is None else d.select(needed, d.i32(PAGE_BYTES), d.i32(0))
        return d.buffer(self.arguments.pages + d.zext(page_id) * self.arguments.page_stride, size)

    # ---- the diagonal ----
    def _diagonal_scores(self, queries: list[Value]) -> Value:
        """Each row's score of its partly visible block, before the ring is loaded.

        Only without local blocks: else that block's score is a sentinel. A request's rows end in two blocks
        at most.
        """
        part = self.part
        token = d.shift_right(self.share.row(), self.log_heads)
        self.row_position = self.position + token

        def block_scores(block: fx.Int32, scores: list[Value]) -> list[Value]:
            def masked() -> list[Value]:
                page_id = self._page_id(block)
                self.page.queries = _as_operand(queries)
                page = self.page.load(self._page(block, page_id, diagonal=True), 0)
                ahead = self.row_position - block * BLOCK_TOKENS - self.share.quarter() * geo.ACCUMULATORS

                def start(m: int) -> Value:
                    hidden = [
                        d.select(ahead >= geo.MFMA_ROWS * m + i, d.f32(0.0), d.f32(_HIDDEN))
                        for i in range(geo.ACCUMULATORS)
                    ]
                    return d.pack(hidden, T.f32)

                score, _ = self.page.score(page, 0, None, pages_after=0, start=start)
                score = d.fold(16, *[d.fold(32, score, score)] * 2)
                own = (self.row_position >= block * BLOCK_TOKENS) & (
                    self.row_position < (block + 1) * BLOCK_TOKENS
                )
                return [d.select(own, score, scores[0])]

            mine = part.has(block, self.share.spread)
            return d.if_else(mine, [T.f32], masked, lambda: scores)

        first = d.shift_right(self.position + 1, geo.LOG_BLOCK)
        end = d.select(self.local_blocks <= 0, part.num_blocks, first)
        (found,) = d.for_range(first, end, 1, [self.minus_infinity], block_scores)
        return found


def _as_operand(halves: list[Value]) -> Value:
    return d.pin(d.concatenate(*(d.even_then_odd(half) for half in halves)))


def trace(
    heads: int, layout: Layout, arguments: DecodeArguments, workgroup: fx.Int32, thread: fx.Int32
) -> None:
    """Trace the kernel's body for one lane."""
    lane, wave = thread & (geo.LANES - 1), d.uniform(d.shift_right(thread, geo.LOG_LANES))
    lds = d.shared_memory(LDS_BYTES if layout == "registers" else STAGED_LDS_BYTES)
    lut_offset = thread * geo.LUT_ENTRY_BYTES
    entry = d.load(2, d.offset(d.pointer(arguments.lut, d.GLOBAL), d.zext(lut_offset)))
    share = Share(arguments, workgroup, wave, lane, lds)
    # The LUT holds magnitudes; the sign bit of a scale byte, the upper half of the entries, is added here.
    signs = d.shift_right(thread, geo.log2(geo.LUT_ENTRIES) - 1) * d.as_int32(0x80808080)
    entry = d.pack([fx.Int32(d.element(entry, k)) ^ signs for k in range(2)], T.i32)
    d.store(entry, d.offset(d.offset(lds, lut_offset), LUT_AT), geo.LUT_ENTRY_BYTES)
    clear_spread_maxima(lds, thread)
    d.lds_barrier()
    page = RegisterPages(lds, lane) if layout == "registers" else StagedPages(lds, wave, lane)
    share.for_each(lambda part: RequestScorer(heads, arguments, share, part, page).run())
    store_spread_maxima(share)


def build(heads: int, layout: Layout) -> Launch:
    """The launcher for ``heads`` heads: of :class:`DecodeArguments`, the number of workgroups, a stream."""
    return launcher(
        "score_decode",
        geo.decode_name(heads, layout),
        DecodeArguments,
        lambda arguments: trace(heads, layout, arguments, fx.block_idx.x, fx.thread_idx.x),
        waves_per_simd=geo.WAVES_PER_SIMD,
    )
