"""The order of top-k as integers: scores to keys, and the bound that the k best columns reach.

A KEY is an int32 with the contract's order of scores: NaN as -inf, -0.0 as +0.0. A CANDIDATE is the int64
``key << 32 | ~id``: one signed comparison orders candidates, score first, then the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence

import flydsl.expr as fx
from flydsl._mlir.dialects import arith, llvm
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl.lanes import (
    QUAD_XOR1,
    QUAD_XOR2,
    QUAD_XOR3,
    ROW_HALF_MIRROR,
    ROW_MIRROR,
    Value,
    median,
    moved,
    row_rotate,
    sign_of_bit,
    swapped,
)

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
        # In a scalar register and hidden: as a literal it keeps LLVM from v_bitop3.
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
            low, high = swapped(16, self._sorted_rows(maxima[0]))
            x = self._merged_rows(d.maximum(low, moved(high, ROW_MIRROR)), row_rotate(8))
            low, high = swapped(32, x)
            x = d.maximum(low, moved(high, ROW_MIRROR))
        elif self.best == 32:
            x = d.maximum(*self._halves_against_each_other(self._sorted_halves(maxima[0])))
        else:
            ascending = self._sorted_wave(fx.Int32(maxima[1]) ^ -1) ^ -1
            x = d.maximum(self._sorted_wave(maxima[0]), ascending)
        for lanes in (8, 4, 2, 1):
            x = d.minimum(x, moved(x, row_rotate(lanes)))
        if self.best >= 32:
            x = d.minimum(*swapped(16, x))
        if self.best == 64:
            x = d.minimum(*swapped(32, x))
        return d.maximum(d.uniform(x), LEAST_BOUND)

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
            x = self._exchange(x, moved(x, control), bit)
        return self._merged_rows(x, ROW_MIRROR)

    def _merged_rows(self, x: Value, first: int) -> fx.Int32:
        """Descending rows from rows of two sorted halves (``first`` mirrors) or from bitonic ones."""
        x = self._exchange(x, moved(x, first), 3)
        x = self._exchange(x, moved(moved(x, ROW_HALF_MIRROR), QUAD_XOR3), 2)
        x = self._exchange(x, moved(x, QUAD_XOR2), 1)
        return self._exchange(x, moved(x, QUAD_XOR1), 0)

    def _sorted_halves(self, x: Value) -> fx.Int32:
        """Each half of the wave in descending order."""
        low, high = swapped(16, self._sorted_rows(x))
        x = median(low, moved(high, ROW_MIRROR), self.keep[4])
        return self._merged_rows(x, row_rotate(8))

    def _sorted_wave(self, x: Value) -> fx.Int32:
        """The 64 lanes in descending order."""
        x = median(*self._halves_against_each_other(self._sorted_halves(x)), self.keep[5])
        x = median(*swapped(16, x), self.keep[4])
        return self._merged_rows(x, row_rotate(8))

    def _halves_against_each_other(self, x: Value) -> tuple[fx.Int32, fx.Int32]:
        """The lower half's lane i, and the upper half's lane 31 - i, in both halves."""
        low, high = swapped(32, x)
        even, odd = swapped(16, moved(high, ROW_MIRROR))
        return low, fx.Int32(d.select(self._in_odd_row, even, odd))

    def _exchange(self, x: Value, partner: Value, bit: int) -> fx.Int32:
        return median(x, partner, self.keep[bit])
