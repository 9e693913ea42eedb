"""Prefix sums over the lanes of a wave, and single lanes' values."""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir.dialects import rocdl
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl.device import Value

_EVERY_BANK = 15
_SHIFT_RIGHT, _BROADCAST_15, _BROADCAST_31 = 0x110, 0x142, 0x143
"""DPP controls: from the lane so many before; lane 15 of a row, lane 31, to the rows after it."""
_SCAN = (
    # control, rows of 16 lanes that it adds to
    *((_SHIFT_RIGHT + distance, 0b1111) for distance in (1, 2, 4, 8)),
    (_BROADCAST_15, 0b1010),
    (_BROADCAST_31, 0b1100),
)


def prefix_sum(x: Value) -> fx.Int32:
    """Sum of the lanes up to and with this one; every lane must be active."""
    total = fx.Int32(x)
    for control, rows in _SCAN:
        moved = rocdl.update_dpp(T.i32, d.i32(0), as_ir_value(total), control, rows, _EVERY_BANK, False)
        total = total + fx.Int32(moved)
    return total


def lane_value(x: Value, lane: Value) -> fx.Int32:
    """What lane ``lane`` (uniform, 0 .. 63) holds; uniform."""
    return fx.Int32(rocdl.readlane(T.i32, as_ir_value(x), d.i32(lane)))
