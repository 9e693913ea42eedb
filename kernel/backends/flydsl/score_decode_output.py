"""What a wave writes of a request: scores, maxima of 16-block groups, -inf past the request's blocks.

After the reduction lane 16 g + n holds the score of the g-th of four blocks for query row n. A group's
maximum is the wave's own where it has the whole group. Where the group is spread over the workgroup's waves,
each leaves its rows' maxima in LDS and :func:`store_spread_maxima` joins them at the kernel's end.
"""

from __future__ import annotations

from typing import Literal

import flydsl.expr as fx
from flydsl.expr.typing import T

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl.device import Value
from kernel.backends.flydsl.score_decode_arguments import (
    MAX_ROWS,
    PARTIAL_BYTES,
    PARTIALS_AT,
    PLACE_BYTES,
    PLACES_AT,
    SPREAD_GROUPS,
    TRIP_BLOCKS,
    DecodeArguments,
)
from kernel.backends.flydsl.score_decode_share import RequestPart, Share
from kernel.batch import INIT_SCORE, LOCAL_SCORE
from kernel.plan import MAXIMA_BLOCKS


class RequestOutput:
    """Traces the stores of one request's part.

    Args:
        heads: index heads, H.
        arguments: the kernel's arguments.
        share: whose part it is.
        part: the request and the wave's blocks of it.
        rows: query rows of the request.
        row_position: position of this lane's query.
        diagonal: score of the block that this lane's row sees in part.
        plain_end: blocks from the init blocks' end to here every row sees whole and without sentinels.
    """

    def __init__(
        self,
        heads: int,
        arguments: DecodeArguments,
        share: Share,
        part: RequestPart,
        rows: fx.Int32,
        row_position: fx.Int32,
        diagonal: Value,
        plain_end: fx.Int32,
    ) -> None:
        self.log_heads, self.head_mask = heads.bit_length() - 1, heads - 1
        self.arguments, self.share, self.part, self.rows = arguments, share, part, rows
        self.minus_infinity = d.f32(float("-inf"))
        self.diagonal = diagonal
        self.plain_end = plain_end
        quarter, row = share.quarter(), share.row()
        # Blocks that this lane's scores of a trip meet when the trip's first block is so far.
        self.past = d.shift_right_signed(row_position, 7) + 1 - quarter
        self.diagonal_block = d.shift_right_signed(row_position + 1, 7) - quarter
        token = part.query_start + d.shift_right(row, self.log_heads)
        self.live = (row < rows) & d.below(token, arguments.late("total_q"))
        self.scores_at = d.pointer(self._row_at("score", row, token) + d.wide(quarter) * 4, d.GLOBAL)

    def _row_at(self, kind: Literal["score", "maxima"], row: Value, token: Value) -> fx.Int64:
        """Address of the first cell of a row."""
        late = self.arguments.late
        cell = d.wide(row & self.head_mask) * late(f"{kind}_head_stride")
        cell = cell + d.wide(token) * late(f"{kind}_token_stride")
        return fx.Int64(late("scores" if kind == "score" else kind) + cell * 4)

    # ---- four blocks ----
    def store(self, block: fx.Int32, scores: list[Value], best: Value, end: Value | None = None) -> Value:
        """Store four blocks' scores and take them into the maxima.

        Args:
            block: the first of them.
            scores: the maxima over each lane's tokens, for each block.
            best: this lane's maximum of the current group so far.
            end: nothing at or past it is stored; all four blocks where None.

        Returns:
            ``best`` for the next trip.
        """
        halves = [d.pin(d.fold(32, scores[k], scores[k + 2])) for k in range(2)]
        (score,) = d.if_else(
            self._plain(block),
            [T.f32],
            lambda: [d.fold(16, *halves)],
            lambda: [self._with_sentinels(block, d.fold(16, *halves))],
        )
        stored = self.live if end is None else self.live & (self.share.quarter() < end - block)
        at = d.offset(self.scores_at, d.wide(block) * 4)
        d.if_then(stored, lambda: d.store(score, at, 4))

        best = d.max_f32(best, score)
        following = block + TRIP_BLOCKS
        ends = ((following & (MAXIMA_BLOCKS - 1)) == 0) | (following >= self.part.end)
        ends = self.share.wants_maxima & (ends | (self.share.spread != 0))

        def leave() -> list[Value]:
            half = d.fold(32, best, best)
            highest = d.fold(16, half, half)
            d.if_then(
                self.share.spread != 0,
                lambda: self._leave_partial(block, highest),
                lambda: self._store_maximum(block, highest),
            )
            return [self.minus_infinity]

        (best_after,) = d.if_else(ends, [T.f32], leave, lambda: [best])
        return best_after

    def _plain(self, block: fx.Int32) -> fx.Boolean:
        """Whether every row sees all four blocks whole and without sentinels."""
        following = block + TRIP_BLOCKS
        return (block >= self.arguments.init_blocks) & (following <= self.plain_end)

    def _with_sentinels(self, block: fx.Int32, score: Value) -> Value:
        score = d.select(self.diagonal_block == block, self.diagonal, score)
        init_blocks = self.arguments.init_blocks - block
        score = d.select(self.share.quarter() < init_blocks, d.f32(INIT_SCORE), score)
        local_end = block + self.arguments.late("local_blocks")
        score = d.select(self.past <= local_end, d.f32(LOCAL_SCORE), score)
        return d.select(self.past <= block, self.minus_infinity, score)

    # ---- maxima ----
    def _maxima_at(self, block: fx.Int32) -> fx.Int64:
        """Address of the maximum of a block's group; computed when needed, no registers are held for it."""
        row = self.share.row()
        token = self.part.query_start + d.shift_right(row, self.log_heads)
        return self._row_at("maxima", row, token) + d.wide(d.shift_right(block, 4)) * 4

    def _store_maximum(self, block: fx.Int32, best: Value) -> None:
        at = d.pointer(self._maxima_at(block), d.GLOBAL)
        d.if_then(self.live & (self.share.lane() < MAX_ROWS), lambda: d.store(best, at, 4))

    def _leave_partial(self, block: fx.Int32, best: Value) -> None:
        share, part = self.share, self.part
        slot = part.slot + d.shift_right(block - part.first, 4)

        def leave() -> None:
            at = share.wave * (MAX_ROWS * 4) + share.lane() * 4 + slot * PARTIAL_BYTES
            d.store(best, d.offset(d.offset(share.lds, at), PARTIALS_AT), 4)

            def leave_place() -> None:
                at = share.lane() * 8 + slot * PLACE_BYTES
                place = d.offset(d.offset(share.lds, at), PLACES_AT)
                d.store(d.i64(self._maxima_at(block)), place, 8)

            d.if_then((part.first & (MAXIMA_BLOCKS - 1)) == 0, leave_place)

        d.if_then(self.live & (share.lane() < MAX_ROWS), leave)

    # ---- past the request's blocks ----
    def fill(self) -> None:
        """-inf from the request's blocks to ``fill_end``, by the wave of its last block."""
        part, fill_end = self.part, self.arguments.late("fill_end")

        def fill_row(row: fx.Int32, _: list[Value]) -> list[Value]:
            token = part.query_start + d.shift_right(row, self.log_heads)

            def fill_columns(kind: Literal["score", "maxima"], first: Value, end: Value) -> None:
                base = d.pointer(self._row_at(kind, row, token), d.GLOBAL)

                def store(column: fx.Int32, _: list[Value]) -> list[Value]:
                    mine = column + self.share.lane()
                    at = d.offset(base, d.wide(mine) * 4)
                    d.if_then(mine < end, lambda: d.store(self.minus_infinity, at, 4))
                    return []

                d.for_range(first, end, geo.LANES, [], store)

            def fill_both() -> None:
                fill_columns("score", part.num_blocks, fill_end)
                groups = [d.shift_right(x + (MAXIMA_BLOCKS - 1), 4) for x in (part.num_blocks, fill_end)]
                end = d.select(self.share.wants_maxima, groups[1], groups[0])
                fill_columns("maxima", groups[0], end)

            d.if_then(d.below(token, self.arguments.late("total_q")), fill_both)
            return []

        last = part.has(part.num_blocks - 1, self.share.spread) & (part.num_blocks < fill_end)
        d.for_range(0, d.select(last, self.rows, d.i32(0)), 1, [], fill_row)


def clear_spread_maxima(lds: Value, thread: fx.Int32) -> None:
    """Before the kernel's first barrier: no maxima, and no place for them."""

    def clear_maximum() -> None:
        d.store(d.f32(float("-inf")), d.offset(d.offset(lds, thread * 4), PARTIALS_AT), 4)

    d.if_then(thread < SPREAD_GROUPS * PARTIAL_BYTES // 4, clear_maximum)
    places = SPREAD_GROUPS * PLACE_BYTES // 8
    place = d.offset(d.offset(lds, thread * 8), PLACES_AT)
    d.if_then(thread < places, lambda: d.store(d.i64(0), place, 8))


def store_spread_maxima(share: Share) -> None:
    """At the kernel's end: wave s joins and stores the maxima of the workgroup's group s."""

    def store_group() -> None:
        d.lds_barrier()

        def join() -> None:
            at = share.row() * 4 + share.wave * PARTIAL_BYTES
            base = d.offset(d.offset(share.lds, at), PARTIALS_AT)
            partials = [d.load_f32(d.offset(base, wave * MAX_ROWS * 4)) for wave in range(geo.WAVES)]
            highest = partials[0]
            for partial in partials[1:]:
                highest = d.max_f32(highest, partial)
            place_at = d.offset(share.lds, share.row() * 8 + share.wave * PLACE_BYTES)
            low, high = (d.element(d.load(2, d.offset(place_at, PLACES_AT)), k) for k in range(2))
            place = d.wide(low) | (d.wide(high) << 32)
            stored = (place != 0) & (share.lane() < MAX_ROWS)
            d.if_then(stored, lambda: d.store(highest, d.pointer(place, d.GLOBAL), 4))

        d.if_then(share.wave < SPREAD_GROUPS, join)

    d.if_then(share.spread != 0, store_group)
