"""The candidates of one row: the columns that reached the bound, in a list in the wave's part of LDS.

A candidate's place in the result is the number of candidates that beat it, counted against the whole list: no
sort, and every lane can store its own. A list that grows past its limit is cut to its best.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import flydsl.expr as fx
from flydsl._mlir.dialects import arith, llvm
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl import ops as d
from kernel.backends.flydsl.geometry import LANES
from kernel.backends.flydsl.ops import (
    QUAD_XOR1,
    QUAD_XOR2,
    QUAD_XOR3,
    ROW_HALF_MIRROR,
    ROW_MIRROR,
    Value,
    ballot,
    dpp_mov,
    mbcnt,
    med3,
    permlane_pair,
    popcount,
    row_rotate,
    sign_of_bit,
    wave_sync,
)
from kernel.plan import MAXIMA_BLOCKS

SLICE = 256
"""Columns that one load instruction of the wave covers at most: 16 bytes a lane."""
_GROUPS_A_SLICE = SLICE // MAXIMA_BLOCKS
_BYTES = 8
_HALF = LANES // 2
_SURE = 16
"""Candidates compared before the first test for the list's end."""
_NO_CANDIDATE = -(2**63)
_GREATER = arith.CmpIPredicate.sgt


class State(NamedTuple):
    """Loop-carried state: length of the list and the key that further columns must reach; both uniform."""

    count: Value
    bound: Value


class Ranked(NamedTuple):
    """One candidate a lane and its place; ``live``: whether the lane has one."""

    candidate: Value
    place: fx.Int32
    live: Value

    @property
    def column(self) -> fx.Int32:
        return fx.Int32(arith.trunci(T.i32, self.candidate)) ^ -1


def limit(best: int) -> int:
    """Length past which a list is cut: below it each lane holds one or two candidates."""
    return LANES if best <= 32 else 2 * LANES


def longest(best: int, grouped: bool) -> int:
    """Most candidates of a list: a slice on top of one that is not cut yet. The columns of the best 16 groups
    are one slice and meet an empty list."""
    return SLICE if grouped and best == _GROUPS_A_SLICE else limit(best) + SLICE


def list_bytes(most: int) -> int:
    """LDS bytes of a list of ``most`` candidates, and of the padding behind it."""
    return (most + LANES) * _BYTES


class CandidateList:
    """Traces the operations on a list.

    Args:
        best: candidates that a cut keeps: 16, 32 or 64.
        lane: this lane's number.
        lds: where the list lies, :func:`list_bytes` of the most that it may hold.
    """

    def __init__(self, best: int, lane: Value, lds: Value) -> None:
        self.best, self.lane, self.lds = best, lane, lds
        self._often_long = best == LANES

    def append(
        self, keys: Sequence[Value], not_ids: Sequence[Value], state: State, legal: Sequence[Value] = ()
    ) -> State:
        """Append the columns whose keys reach the bound, and that are legal."""
        count = fx.Int32(state.count)
        for at, (key, not_id) in enumerate(zip(keys, not_ids)):
            passes = fx.Int32(key) >= state.bound
            mask = ballot(passes)
            if legal:  # the ballot of a conjunction would cost two more vector instructions
                mask = mask & ballot(legal[at])
                passes = passes & legal[at]
            place, end = mbcnt(mask), self._entry(count)

            def put(key: Value = key, not_id: Value = not_id, place: Value = place, end: Value = end) -> None:
                d.store(d.pack([not_id, key], T.i32), d.offset(end, place * _BYTES), _BYTES)

            d.if_then(passes, put)
            count = count + popcount(mask)
        return State(count, state.bound)

    def cut_if_long(self, state: State, ordered: bool, most: int, *, rare: bool) -> State:
        """Cut a list past its limit, of ``most`` candidates at most. ``ordered``: what follows has higher ids
        than what is in it. ``rare``: ordinary rows need no cut here; short code is preferred."""
        return self._cut_if(limit(self.best), state, ordered, most, rare)

    def ranked(self, state: State, ordered: bool, most: int) -> tuple[State, Ranked]:
        """The candidates, one a lane, and their places; a list longer than a wave is cut first."""
        if not self._often_long or most <= LANES:
            state = self._cut_if(LANES, state, ordered, most, rare=True)
            candidate, place = self._rank(state)
            return state, self._ranked(candidate, place, state)

        def cut() -> list[Value]:
            """A cut leaves the list in order."""
            keep = functools.partial(self._keep, state)
            if most <= 2 * LANES:
                llvm.intr_assume(as_ir_value(fx.Int32(state.count) <= most), [], [])  # bounds LLVM's loops
                keep(2, rare=False)
            else:  # more than 64 columns pass on ordinary rows: they get a path of their own
                d.if_then(
                    fx.Int32(state.count) <= 2 * LANES,
                    lambda: keep(2, rare=False),
                    lambda: keep(-(-most // LANES), rare=True),
                )
            left = self._best_of(state, ordered)
            lane = fx.Int32(d.pin(self.lane))
            return [*left, self._load(lane), lane]

        count, bound, candidate, place = d.if_else(
            fx.Int32(state.count) > LANES,
            [T.i32, T.i32, T.i64, T.i32],
            cut,
            lambda: [*state, *self._rank(state)],
        )
        state = State(count, bound)
        return state, self._ranked(candidate, place, state)

    def _ranked(self, candidate: Value, place: Value, state: State) -> Ranked:
        return Ranked(candidate, fx.Int32(place), self.lane < state.count)

    def _rank(self, state: State) -> list[Value]:
        """A candidate and its place, for at most 64."""
        count = fx.Int32(state.count)
        self._pad(count)
        return d.if_else(
            count <= _HALF, [T.i64, T.i32], lambda: self._halves(count), lambda: self._wave(count)
        )

    def _cut_if(self, allowed: int, state: State, ordered: bool, most: int, rare: bool) -> State:
        if most <= allowed:
            return state

        def cut() -> State:
            self._keep(state, -(-most // LANES), rare)
            return self._best_of(state, ordered)

        return State(*d.if_else(fx.Int32(state.count) > allowed, [T.i32, T.i32], cut, lambda: state))

    def _entry(self, index: Value) -> Value:
        return d.offset(self.lds, index * _BYTES)

    def _load(self, index: Value) -> Value:
        return llvm.load(T.i64, self._entry(index), alignment=_BYTES)

    def _pad(self, count: fx.Int32) -> None:
        """Pad the end with candidates that beat nothing: comparisons go in steps of ``_SURE``, then 4."""
        lowest = arith.constant(T.i64, _NO_CANDIDATE)
        d.store(lowest, d.offset(self._entry(count), self.lane * _BYTES), _BYTES)
        wave_sync()

    def _pair(self, address: Value) -> list[Value]:
        two = llvm.load(d.vector_type(2, T.i64), address, alignment=2 * _BYTES)
        return [llvm.extractelement(two, d.i32(k)) for k in range(2)]

    def _places(self, count: fx.Int32, slots: int, rare: bool = False) -> tuple[list[Value], list[Value]]:
        """Candidates ``64 s + lane`` and their places, for each slot s. A loop for ``rare`` lists is not
        unrolled, with a copy of it in each slice: LLVM does not count trips of a step that it cannot see."""
        lane = fx.Int32(d.pin(self.lane))  # else rare paths' addresses are computed, and kept, for every row
        mine = [self._load(lane + LANES * s) for s in range(slots)]

        def counted(at: Value, num: int, places: Sequence[Value]) -> list[Value]:
            base = self._entry(at)
            for pair in range(0, num, 2):
                for other in self._pair(d.offset(base, _BYTES * pair)):
                    places = [_one_more(p, other, m) for p, m in zip(places, mine)]
            return list(places)

        places, first, step = [d.i32(0)] * slots, 0, d.i32(4)
        if rare:
            step = d.pin_scalar(step)
        else:
            first = _SURE if slots == 1 else 4
            places = counted(d.as_int32(0), first, places)
        return mine, d.for_range(first, count, step, places, lambda i, p: counted(i, 4, p))

    def _wave(self, count: fx.Int32) -> list[Value]:
        mine, places = self._places(count, 1)
        return [mine[0], places[0]]

    def _halves(self, count: fx.Int32) -> list[Value]:
        """For at most 32: both halves of the wave hold them all, each compares them with every other pair."""
        mine = self._load(self.lane & (_HALF - 1))
        own_pair = d.offset(self.lds, d.shift_right(self.lane, 1) & (2 * _BYTES))

        def counted(at: Value, num: int, place: Value) -> Value:
            base = d.offset(own_pair, at * _BYTES)
            for pair in range(0, num, 4):
                for other in self._pair(d.offset(base, _BYTES * pair)):
                    place = _one_more(place, other, mine)
            return place

        def rest(at: int, place: Value) -> Value:
            """Unrolled here: LLVM would unroll a loop by eight, and at most four steps are left."""
            if at == _HALF:
                return place

            def more() -> list[Value]:
                return [rest(at + 4, counted(d.as_int32(at), 4, place))]

            (after,) = d.if_else(count > at, [T.i32], more, lambda: [place])
            return after

        place = rest(_SURE, counted(d.as_int32(0), _SURE, d.i32(0)))
        low, high = permlane_pair(32, place)
        return [mine, low + high]

    def _keep(self, state: State, slots: int, rare: bool) -> None:
        """Leave the best of a list of more than 64, and at most ``64 * slots``, in order."""
        count = fx.Int32(state.count)
        self._pad(count)
        mine, places = self._places(count, slots, rare)
        wave_sync()
        lane = fx.Int32(d.pin(self.lane))
        for s in range(slots):
            kept = fx.Int32(places[s]) < self.best
            if s > 1:  # the padding, whose place is behind all, reaches past the 128th
                kept = (lane + LANES * s < count) & kept
            d.if_then(kept, lambda s=s: d.store(mine[s], self._entry(fx.Int32(places[s])), _BYTES))  # type: ignore[misc]
        wave_sync()

    def _best_of(self, state: State, ordered: bool) -> State:
        """After :meth:`_keep`. A column must then beat the last of the best, or equal it where its id may be
        lower."""
        last = d.offset(self.lds, _BYTES * (self.best - 1) + 4)  # the list was longer: there is one
        key = d.uniform(llvm.load(T.i32, last, alignment=4))
        return State(d.i32(self.best), d.max_i32(state.bound, key + 1 if ordered else key))


def _one_more(place: Value, other: Value, mine: Value) -> Value:
    """``place + (other > mine)``."""
    beats = arith.cmpi(_GREATER, as_ir_value(other), as_ir_value(mine))
    return arith.addi(as_ir_value(place), arith.extui(T.i32, beats))


# ---- Order: scores as integer keys, and the bound that the k best columns reach ----
#
# A KEY is an int32 with the contract's order of scores: NaN as -inf, -0.0 as +0.0. A CANDIDATE is the int64
# ``key << 32 | ~id``: one signed comparison orders candidates, score first, then the lower id.

NO_COLUMN = -(2**31)
"""Key of no column: below the key of -inf."""
LEAST_BOUND = NO_COLUMN + 1
"""A bound that every column reaches, and no column's absence."""
_ONE_WITHOUT_SIGN = 0x78
"""``v_bitop3`` truth table of ``a ^ (b & c)``."""


class KeyOrder:
    """Keys of scores and the bound of lanes' maxima, for a wave.

    Args:
        best: how many columns must reach the bound: 16, 32 or 64.
        lane: this lane's number.
    """

    def __init__(self, best: int, lane: Value) -> None:
        self.best = best
        # Opaque in a scalar register: with a literal LLVM does not select v_bitop3.
        self.magnitude_mask = llvm.inline_asm(
            T.i32, [d.i32(0x7FFFFFFF)], "; pin", "=s,0", has_side_effects=False
        )
        # The median of x, y and keep[j]: the larger of x and y where bit j of the lane is 0, else the lesser.
        self.keep = [sign_of_bit(lane, j) ^ 0x7FFFFFFF for j in range(6)]
        self._in_odd_row = (lane & 16) != 0

    def key(self, bits: Value) -> fx.Int32:
        """The key of a score's bits. + 0 makes -0 +0 and quiets NaN; the maximum with -inf drops NaN."""
        score = llvm.BitcastOp(T.f32, as_ir_value(bits)).result
        score = arith.maxnumf(arith.addf(score, d.f32(0.0)), d.f32(float("-inf")))
        bits = llvm.BitcastOp(T.i32, score).result
        operands = [bits, arith.shrsi(bits, d.i32(31)), self.magnitude_mask, d.i32(_ONE_WITHOUT_SIGN)]
        return fx.Int32(llvm.call_intrinsic(T.i32, "llvm.amdgcn.bitop3", operands, [], []))

    @property
    def maxima(self) -> int:
        """How many of its greatest keys a lane must keep for :meth:`bound`."""
        return 2 if self.best == 64 else 1

    def bound(self, maxima: Sequence[Value]) -> fx.Int32:
        """The 16th or 32nd largest of the 64 lanes' maxima, or the 64th of two of each lane.

        That many columns reach it. By bitonic networks that keep only what can matter: whichever exchange
        went wrong, the result would be the least of as many different lanes' keys, too low at worst.

        Args:
            maxima: each lane's greatest keys, descending.

        Returns:
            The key, uniform and above ``NO_COLUMN``.
        """
        if self.best == 16:
            low, high = permlane_pair(16, self._sorted_rows(maxima[0]))
            x = self._merged_rows(d.max_i32(low, dpp_mov(high, ROW_MIRROR)), row_rotate(8))
            low, high = permlane_pair(32, x)
            x = d.max_i32(low, dpp_mov(high, ROW_MIRROR))
        elif self.best == 32:
            x = d.max_i32(*self._halves_against_each_other(self._sorted_halves(maxima[0])))
        else:
            ascending = self._sorted_wave(fx.Int32(maxima[1]) ^ -1) ^ -1
            x = d.max_i32(self._sorted_wave(maxima[0]), ascending)
        for lanes in (8, 4, 2, 1):
            x = d.min_i32(x, dpp_mov(x, row_rotate(lanes)))
        if self.best >= 32:
            x = d.min_i32(*permlane_pair(16, x))
        if self.best == 64:
            x = d.min_i32(*permlane_pair(32, x))
        return d.max_i32(d.uniform(x), LEAST_BOUND)

    def _sorted_rows(self, x: Value) -> fx.Int32:
        """Each row of 16 lanes in descending order."""
        for control, bit in (
            (QUAD_XOR1, 0),
            (QUAD_XOR3, 1),
            (QUAD_XOR1, 0),
            (ROW_HALF_MIRROR, 2),
            (QUAD_XOR2, 1),
            (QUAD_XOR1, 0),
        ):
            x = self._exchange(x, dpp_mov(x, control), bit)
        return self._merged_rows(x, ROW_MIRROR)

    def _merged_rows(self, x: Value, first: int) -> fx.Int32:
        """Descending rows from rows of two sorted halves (``first`` mirrors) or from bitonic ones."""
        x = self._exchange(x, dpp_mov(x, first), 3)
        x = self._exchange(x, dpp_mov(dpp_mov(x, ROW_HALF_MIRROR), QUAD_XOR3), 2)
        x = self._exchange(x, dpp_mov(x, QUAD_XOR2), 1)
        return self._exchange(x, dpp_mov(x, QUAD_XOR1), 0)

    def _sorted_halves(self, x: Value) -> fx.Int32:
        """Each half of the wave in descending order."""
        low, high = permlane_pair(16, self._sorted_rows(x))
        x = med3(low, dpp_mov(high, ROW_MIRROR), self.keep[4])
        return self._merged_rows(x, row_rotate(8))

    def _sorted_wave(self, x: Value) -> fx.Int32:
        """The 64 lanes in descending order."""
        x = med3(*self._halves_against_each_other(self._sorted_halves(x)), self.keep[5])
        x = med3(*permlane_pair(16, x), self.keep[4])
        return self._merged_rows(x, row_rotate(8))

    def _halves_against_each_other(self, x: Value) -> tuple[fx.Int32, fx.Int32]:
        """The lower half's lane i, and the upper half's lane 31 - i, in both halves."""
        low, high = permlane_pair(32, x)
        even, odd = permlane_pair(16, dpp_mov(high, ROW_MIRROR))
        return low, fx.Int32(d.select(self._in_odd_row, even, odd))

    def _exchange(self, x: Value, partner: Value, bit: int) -> fx.Int32:
        return med3(x, partner, self.keep[bit])
