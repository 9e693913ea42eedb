"""Which blocks a wave scores: the split of all requests' blocks over the waves, made on the device.

The grid never depends on a length. Every wave adds up the units of all requests, takes its equal share of
their concatenation and looks up the requests that it lies in. A unit is

    one block, of one wave                              where no group maxima are wanted,
    a group of 16 blocks, of one wave                   where they are and there are many groups,
    a group, 4 blocks to each wave of a workgroup       where they are and there are few.

A lane counts the units of ``ceil(batch / 64)`` consecutive requests; the first and the last request are then
found among the lanes' sums and, where a lane stands for more than one, among the 64 requests from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import flydsl.expr as fx
from flydsl._mlir.dialects import arith
from flydsl.expr.typing import T

from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl import ops as d
from kernel.backends.flydsl.decode_page import (
    PARTIAL_BYTES,
    PARTIALS_AT,
    PLACE_BYTES,
    PLACES_AT,
    REQUEST_BYTES,
    REQUESTS_AT,
    SPREAD_GROUPS,
    TRIP_BLOCKS,
    load_argument,
)
from kernel.backends.flydsl.geometry import DecodeArguments
from kernel.backends.flydsl.ops import Value, ballot, popcount, prefix_sum, readlane
from kernel.batch import INIT_SCORE, LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS
from kernel.plan import MAXIMA_BLOCKS

_LOG_WAVES, _LOG_GROUP, _LOG_TRIP = (geo.log2(geo.WAVES), geo.LOG_MAXIMA, geo.log2(TRIP_BLOCKS))
_FIELDS = REQUEST_BYTES // 4


@dataclass(frozen=True)
class RequestPart:
    """One request and the blocks of it that a wave scores; all uniform.

    Attributes:
        table_row, query_start, query_len, seq_len: of the request. num_blocks: blocks it has scores for.
        first: the wave's first block. end: the block after its last, not after the part's first block where
            the wave has none. log_step: blocks of one trip follow those of the trip before by 2^log_step.
        slot: number of the part's first group among the workgroup's, where these are spread over its waves.
    """

    table_row: fx.Int32
    query_start: fx.Int32
    query_len: fx.Int32
    seq_len: fx.Int32
    num_blocks: fx.Int32
    first: fx.Int32
    end: fx.Int32
    log_step: fx.Int32
    slot: fx.Int32

    def has(self, block: Value, spread: Value) -> fx.Boolean:
        """Whether a block is the wave's."""
        inside = (block >= self.first) & (block < self.end)
        quarter = ((block - self.first) & (MAXIMA_BLOCKS - 1)) < TRIP_BLOCKS
        return fx.Boolean(inside & (quarter | (spread == 0)))


class Share:
    """Traces the split.

    Args:
        arguments: the kernel's arguments.
        workgroup: number of this workgroup.
        wave: number of this wave in the workgroup, uniform.
        lane: number of this lane in the wave.
        lds: the workgroup's LDS.
    """

    def __init__(
        self, arguments: DecodeArguments, workgroup: fx.Int32, wave: fx.Int32, lane: fx.Int32, lds: Value
    ) -> None:
        self.arguments = arguments
        self.wave, self.lds, self._lane = wave, lds, lane
        self.wants_maxima = arguments.maxima != 0
        self.log_unit = fx.Int32(d.select(self.wants_maxima, d.i32(_LOG_GROUP), d.i32(0)))
        self.requests_at = d.offset(lds, wave * (geo.LANES * REQUEST_BYTES) + REQUESTS_AT)
        self._split(workgroup)

    # ---- lanes ----
    def lane(self) -> fx.Int32:
        """This lane's number, opaque to LLVM: what derives from it takes no register before it is needed."""
        return fx.Int32(d.pin(self._lane))

    def quarter(self) -> fx.Int32:
        """Which of four blocks this lane's scores are of."""
        return d.shift_right(self.lane(), geo.LOG_MFMA_ROWS)

    def row(self) -> fx.Int32:
        """Which query row they are of."""
        return self.lane() & (geo.MFMA_ROWS - 1)

    # ---- requests ----
    def _bounds(self) -> list[fx.Int32]:
        """Upper bounds of offsets, query lengths and lengths; held by no register across a request."""
        return [load_argument(name) for name in ("total_q", "max_query_len", "max_seq_len")]

    def _request(self, number: Value, bounds: list[fx.Int32]) -> list[Value]:
        """Table row, query start, query end and length of a request, one a lane; without queries past the
        batch.

        The index is clamped, and not left to a descriptor's bounds: LLVM may merge loads, and of a merged
        load that is partly outside even the inner part may be 0.
        """
        args = self.arguments
        at = fx.Int32(arith.minui(d.i32(number), d.i32(args.batch - 1))) * 4
        fields = [
            d.buffer_load(1, d.buffer(base, args.batch * 4), at)
            for base in (args.table_rows, args.query_starts, args.query_ends, args.seq_lens)
        ]
        seq_len = d.select(d.less_unsigned(number, args.batch), fields[3], d.i32(0))
        return self._clamped([*fields[:3], seq_len], bounds)

    def _clamped(self, fields: list[Value], bounds: list[fx.Int32]) -> list[Value]:
        """A request's fields within the rows of ``q`` and the launch's bounds, see
        :func:`kernel.step.clamped_lengths`; start at or behind end where it has no queries.

        Queries that stand before the first key are left out.
        """
        total_q, max_query_len, max_seq_len = bounds
        table_row, start, end, seq_len = fields
        start = d.max_i32(start, 0)
        query_len = d.min_i32(d.clamped(end, 0, total_q) - start, max_query_len)
        seq_len = d.clamped(seq_len, 0, max_seq_len)
        end = start + query_len
        return [table_row, end - d.min_i32(query_len, seq_len), end, seq_len]

    def _blocks(self, fields: list[Value]) -> fx.Int32:
        """Blocks that a request has scores for."""
        _, start, end, seq_len = (fx.Int32(field) for field in fields)
        blocks = d.shift_right(seq_len + (BLOCK_TOKENS - 1), geo.LOG_BLOCK)
        return fx.Int32(d.select(start < end, blocks, d.i32(0)))

    def _units(self, blocks: fx.Int32) -> fx.Int32:
        group = d.shift_right(blocks + (MAXIMA_BLOCKS - 1), _LOG_GROUP)
        return fx.Int32(d.select(self.wants_maxima, group, blocks))

    # ---- the split ----
    def _split(self, workgroup: fx.Int32) -> None:
        per_lane = d.shift_right(self.arguments.batch + (geo.LANES - 1), geo.LOG_LANES)
        bounds = self._bounds()

        def count(i: fx.Int32, carried: list[Value]) -> list[Value]:
            fields = self._request(self._lane * per_lane + i, bounds)
            return [fx.Int32(carried[0]) + self._units(self._blocks(fields)), *fields]

        own, *seen = d.for_range(0, per_lane, 1, [d.i32(0)] * (1 + _FIELDS), count)
        own = fx.Int32(own)
        upto = prefix_sum(own)
        total = readlane(upto, geo.LANES - 1)
        log_workgroups = self.arguments.log_workgroups
        few = total <= d.shift_left(SPREAD_GROUPS, log_workgroups)
        self.spread = fx.Int32(d.select(self.wants_maxima & few, d.i32(1), d.i32(0)))
        spread = self.spread != 0
        share = d.select(spread, workgroup, workgroup * geo.WAVES + self.wave)
        log_shares = log_workgroups + d.select(spread, d.i32(0), d.i32(_LOG_WAVES))
        self.first_unit = _scaled(share, total, log_shares)
        self.end_unit = _scaled(fx.Int32(share) + 1, total, log_shares)

        one_each = per_lane == 1
        first_lane = popcount(ballot(upto <= self.first_unit))
        last_lane = popcount(ballot(upto < self.end_unit))
        self.first_seen = fx.Int32(d.select(one_each, d.i32(0), first_lane * per_lane))
        before = fx.Int32(
            d.select(one_each, d.i32(0), readlane(upto - own, d.min_i32(first_lane, geo.LANES - 1)))
        )
        seen = d.if_else(
            one_each,
            [T.i32] * _FIELDS,
            lambda: seen,
            lambda: self._request(self.first_seen + self._lane, bounds),
        )
        d.store(d.pack(seen, T.i32), d.offset(self.requests_at, self._lane * REQUEST_BYTES), REQUEST_BYTES)
        own = self._units(self._blocks(seen))
        upto = prefix_sum(own)
        first = popcount(ballot(upto <= self.first_unit - before))
        last = popcount(ballot(upto < self.end_unit - before))
        at_first = readlane(upto - own, d.min_i32(first, geo.LANES - 1))
        past = readlane(upto, geo.LANES - 1)
        self.units_before = before + d.select(first < geo.LANES, at_first, past)
        self.first_request = self.first_seen + first
        end = fx.Int32(d.select(last < geo.LANES, self.first_seen + last + 1, (last_lane + 1) * per_lane))
        end = d.min_i32(end, self.arguments.batch)
        self.end_request = fx.Int32(d.select(self.first_unit < self.end_unit, end, self.first_request))

    def for_each(self, score: Callable[[RequestPart], None]) -> None:
        """Trace ``score`` for every request that the wave's share lies in."""

        def request(number: fx.Int32, carried: list[Value]) -> list[Value]:
            fields = self._fields(number)
            blocks = self._blocks(fields)
            units, before = self._units(blocks), fx.Int32(carried[0])
            first = d.max_i32(self.first_unit - before, 0)
            end = d.min_i32(self.end_unit - before, units)

            def scored() -> None:
                score(self._part(number, fields, blocks, first, end, before))

            d.if_then(first < end, scored)
            return [before + units]

        d.for_range(self.first_request, self.end_request, 1, [self.units_before], request)

    def _fields(self, number: fx.Int32) -> list[Value]:
        """A request's fields, uniform: from LDS for the first 64, else from memory."""
        kept = number - self.first_seen

        def from_lds() -> list[Value]:
            found = d.load(_FIELDS, d.offset(self.requests_at, kept * REQUEST_BYTES))
            return [d.uniform(d.element(found, k)) for k in range(_FIELDS)]

        def from_memory() -> list[Value]:
            names = ("table_rows", "query_starts", "query_ends", "seq_lens")
            cells = (load_argument(name) + d.zext(number) * 4 for name in names)
            return self._clamped([d.scalar_load(1, cell) for cell in cells], self._bounds())

        return d.if_else(kept < geo.LANES, [T.i32] * _FIELDS, from_lds, from_memory)

    def _part(
        self, number: fx.Int32, fields: list[Value], blocks: fx.Int32, first: Value, end: Value, before: Value
    ) -> RequestPart:
        table_row, start, query_end, seq_len = (fx.Int32(field) for field in fields)
        # The first wave rotates from request to request, so that short requests keep all four busy.
        quarter = (self.wave + number) & (geo.WAVES - 1)
        first_block = d.shift_left(first, self.log_unit)
        end_block = d.min_i32(d.shift_left(end, self.log_unit), blocks)
        spread = self.spread != 0
        return RequestPart(
            table_row=table_row,
            query_start=start,
            query_len=query_end - start,
            seq_len=seq_len,
            num_blocks=blocks,
            first=first_block + d.select(spread, quarter * TRIP_BLOCKS, d.i32(0)),
            end=end_block,
            log_step=fx.Int32(d.select(spread, d.i32(_LOG_GROUP), d.i32(_LOG_TRIP))),
            slot=first + before - self.first_unit,
        )


def _scaled(share: Value, total: fx.Int32, log_shares: Value) -> fx.Int32:
    """``share * total >> log_shares`` in 64 bits."""
    product = d.zext(share) * d.zext(total)
    return fx.Int32(arith.trunci(T.i32, arith.shrui(d.i64(product), d.i64(d.i32(log_shares)))))


# ---- Output ----


class RequestOutput:
    """Traces the stores of one request's part: scores, maxima of 16-block groups, -inf past its blocks.

    After the reduction lane 16 g + n holds the score of the g-th of four blocks for query row n. A wave
    stores a group's maximum where it scored the whole group. Where the group is spread over the workgroup's
    waves, each puts its rows' maxima in LDS and :func:`store_spread_maxima` reduces them at the kernel's end.

    Args:
        heads: index heads, H.
        arguments: the kernel's arguments.
        share: whose part it is.
        part: the request and the wave's blocks of it.
        rows: query rows of the request.
        row_position: position of this lane's query.
        diagonal: score of the block that this lane's row sees in part.
        unmasked_end: blocks from the init blocks' end to here are fully visible to every row, without
            sentinels.
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
        unmasked_end: fx.Int32,
    ) -> None:
        self.log_heads, self.head_mask = geo.log2(heads), heads - 1
        self.arguments, self.share, self.part, self.rows = arguments, share, part, rows
        self.minus_infinity = d.f32(float("-inf"))
        self.diagonal = diagonal
        self.unmasked_end = unmasked_end
        quarter, row = share.quarter(), share.row()
        # Compared with a trip's first block: where this lane's block lies past the row, or is its diagonal.
        self.past = d.shift_right(row_position, geo.LOG_BLOCK) + 1 - quarter
        self.diagonal_block = d.shift_right(row_position + 1, geo.LOG_BLOCK) - quarter
        token = part.query_start + d.shift_right(row, self.log_heads)
        self.live = row < rows
        self.scores_at = d.pointer(self._row_at("score", row, token) + d.zext(quarter) * 4, d.GLOBAL)

    def _row_at(self, kind: Literal["score", "maxima"], row: Value, token: Value) -> fx.Int64:
        """Address of the first cell of a row."""
        cell = d.zext(row & self.head_mask) * load_argument(f"{kind}_head_stride")
        cell = cell + d.zext(token) * load_argument(f"{kind}_token_stride")
        return fx.Int64(load_argument("scores" if kind == "score" else kind) + cell * 4)

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
            self._unmasked(block),
            [T.f32],
            lambda: [d.fold(16, *halves)],
            lambda: [self._with_sentinels(block, d.fold(16, *halves))],
        )
        stored = self.live if end is None else self.live & (self.share.quarter() < end - block)
        at = d.offset(self.scores_at, d.zext(block) * 4)
        d.if_then(stored, lambda: d.store(score, at, 4))

        best = d.max_f32(best, score)
        following = block + TRIP_BLOCKS
        ends = ((following & (MAXIMA_BLOCKS - 1)) == 0) | (following >= self.part.end)
        ends = self.share.wants_maxima & (ends | (self.share.spread != 0))

        def flush() -> list[Value]:
            half = d.fold(32, best, best)
            highest = d.fold(16, half, half)
            d.if_then(
                self.share.spread != 0,
                lambda: self._store_partial(block, highest),
                lambda: self._store_maximum(block, highest),
            )
            return [self.minus_infinity]

        (best_after,) = d.if_else(ends, [T.f32], flush, lambda: [best])
        return best_after

    def _unmasked(self, block: fx.Int32) -> fx.Boolean:
        """Whether all four blocks are fully visible to every row and get no sentinel."""
        following = block + TRIP_BLOCKS
        return (block >= self.arguments.init_blocks) & (following <= self.unmasked_end)

    def _with_sentinels(self, block: fx.Int32, score: Value) -> Value:
        score = d.select(self.diagonal_block == block, self.diagonal, score)
        init_blocks = self.arguments.init_blocks - block
        score = d.select(self.share.quarter() < init_blocks, d.f32(INIT_SCORE), score)
        local_end = block + load_argument("local_blocks")
        score = d.select(self.past <= local_end, d.f32(LOCAL_SCORE), score)
        return d.select(self.past <= block, self.minus_infinity, score)

    # ---- maxima ----
    def _maxima_at(self, block: fx.Int32) -> fx.Int64:
        """Address of the maximum of a block's group, computed when needed: no registers are held for it."""
        row = self.share.row()
        token = self.part.query_start + d.shift_right(row, self.log_heads)
        return self._row_at("maxima", row, token) + d.zext(d.shift_right(block, geo.LOG_MAXIMA)) * 4

    def _store_maximum(self, block: fx.Int32, best: Value) -> None:
        at = d.pointer(self._maxima_at(block), d.GLOBAL)
        d.if_then(self.live & (self.share.lane() < geo.MAX_ROWS), lambda: d.store(best, at, 4))

    def _store_partial(self, block: fx.Int32, best: Value) -> None:
        share, part = self.share, self.part
        slot = part.slot + d.shift_right(block - part.first, geo.LOG_MAXIMA)

        def store() -> None:
            at = share.wave * (geo.MAX_ROWS * 4) + share.lane() * 4 + slot * PARTIAL_BYTES
            d.store(best, d.offset(d.offset(share.lds, at), PARTIALS_AT), 4)

            def store_place() -> None:
                at = share.lane() * 8 + slot * PLACE_BYTES
                place = d.offset(d.offset(share.lds, at), PLACES_AT)
                d.store(d.i64(self._maxima_at(block)), place, 8)

            d.if_then((part.first & (MAXIMA_BLOCKS - 1)) == 0, store_place)

        d.if_then(self.live & (share.lane() < geo.MAX_ROWS), store)

    # ---- past the request's blocks ----
    def finish(self) -> None:
        """What the wave of the request's last block stores beside scores."""
        d.if_then(self.part.has(self.part.num_blocks - 1, self.share.spread), self._finish)

    def _finish(self) -> None:
        num_blocks = load_argument("num_blocks")
        d.if_then(num_blocks != 0, lambda: self._store_num_blocks(num_blocks))
        self._fill()

    def _store_num_blocks(self, num_blocks: fx.Int64) -> None:
        """``nb`` of the request's query tokens."""
        part, query = self.part, self.share.lane()
        position = part.seq_len - part.query_len + query
        blocks = d.i32(d.shift_right(position, geo.LOG_BLOCK) + 1)
        at = d.pointer(num_blocks + d.zext(part.query_start + query) * 4, d.GLOBAL)
        d.if_then(query < part.query_len, lambda: d.store(blocks, at, 4))

    def _fill(self) -> None:
        """-inf from the request's blocks to ``fill_end``."""
        part, fill_end = self.part, load_argument("fill_end")

        def fill_row(row: fx.Int32, _: list[Value]) -> list[Value]:
            token = part.query_start + d.shift_right(row, self.log_heads)

            def fill_columns(kind: Literal["score", "maxima"], first: Value, end: Value) -> None:
                base = d.pointer(self._row_at(kind, row, token), d.GLOBAL)

                def store(column: fx.Int32, _: list[Value]) -> list[Value]:
                    mine = column + self.share.lane()
                    at = d.offset(base, d.zext(mine) * 4)
                    d.if_then(mine < end, lambda: d.store(self.minus_infinity, at, 4))
                    return []

                d.for_range(first, end, geo.LANES, [], store)

            fill_columns("score", part.num_blocks, fill_end)
            groups = [
                d.shift_right(x + (MAXIMA_BLOCKS - 1), geo.LOG_MAXIMA) for x in (part.num_blocks, fill_end)
            ]
            end = d.select(self.share.wants_maxima, groups[1], groups[0])
            fill_columns("maxima", groups[0], end)
            return []

        filled = part.num_blocks < fill_end
        d.for_range(0, d.select(filled, self.rows, d.i32(0)), 1, [], fill_row)


def clear_spread_maxima(lds: Value, thread: fx.Int32) -> None:
    """Initialise the spread groups' maxima and addresses, before the kernel's first barrier."""

    def clear_maximum() -> None:
        d.store(d.f32(float("-inf")), d.offset(d.offset(lds, thread * 4), PARTIALS_AT), 4)

    d.if_then(thread < SPREAD_GROUPS * PARTIAL_BYTES // 4, clear_maximum)
    places = SPREAD_GROUPS * PLACE_BYTES // 8
    place = d.offset(d.offset(lds, thread * 8), PLACES_AT)
    d.if_then(thread < places, lambda: d.store(d.i64(0), place, 8))


def store_spread_maxima(share: Share) -> None:
    """At the kernel's end: wave s reduces and stores the maxima of the workgroup's group s."""

    def store_group() -> None:
        d.lds_barrier()

        def join() -> None:
            at = share.row() * 4 + share.wave * PARTIAL_BYTES
            base = d.offset(d.offset(share.lds, at), PARTIALS_AT)
            partials = [d.load_f32(d.offset(base, wave * geo.MAX_ROWS * 4)) for wave in range(geo.WAVES)]
            highest = partials[0]
            for partial in partials[1:]:
                highest = d.max_f32(highest, partial)
            place_at = d.offset(share.lds, share.row() * 8 + share.wave * PLACE_BYTES)
            low, high = (d.element(d.load(2, d.offset(place_at, PLACES_AT)), k) for k in range(2))
            place = d.zext(low) | (d.zext(high) << 32)
            stored = (place != 0) & (share.lane() < geo.MAX_ROWS)
            d.if_then(stored, lambda: d.store(highest, d.pointer(place, d.GLOBAL), 4))

        d.if_then(share.wave < SPREAD_GROUPS, join)

    d.if_then(share.spread != 0, store_group)
