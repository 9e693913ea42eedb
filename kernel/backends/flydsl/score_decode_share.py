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

import flydsl.expr as fx
from flydsl._mlir.dialects import arith
from flydsl.expr.typing import T

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl.device import Value
from kernel.backends.flydsl.lane_scan import lane_value, prefix_sum
from kernel.backends.flydsl.lanes import ballot, count_lanes
from kernel.backends.flydsl.score_decode_arguments import (
    REQUEST_BYTES,
    REQUESTS_AT,
    SPREAD_GROUPS,
    TRIP_BLOCKS,
    DecodeArguments,
)
from kernel.contract import BLOCK_TOKENS
from kernel.plan import MAXIMA_BLOCKS

_LOG_WAVES, _LOG_GROUP, _LOG_TRIP = (geo.WAVES.bit_length() - 1, 4, 2)
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
        self.most_blocks = d.minimum(arguments.score_blocks, arguments.table_width)
        self.wants_maxima = arguments.maxima != 0
        self.log_unit = fx.Int32(d.select(self.wants_maxima, d.i32(_LOG_GROUP), d.i32(0)))
        self.requests_at = d.offset(lds, wave * (geo.LANES * REQUEST_BYTES) + REQUESTS_AT)
        self._split(workgroup)

    # ---- lanes ----
    def lane(self) -> fx.Int32:
        """This lane's number, hidden: what is made of it takes no register before it is needed."""
        return fx.Int32(d.pin(self._lane))

    def quarter(self) -> fx.Int32:
        """Which of four blocks this lane's scores are of."""
        return d.shift_right(self.lane(), 4)

    def row(self) -> fx.Int32:
        """Which query row they are of."""
        return self.lane() & (geo.MFMA_ROWS - 1)

    # ---- requests ----
    def _request(self, number: Value) -> list[Value]:
        """Table row, query start, query end and length of a request, one a lane; length 0 past the batch.

        The index is clamped, and not left to a descriptor's bounds: LLVM may merge loads, and of a merged
        load that is partly outside even the inner part may be 0.
        """
        args = self.arguments
        at = fx.Int32(arith.minui(d.i32(number), d.i32(args.batch - 1))) * 4
        fields = [
            d.buffer_load(1, d.buffer(base, args.batch * 4), at)
            for base in (args.table_rows, args.query_starts, args.query_ends, args.seq_lens)
        ]
        return [*fields[:3], d.select(d.below(number, args.batch), fields[3], d.i32(0))]

    def _blocks(self, fields: list[Value]) -> fx.Int32:
        """Blocks that a request has scores for. Lengths are not believed: more than fit are cut."""
        _, start, end, seq_len = (fx.Int32(field) for field in fields)
        has_rows = (seq_len > 0) & (end - start > 0)
        blocks = d.minimum(d.shift_right(seq_len + (BLOCK_TOKENS - 1), 7), self.most_blocks)
        return fx.Int32(d.select(has_rows, blocks, d.i32(0)))

    def _units(self, blocks: fx.Int32) -> fx.Int32:
        group = d.shift_right(blocks + (MAXIMA_BLOCKS - 1), _LOG_GROUP)
        return fx.Int32(d.select(self.wants_maxima, group, blocks))

    # ---- the split ----
    def _split(self, workgroup: fx.Int32) -> None:
        per_lane = d.shift_right(self.arguments.batch + (geo.LANES - 1), 6)

        def count(i: fx.Int32, carried: list[Value]) -> list[Value]:
            fields = self._request(self._lane * per_lane + i)
            return [fx.Int32(carried[0]) + self._units(self._blocks(fields)), *fields]

        own, *seen = d.for_range(0, per_lane, 1, [d.i32(0)] * (1 + _FIELDS), count)
        own = fx.Int32(own)
        upto = prefix_sum(own)
        total = lane_value(upto, geo.LANES - 1)
        log_workgroups = self.arguments.log_workgroups
        few = total <= d.shift_left(SPREAD_GROUPS, log_workgroups)
        self.spread = fx.Int32(d.select(self.wants_maxima & few, d.i32(1), d.i32(0)))
        spread = self.spread != 0
        share = d.select(spread, workgroup, workgroup * geo.WAVES + self.wave)
        log_shares = log_workgroups + d.select(spread, d.i32(0), d.i32(_LOG_WAVES))
        self.first_unit = _scaled(share, total, log_shares)
        self.end_unit = _scaled(fx.Int32(share) + 1, total, log_shares)

        one_each = per_lane == 1
        first_lane = count_lanes(ballot(upto <= self.first_unit))
        last_lane = count_lanes(ballot(upto < self.end_unit))
        self.first_seen = fx.Int32(d.select(one_each, d.i32(0), first_lane * per_lane))
        before = fx.Int32(
            d.select(one_each, d.i32(0), lane_value(upto - own, d.minimum(first_lane, geo.LANES - 1)))
        )
        seen = d.if_else(
            one_each, [T.i32] * _FIELDS, lambda: seen, lambda: self._request(self.first_seen + self._lane)
        )
        d.store(d.pack(seen, T.i32), d.offset(self.requests_at, self._lane * REQUEST_BYTES), REQUEST_BYTES)
        own = self._units(self._blocks(seen))
        upto = prefix_sum(own)
        first = count_lanes(ballot(upto <= self.first_unit - before))
        last = count_lanes(ballot(upto < self.end_unit - before))
        at_first = lane_value(upto - own, d.minimum(first, geo.LANES - 1))
        past = lane_value(upto, geo.LANES - 1)
        self.units_before = before + d.select(first < geo.LANES, at_first, past)
        self.first_request = self.first_seen + first
        end = fx.Int32(d.select(last < geo.LANES, self.first_seen + last + 1, (last_lane + 1) * per_lane))
        end = d.minimum(end, self.arguments.batch)
        self.end_request = fx.Int32(d.select(self.first_unit < self.end_unit, end, self.first_request))

    def for_each(self, score: Callable[[RequestPart], None]) -> None:
        """Trace ``score`` for every request that the wave's share lies in."""

        def request(number: fx.Int32, carried: list[Value]) -> list[Value]:
            fields = self._fields(number)
            blocks = self._blocks(fields)
            units, before = self._units(blocks), fx.Int32(carried[0])
            first = d.maximum(self.first_unit - before, 0)
            end = d.minimum(self.end_unit - before, units)

            def scored() -> None:
                score(self._part(number, fields, blocks, first, end, before))

            d.if_then(first < end, scored)
            return [before + units]

        d.for_range(self.first_request, self.end_request, 1, [self.units_before], request)

    def _fields(self, number: fx.Int32) -> list[Value]:
        """A request's fields, uniform: kept in LDS for the first 64, else from memory."""
        kept = number - self.first_seen

        def from_lds() -> list[Value]:
            found = d.load(_FIELDS, d.offset(self.requests_at, kept * REQUEST_BYTES))
            return [d.uniform(d.element(found, k)) for k in range(_FIELDS)]

        def from_memory() -> list[Value]:
            names = ("table_rows", "query_starts", "query_ends", "seq_lens")
            return [d.scalar_load(1, self.arguments.late(name) + d.wide(number) * 4) for name in names]

        return d.if_else(kept < geo.LANES, [T.i32] * _FIELDS, from_lds, from_memory)

    def _part(
        self, number: fx.Int32, fields: list[Value], blocks: fx.Int32, first: Value, end: Value, before: Value
    ) -> RequestPart:
        table_row, start, query_end, seq_len = (fx.Int32(field) for field in fields)
        # Another wave comes first in the next request, so that short requests keep all four busy.
        quarter = (self.wave + number) & (geo.WAVES - 1)
        first_block = d.shift_left(first, self.log_unit)
        end_block = d.minimum(d.shift_left(end, self.log_unit), blocks)
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
    product = d.wide(share) * d.wide(total)
    return fx.Int32(arith.trunci(T.i32, arith.shrui(d.i64(product), d.i64(d.i32(log_shares)))))
