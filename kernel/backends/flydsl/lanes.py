"""Operations across the 64 lanes of a wave: moves within rows of 16 lanes, swaps, ballots, prefix counts.

Values are 32-bit integers, one a lane.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm, rocdl
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl.geometry import LANES

Value: TypeAlias = Any

QUAD_XOR1, QUAD_XOR2, QUAD_XOR3 = 0xB1, 0x4E, 0x1B
"""DPP controls: the lane whose number in its quad differs in these bits."""
ROW_MIRROR, ROW_HALF_MIRROR = 0x140, 0x141
"""DPP controls: lane ``15 - i`` of the row of 16, lane ``7 - i`` of the half row."""


def row_rotate(lanes: int) -> int:
    """DPP control: the lane ``lanes`` before, around the row of 16."""
    return 0x120 + lanes


def moved(x: Value, control: int) -> fx.Int32:
    """Each lane reads the lane that a DPP control names; every lane must be active."""
    return fx.Int32(rocdl.update_dpp(T.i32, d.i32(0), as_ir_value(x), control, 15, 15, True))


def swapped(width: int, x: Value) -> tuple[fx.Int32, fx.Int32]:
    """Both of two lanes that lie ``width`` (16 or 32) lanes apart get what both hold: (of the lower, of the
    upper)."""
    x = as_ir_value(x)
    low, high = (fx.Int32(both) for both in d.swap(width, x, x))
    return low, high


def ballot(condition: Value) -> fx.Int64:
    """Bit ``lane`` of the mask is the lane's condition; uniform."""
    return fx.Int64(rocdl.ballot(T.i64, as_ir_value(condition)))


def any_lane(condition: Value) -> Value:
    """Whether the condition holds in some lane; uniform."""
    return ballot(condition) != 0


def count_lanes(mask: Value) -> fx.Int32:
    """Lanes of a ballot; uniform."""
    ones = llvm.call_intrinsic(T.i64, "llvm.ctpop.i64", [as_ir_value(mask)], [], [])
    return fx.Int32(arith.trunci(T.i32, ones))


def lanes_below(mask: Value) -> fx.Int32:
    """How many lanes of a ballot come before this one."""
    mask = as_ir_value(mask)
    low = arith.trunci(T.i32, mask)
    high = arith.trunci(T.i32, arith.shrui(mask, d.i64(32)))
    return fx.Int32(rocdl.mbcnt_hi(T.i32, high, rocdl.mbcnt_lo(T.i32, low, d.i32(0))))


def of_lane(x: Value, mask: Value) -> fx.Int32:
    """What the first lane of a ballot holds; uniform. Of an empty ballot: lane 0."""
    no = arith.constant(ir.IntegerType.get_signless(1), 0)
    first = llvm.call_intrinsic(T.i64, "llvm.cttz.i64", [as_ir_value(mask), no], [], [])
    lane = arith.andi(arith.trunci(T.i32, first), d.i32(LANES - 1))
    return fx.Int32(rocdl.readlane(T.i32, as_ir_value(x), lane))


def median(a: Value, b: Value, c: Value) -> fx.Int32:
    """The median, in the form that LLVM selects as ``v_med3_i32``."""
    return d.maximum(d.minimum(a, b), d.minimum(d.maximum(a, b), c))


def sign_of_bit(lane: Value, bit: int) -> fx.Int32:
    """-1 in lanes whose number has the bit, else 0."""
    extract = "llvm.amdgcn.sbfe.i32"
    return fx.Int32(llvm.call_intrinsic(T.i32, extract, [as_ir_value(lane), d.i32(bit), d.i32(1)], [], []))


def wave_sync() -> None:
    """What lanes of this wave wrote to LDS can be read by its other lanes: LDS is in order within a wave, so
    this only keeps the compiler from reordering."""
    llvm.fence(llvm.AtomicOrdering.release, syncscope="wavefront")
    rocdl.wave_barrier()
    llvm.fence(llvm.AtomicOrdering.acquire, syncscope="wavefront")
