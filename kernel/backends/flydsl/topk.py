"""Top-k of block scores on gfx950, exact and deterministic. One wave selects one row (head, token).

    block_ids[head, token, :] = the k blocks of the greatest scores[head, token, : num_blocks[token]], ties to
                                the lower id; score descending or ids ascending, -1 behind the last

Two kernels for each class of k (16, 32, 64):

    scan     from the scores: reads the row once, in chunks of 2,048 columns, the next one in flight
    group    from the scores and the maxima of groups of 16 columns: the k best groups, ordered by maximum and
             then by lower id, hold the k best columns, so a row reads its maxima and k groups of 64 bytes

The steps, on columns or on groups:

    bound    each lane keeps the maximum key of what it has seen. The 16th largest of the 64 lanes' maxima is
             a lower bound of the 16th best column. About 18 columns pass it whatever the contrast of the
             scores, because 16 of 64 lanes are hit by 18.4 columns thrown at random
    list     the columns that pass are appended to a list in LDS: ballot, prefix count
    place    of a candidate: the number of candidates that beat it, counted against the list

Waves share nothing: there is no barrier.

Floor at 32,768 rows of 4,096 blocks and 8 TB/s: 1 KB of maxima, 16 groups of 64 to 128 bytes and 64 bytes of
ids a row are 8.6 to 12.9 us; the scores alone, 16 KB a row, 67 us. 250 vector instructions a row are 13 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import flydsl.expr as fx
from flydsl._mlir.dialects import arith, llvm
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl import ops as d
from kernel.backends.flydsl.geometry import (
    LANES,
    LOG_LANES,
    LOG_MAXIMA,
    NO_GROUP,
    WAVES,
    Launch,
    TopkArguments,
    Variant,
)
from kernel.backends.flydsl.jit import launcher
from kernel.backends.flydsl.ops import Value, any_lane, ballot, med3, read_first_lane, wave_sync
from kernel.backends.flydsl.topk_candidates import (
    LEAST_BOUND,
    NO_COLUMN,
    SLICE,
    CandidateList,
    KeyOrder,
    Ranked,
    State,
    limit,
    list_bytes,
    longest,
)
from kernel.plan import MAXIMA_BLOCKS

QUAD = SLICE // LANES
"""Columns of one 16-byte load of a lane."""
ROW_CHUNK = 2048
"""Columns of a row that are in registers at a time; the next ones are in flight."""
GROUP_CHUNK = 512
"""As ``ROW_CHUNK``, of groups: those of 8,192 blocks."""
_GROUPS_A_PASS = LANES * QUAD // MAXIMA_BLOCKS
"""Groups whose columns one load instruction of the wave reads."""


def lds_bytes(best: int, grouped: bool) -> int:
    """LDS bytes of a wave."""
    return list_bytes(longest(best, grouped)) + (4 * LANES if grouped else 0)


@dataclass(frozen=True)
class Cells:
    """A row of scores or maxima: a buffer of ``num`` cells."""

    descriptor: Value
    num: fx.Int32

    @staticmethod
    def at(address: Value, num: fx.Int32) -> Cells:
        return Cells(d.buffer(address, num * 4), num)


class RowSelector:
    """Traces the selection of a row by one wave.

    Args:
        best: 16, 32 or 64, at least the blocks to give out.
        lane: this lane's number.
        lds: ``lds_bytes(best, grouped)`` bytes of LDS of this wave.
        grouped: whether rows may be selected through their groups.
    """

    def __init__(self, best: int, lane: Value, lds: Value, grouped: bool) -> None:
        self.best, self.lane = best, lane
        self.order = KeyOrder(best, lane)
        most = longest(best, grouped)
        self.list = CandidateList(best, lane, lds)
        self._scratch = lds  # after the last use of the list
        self._selected = d.offset(lds, list_bytes(most))

    # ---- candidates ----
    def most_found(self, chunk: int, once: bool) -> int:
        """Candidates that :meth:`scan` leaves at most: all cells of a row that the list can hold."""
        return chunk if once and chunk <= limit(self.best) + SLICE else limit(self.best)

    def scan(self, cells: Cells, width: int, chunk: int, once: bool) -> State:
        """Candidates of all cells.

        Args:
            cells: the row.
            width: cells of a lane in one load.
            chunk: cells in registers at a time.
            once: the row is not longer than a chunk.
        """
        covered = LANES * width
        slices = chunk // covered
        fits = self.most_found(chunk, once) == chunk
        lane_first = self.lane * width

        def body(base: Value, values: list[Value]) -> list[Value]:
            count, bound, maxima, raw = (
                values[0],
                values[1],
                values[2:start_of_cells],
                values[start_of_cells:],
            )
            ahead = raw if once else self._load(cells, base + chunk, slices, width)
            left = cells.num - base  # cells relative to base: their numbers stay literals
            keys = [self._keys(raw[u], lane_first + covered * u, left, width) for u in range(slices)]
            for key in (key for of_slice in keys for key in of_slice):
                maxima = _with(key, maxima)
            state = State(count, d.max_i32(bound, self.order.bound(maxima)))
            for u in range(slices):
                not_id = d.as_int32(-1 - covered * u) - base - lane_first
                not_ids = [not_id - j for j in range(width)]
                if slices == 1:
                    state = self.list.append(keys[u], not_ids, state)
                else:
                    state = self._append_slice(keys[u], not_ids, state, covered, fits)
            return [*state, *maxima, *ahead]

        start = [d.i32(0), d.i32(LEAST_BOUND), *[d.i32(NO_COLUMN)] * self.order.maxima]
        start_of_cells = len(start)
        start += self._load(cells, d.as_int32(0), slices, width)
        done = body(d.as_int32(0), start) if once else d.for_range(0, cells.num, chunk, start, body)
        return State(done[0], done[1])

    def gather(self, cells: Cells, bound: Value) -> State:
        """Candidates of the columns of the selected groups."""
        state = State(d.i32(0), bound)
        passes = self.best // _GROUPS_A_PASS
        group_of_lane = self.lane & -(MAXIMA_BLOCKS // QUAD)  # also its byte in the table: 4 lanes, 4 bytes
        groups = [
            fx.Int32(llvm.load(T.i32, d.offset(self._selected, group_of_lane + LANES * p), alignment=4))
            for p in range(passes)
        ]
        within = (self.lane & (MAXIMA_BLOCKS // QUAD - 1)) * QUAD
        first = [group * MAXIMA_BLOCKS + within for group in groups]
        raw = [d.buffer_load(QUAD, cells.descriptor, column * 4) for column in first]
        for p in range(passes):
            keys = [self.order.key(d.element(raw[p], j)) for j in range(QUAD)]
            legal = [first[p] + j < cells.num for j in range(QUAD)]
            not_id = first[p] ^ -1
            state = self.list.append(keys, [not_id - j for j in range(QUAD)], state, legal)
            if p + 1 < passes:
                most = SLICE + limit(self.best) * (p > 0)
                state = self.list.cut_if_long(state, ordered=False, most=most, rare=False)
        return state

    def _load(self, cells: Cells, base: Value, slices: int, width: int) -> list[Value]:
        at = self.lane * (4 * width) + base * 4
        return [d.buffer_load(width, cells.descriptor, at + 4 * LANES * width * u) for u in range(slices)]

    def _keys(self, raw: Value, first: Value, num: Value, width: int) -> list[Value]:
        """Keys of a load's cells, ``NO_COLUMN`` from cell ``num`` on."""
        cells = [d.element(raw, j) for j in range(width)] if width > 1 else [raw]
        return [d.select(first + j < num, self.order.key(x), d.i32(NO_COLUMN)) for j, x in enumerate(cells)]

    def _append_slice(
        self, keys: Sequence[Value], not_ids: Sequence[Value], state: State, covered: int, fits: bool
    ) -> State:
        """Append a slice's columns; skipped where no lane has one that reaches the bound."""
        highest = keys[0]
        for key in keys[1:]:
            highest = d.max_i32(highest, key)

        def some() -> State:
            longer = self.list.append(keys, not_ids, state)
            most = limit(self.best) + covered
            return longer if fits else self.list.cut_if_long(longer, ordered=True, most=most, rare=True)

        reached = any_lane(fx.Int32(highest) >= state.bound)
        return State(*d.if_else(reached, [T.i32, T.i32], some, lambda: state))

    # ---- groups ----
    def select_groups(self, state: State, one_a_lane: bool, most: int) -> fx.Int32:
        """Write the best groups among the candidates to LDS, ``NO_GROUP`` behind the last.

        Args:
            state: of the scan of the maxima.
            one_a_lane: each lane had one group at most, so the bound of 16 is that of the 16th group.
            most: candidates at most.

        Returns:
            The key that every column of the result reaches: that of the last group's maximum.
        """
        if not (one_a_lane and self.best == 16):
            return self._groups_by_place(state, most)
        wave_sync()
        # If exactly 16 reached the bound they are the best 16, and the bound is the least of them.
        return fx.Int32(
            d.if_else(
                fx.Int32(state.count) == self.best,
                [T.i32],
                lambda: self._groups_as_found(state),
                lambda: [self._groups_by_place(state, most)],
            )[0]
        )

    def _groups_as_found(self, state: State) -> list[Value]:
        mine = Ranked(self.list._load(self.lane), fx.Int32(d.i32(0)), self.lane < self.best)
        self._store_group(self.lane, d.select(mine.live, mine.column, d.as_int32(NO_GROUP)))
        return [state.bound]

    def _groups_by_place(self, state: State, most: int) -> fx.Int32:
        _, mine = self.list.ranked(state, ordered=True, most=most)
        wave_sync()
        chosen = mine.live & (mine.place < self.best)
        place = fx.Int32(d.select(mine.live, mine.place, self.lane))
        self._store_group(place, d.select(chosen, mine.column, d.as_int32(NO_GROUP)))
        last = ballot(mine.live & (mine.place == self.best - 1))
        key = arith.trunci(T.i32, arith.shrsi(mine.candidate, d.i64(32)))
        return fx.Int32(d.select(last == 0, d.as_int32(LEAST_BOUND), read_first_lane(key, last)))

    def _store_group(self, place: Value, group: Value) -> None:
        d.store(group, d.offset(self._selected, place * 4), 4)
        wave_sync()

    # ---- result ----
    def emit(self, state: State, ordered: bool, out: Value, k: fx.Int32, ascending: Value) -> None:
        """Store the row's ``k`` ids at ``out``, -1 behind the last: by place, or ascending.
        ``ordered``: the list was filled by a scan of the columns, else maybe by :meth:`gather`."""
        most = SLICE if ordered else longest(self.best, grouped=True)
        _, mine = self.list.ranked(state, ordered, most)
        place = fx.Int32(d.select(mine.live, mine.place, self.lane))
        chosen = mine.live & (mine.place < k)

        def by_id() -> list[Value]:
            return [d.select(chosen, self._lower_ids(place, chosen, mine), place)]

        place = fx.Int32(d.if_else(ascending, [T.i32], by_id, lambda: [place])[0])
        value = d.select(mine.live, mine.column, d.as_int32(-1))
        d.if_then(place < k, lambda: d.store(value, d.offset(out, place * 4), 4))

    def _lower_ids(self, place: fx.Int32, chosen: Value, mine: Ranked) -> fx.Int32:
        """How many of the chosen candidates have a lower id: their ``~id`` is higher."""
        not_id = fx.Int32(arith.trunci(T.i32, mine.candidate))
        wave_sync()
        d.store(d.select(chosen, not_id, d.as_int32(NO_COLUMN)), d.offset(self._scratch, place * 4), 4)
        wave_sync()
        lower = d.i32(0)
        for at in range(0, self.best, 4):
            four = llvm.load(d.vector_type(4, T.i32), d.offset(self._scratch, 4 * at), alignment=16)
            for j in range(4):
                higher = fx.Int32(d.element(four, j)) > not_id
                lower = arith.addi(lower, arith.extui(T.i32, as_ir_value(higher)))
        return fx.Int32(lower)


def _with(key: Value, maxima: Sequence[Value]) -> list[Value]:
    """The one or two greatest keys of a lane, descending, and one more key."""
    greatest = d.max_i32(maxima[0], key)
    return [greatest] if len(maxima) == 1 else [greatest, med3(key, maxima[0], maxima[1])]


class WaveRows:
    """Traces the kernel's body: the rows of this wave.

    Args:
        variant: which kernel.
        arguments: the kernel's arguments.
        workgroup: its number, and the head's.
        thread: number of this lane in the workgroup.
    """

    def __init__(
        self,
        variant: Variant,
        arguments: TopkArguments,
        workgroup: tuple[d.Value, d.Value],
        thread: d.Value,
    ) -> None:
        self.variant, self.arguments = variant, arguments
        wave = d.uniform(d.shift_right(thread, LOG_LANES))
        grouped = variant.most_groups is not None
        own_bytes = lds_bytes(variant.best, grouped)
        lds = d.offset(d.shared_memory(WAVES * own_bytes), wave * own_bytes)
        self.selector = RowSelector(variant.best, thread & (LANES - 1), lds, grouped)
        self.first_token = (workgroup[0] * WAVES + wave) * variant.rows_per_wave
        self.head = workgroup[1]

    def run(self) -> None:
        """Select every row of the wave."""
        rows, num_tokens = self.variant.rows_per_wave, self.arguments.num_tokens
        if rows == 1:
            d.if_then(self.first_token < num_tokens, lambda: self._row(self.first_token))
            return

        def trip(token: fx.Int32, _: list[d.Value]) -> list[d.Value]:
            self._row(token)
            return []

        d.for_range(self.first_token, d.min_i32(self.first_token + rows, num_tokens), 1, [], trip)

    def _row(self, token: fx.Int32) -> None:
        args, select = self.arguments, self.selector
        num = fx.Int32(d.scalar_load(1, args.num_blocks + d.zext(token) * 4))
        num = d.max_i32(d.min_i32(num, args.columns), 0)
        scores = Cells.at(
            self._cell(args.scores, args.score_head_stride, args.score_token_stride, token), num
        )
        ids = d.pointer(
            self._cell(args.block_ids, args.id_head_stride, args.id_token_stride, token), d.GLOBAL
        )

        def one_slice() -> list[d.Value]:
            return list(select.scan(scores, QUAD, SLICE, once=True))

        def chunks() -> list[d.Value]:
            return list(select.scan(scores, QUAD, ROW_CHUNK, once=False))

        def groups() -> list[d.Value]:
            maxima = self._cell(args.maxima, args.maxima_head_stride, args.maxima_token_stride, token)
            cells = Cells.at(maxima, d.shift_right(num + (MAXIMA_BLOCKS - 1), LOG_MAXIMA))
            most = self.variant.most_groups
            # A group a lane and load, not four: a row of few groups still has one in every lane.
            chunk, once = most or GROUP_CHUNK, bool(most)
            found = select.scan(cells, 1, chunk, once)
            bound = select.select_groups(found, most == LANES, select.most_found(chunk, once))
            return list(select.gather(scores, bound))

        grouped = self.variant.most_groups is not None
        types = [d.i32(0).type] * 2
        state = State(*d.if_else(num <= SLICE, types, one_slice, groups if grouped else chunks))
        select.emit(state, not grouped, ids, args.k, args.ascending != 0)

    def _cell(self, base: d.Value, head_stride: d.Value, token_stride: d.Value, token: fx.Int32) -> d.Value:
        """Address of a row's first cell."""
        return base + (d.zext(self.head) * head_stride + d.zext(token) * token_stride) * 4


def build(variant: Variant) -> Launch:
    """The launcher of a kernel: of :class:`TopkArguments`, the workgroups of a head, the heads, a stream."""

    def trace(arguments: TopkArguments) -> None:
        WaveRows(variant, arguments, (fx.block_idx.x, fx.block_idx.y), fx.thread_idx.x).run()

    return launcher(
        "topk",
        variant.name,
        TopkArguments,
        trace,
        grid=("workgroups", "heads"),
        waves_per_simd=3 if variant.most_groups is None else None,
    )
