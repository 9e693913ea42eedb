"""Device operations that FlyDSL's public API lacks, over the MLIR dialects in its wheel.

Operands are FlyDSL numbers, MLIR values or Python ints (32-bit constants). Calls add operations to the IR in
their order; :func:`pin` and :func:`fence` make LLVM keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm, rocdl, scf
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl.geometry import LANES

Value: TypeAlias = Any
"""An MLIR value or a FlyDSL number; FlyDSL has no type hints."""

GLOBAL, LDS, CONSTANT = 1, 3, 4
"""LLVM address spaces."""
NON_TEMPORAL = 2
"""Cache policy of data that is read once."""
_DYNAMIC = -(2**31)  # in a GEP: the index is an operand


def i32(x: Value) -> Value:
    """An MLIR value of 32 bits; Python ints wrap."""
    return arith.constant(T.i32, (x + 2**31) % 2**32 - 2**31) if isinstance(x, int) else as_ir_value(x)


def i64(x: Value) -> Value:
    """An MLIR value of 64 bits; 32-bit values are zero-extended."""
    if isinstance(x, int):
        return arith.constant(T.i64, x)
    x = as_ir_value(x)
    return arith.extui(T.i64, x) if x.type == T.i32 else x


def zext(x: Value) -> fx.Int64:
    """Zero-extended to a 64-bit FlyDSL number."""
    return fx.Int64(i64(x))


def f32(x: float) -> Value:
    return arith.constant(T.f32, x)


# ---- integers and vectors ----
def min_i32(a: Value, b: Value) -> fx.Int32:
    return fx.Int32(arith.minsi(i32(a), i32(b)))


def max_i32(a: Value, b: Value) -> fx.Int32:
    return fx.Int32(arith.maxsi(i32(a), i32(b)))


def clamped(x: Value, least: Value, most: Value) -> fx.Int32:
    """The nearest number from ``least`` to ``most``."""
    return min_i32(max_i32(x, least), most)


def shift_left(a: Value, bits: Value) -> fx.Int32:
    return fx.Int32(arith.shli(i32(a), i32(bits)))


def shift_right(a: Value, bits: Value) -> fx.Int32:
    """Logical shift: operands are not negative, and LLVM then knows it."""
    return fx.Int32(arith.shrui(i32(a), i32(bits)))


def shift_right_signed(a: Value, bits: int) -> fx.Int32:
    return fx.Int32(arith.shrsi(i32(a), i32(bits)))


def less_unsigned(a: Value, b: Value) -> fx.Boolean:
    """``a < b``, unsigned: false for a negative ``a``."""
    return fx.Boolean(arith.cmpi(arith.CmpIPredicate.ult, i32(a), i32(b)))


def as_int32(x: Value) -> fx.Int32:
    """A 32-bit MLIR value or a Python int as a FlyDSL number."""
    return fx.Int32(i32(x))


def select(condition: Value, a: Value, b: Value) -> Value:
    return arith.select(as_ir_value(condition), as_ir_value(a), as_ir_value(b))


def vector_type(n: int, element: Value) -> Value:
    return ir.VectorType.get([n], element)


def element(vector: Value, k: int) -> Value:
    return llvm.extractelement(vector, i32(k))


def pack(values: Sequence[Value], element_type: Value) -> Value:
    """A vector of scalars."""
    vector = llvm.mlir_undef(vector_type(len(values), element_type))
    for k, value in enumerate(values):
        vector = llvm.insertelement(vector, as_ir_value(value), i32(k))
    return vector


def concatenate(low: Value, high: Value) -> Value:
    """Two 4-dword vectors as the 8 dwords of an MFMA operand."""
    return llvm.shufflevector(vector_type(8, T.i32), low, high, list(range(8)))


def as_f32x4(words: Sequence[Value]) -> Value:
    """Four 32-bit words read as fp32."""
    return llvm.BitcastOp(vector_type(4, T.f32), pack(words, T.i32)).result


# ---- memory ----
def pointer(address: Value, space: int) -> Value:
    return llvm.inttoptr(ir.Type.parse(f"!llvm.ptr<{space}>"), i64(address))


def offset(base: Value, num_bytes: Value) -> Value:
    """``base + num_bytes``."""
    if isinstance(num_bytes, int):
        return base if num_bytes == 0 else llvm.GEPOp(base.type, base, [], [num_bytes], T.i8, None).result
    return llvm.GEPOp(base.type, base, [as_ir_value(num_bytes)], [_DYNAMIC], T.i8, None).result


def load(dwords: int, base: Value) -> Value:
    """``dwords`` dwords, aligned to their size."""
    return llvm.load(vector_type(dwords, T.i32), base, alignment=4 * dwords)


def load_f32(base: Value) -> Value:
    return llvm.load(T.f32, base, alignment=4)


def store(value: Value, base: Value, alignment: int) -> None:
    llvm.store(value, base, alignment=alignment)


def scalar_load(dwords: int, address: Value) -> Value:
    """Scalar load of memory that the kernel never writes, from a uniform address.

    A buffer scalar load instead would make LLVM wait for every vector load in flight.
    """
    kind = T.i32 if dwords == 1 else vector_type(dwords, T.i32)
    return llvm.load(kind, pointer(address, CONSTANT), alignment=4, invariant=True)


def buffer(address: Value, num_bytes: Value) -> Value:
    """Buffer descriptor: dwords read at or past ``num_bytes`` are 0 and touch no memory."""
    base = fx.inttoptr(fx.PointerType.get(T.i8, fx.AddressSpace.Global, 1), fx.Int64(i64(address)))
    return fx.rocdl.get_buffer_rsrc(fx.rocdl.make_buffer_ptr(base, num_records_bytes=zext(num_bytes)))


def buffer_load(dwords: int, descriptor: Value, num_bytes: Value, policy: int = 0) -> Value:
    """Load at a byte offset. Global loads would lose their scalar base across basic blocks, buffer loads keep
    it. ``policy`` are cache bits, such as ``NON_TEMPORAL``."""
    kind = T.i32 if dwords == 1 else vector_type(dwords, T.i32)
    return fx.rocdl.raw_ptr_buffer_load(kind, descriptor, i32(num_bytes), i32(0), aux=policy)


def shared_memory(num_bytes: int) -> Value:
    """This workgroup's LDS, as a pointer."""
    return fx.SharedAllocator().allocate(fx.Array[fx.Uint8, num_bytes, 16]).peek().ptr.llvm_ptr


# ---- arithmetic ----
def max_f32(a: Value, b: Value) -> Value:
    """Maximum without NaN and signed zeros: else LLVM canonicalises each operand first."""
    return arith.maxnumf(a, b, fastmath=ir.Attribute.parse("#arith.fastmath<nnan,nsz>"))


def permute_bytes(high: Value, low: Value, selector: Value) -> Value:
    """``v_perm_b32``: each byte of ``selector`` picks one of the 8 bytes ``high:low``."""
    return llvm.call_intrinsic(T.i32, "llvm.amdgcn.perm", [high, low, i32(selector)], [], [])


def uniform(x: Value) -> fx.Int32:
    """The first lane's value, in a scalar register."""
    return fx.Int32(fx.rocdl.readfirstlane(T.i32, as_ir_value(x)))


def permlane_swap(width: int, a: Value, b: Value) -> list[Value]:
    """Exchange the odd ``width``-lane rows of ``a`` with the even ones of ``b``, both 32-bit integers."""
    pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
    exchange = rocdl.permlane32_swap if width == 32 else rocdl.permlane16_swap
    swapped = exchange(pair, a, b, False, False)
    return [llvm.extractvalue(T.i32, swapped, [k]) for k in (0, 1)]


def fold(width: int, a: Value, b: Value) -> Value:
    """Maximum of two fp32 over lanes ``width`` apart, both in one register: afterwards even rows of lanes
    hold ``a`` of two rows, odd ones ``b`` of them."""
    swapped = permlane_swap(width, *(llvm.BitcastOp(T.i32, x).result for x in (a, b)))
    return max_f32(*(llvm.BitcastOp(T.f32, x).result for x in swapped))


def mfma(a: Value, b: Value, start: Value) -> Value:
    """``start + a b`` of 16 tokens by 16 query rows over 128 dims, E4M3 operands, unscaled."""
    kind = vector_type(4, T.f32)
    return fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(kind, [a, b, start, 0, 0, 0, 0, 0, 0])


# ---- NVFP4 ----
def even_dims(codes: Value, magnitudes: Value) -> Value:
    """E4M3 bytes of the 4 even dims of a code dword: low nibbles."""
    picked = _pick(magnitudes, arith.andi(codes, i32(0x07070707)))
    return arith.xori(picked, arith.andi(arith.shli(codes, i32(4)), i32(0x80808080)))


def odd_dims(codes: Value, magnitudes: Value) -> Value:
    """E4M3 bytes of the 4 odd dims of a code dword: high nibbles."""
    picked = _pick(magnitudes, arith.andi(arith.shrui(codes, i32(4)), i32(0x07070707)))
    return arith.xori(picked, arith.andi(codes, i32(0x80808080)))


def lut_offset(scales: Value, k: int) -> Value:
    """Byte offset of the LUT entry of scale byte ``k`` of a dword."""
    shifted = arith.shli(scales, i32(3)) if k == 0 else arith.shrui(scales, i32(8 * k - 3))
    return arith.andi(shifted, i32(0x7F8))


def even_then_odd(column: Value) -> Value:
    """16 query bytes in the order of dequantised keys: of each 8 dims the 4 even ones, then the 4
    odd ones."""
    words = [element(column, k) for k in range(4)]
    order = [permute_bytes(words[p + 1], words[p], s) for p in (0, 2) for s in (0x06040200, 0x07050301)]
    return pack(order, T.i32)


def _pick(magnitudes: Value, selector: Value) -> Value:
    return permute_bytes(element(magnitudes, 1), element(magnitudes, 0), selector)


# ---- order ----
def pin(value: Value) -> Value:
    """Fix where a value is computed, without an instruction.

    Instruction selection orders pure operations (MFMA, max, byte permutes) as it likes; only operations with
    side effects keep the source's order. A pinned value is also opaque: LLVM cannot hoist what two branches
    have in common and hold it in registers. The text must stay empty: the hazard recogniser does not see
    instructions in it, and one could overwrite an accumulator that an MFMA is still reading.
    """
    value = as_ir_value(value)
    return llvm.inline_asm(value.type, [value], "; pin", "=v,0", has_side_effects=True)


def pin_scalar(value: Value) -> Value:
    """:func:`pin` for a uniform value. A loaded one is waited for here, and not loaded later."""
    return llvm.inline_asm(value.type, [value], "; pin", "=s,0", has_side_effects=True)


def keep(value: Value) -> None:
    """Hold a value's registers until here: LLVM would reuse those of an unread load in flight, and wait for
    it."""
    llvm.inline_asm(None, [as_ir_value(value)], "; keep", "v", has_side_effects=True)


def fence() -> None:
    """The scheduler moves nothing across this point."""
    fx.rocdl.sched_barrier(0)


def lds_barrier() -> None:
    """Workgroup barrier for LDS: global loads stay in flight."""
    llvm.fence(llvm.AtomicOrdering.release, syncscope="workgroup")
    rocdl.s_barrier()
    llvm.fence(llvm.AtomicOrdering.acquire, syncscope="workgroup")


# ---- control ----
def for_range(
    first: Value,
    end: Value,
    step: Value,
    carried: Iterable[Value],
    body: Callable[[fx.Int32, list[Value]], list[Value]],
) -> list[Value]:
    """Loop with carried values; ``body(index, carried)`` returns the next ones."""
    loop = scf.ForOp(i32(first), i32(end), i32(step), [as_ir_value(x) for x in carried])
    with ir.InsertionPoint(loop.body):
        results = body(fx.Int32(loop.induction_variable), list(loop.inner_iter_args))
        scf.YieldOp([as_ir_value(x) for x in results])
    return list(loop.results)


def if_else(
    condition: Value,
    types: Sequence[Value],
    then: Callable[[], Sequence[Value]],
    otherwise: Callable[[], Sequence[Value]],
) -> list[Value]:
    """Branch with results of the given types."""
    branch = scf.IfOp(as_ir_value(condition), list(types), has_else=True)
    for block, make in ((branch.then_block, then), (branch.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.YieldOp([as_ir_value(x) for x in make()])
    return list(branch.results)


def if_then(condition: Value, then: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
    """Branch without results."""
    branch = scf.IfOp(as_ir_value(condition), [], has_else=otherwise is not None)
    for block, make in (("then_block", then), ("else_block", otherwise)):
        if make is not None:
            with ir.InsertionPoint(getattr(branch, block)):
                make()
                scf.YieldOp([])


# ---- across the 64 lanes of a wave: 32-bit integers, one a lane ----
QUAD_XOR1, QUAD_XOR2, QUAD_XOR3 = 0xB1, 0x4E, 0x1B
"""DPP controls: the lane whose number in its quad differs in these bits."""
ROW_MIRROR, ROW_HALF_MIRROR = 0x140, 0x141
"""DPP controls: lane ``15 - i`` of the row of 16, lane ``7 - i`` of the half row."""


def row_rotate(lanes: int) -> int:
    """DPP control: the lane ``lanes`` before, around the row of 16."""
    return 0x120 + lanes


def dpp_mov(x: Value, control: int, rows: int = 0b1111, *, bound_ctrl: bool = True) -> fx.Int32:
    """``v_mov_b32_dpp``: each lane reads the lane that a DPP control names; every lane must be active.

    Args:
        x: the value read.
        control: which lane.
        rows: mask of the rows of 16 lanes that are written; the others get 0.
        bound_ctrl: the instruction's bit; a lane without a source gets 0 either way.
    """
    moved = rocdl.update_dpp(T.i32, i32(0), as_ir_value(x), control, rows, _EVERY_BANK, bound_ctrl)
    return fx.Int32(moved)


def permlane_pair(width: int, x: Value) -> tuple[fx.Int32, fx.Int32]:
    """Two lanes ``width`` (16 or 32) lanes apart both get the values of both: (the lower's, the upper's)."""
    x = as_ir_value(x)
    low, high = (fx.Int32(both) for both in permlane_swap(width, x, x))
    return low, high


def ballot(condition: Value) -> fx.Int64:
    """Bit ``lane`` of the mask is the lane's condition; uniform."""
    return fx.Int64(rocdl.ballot(T.i64, as_ir_value(condition)))


def any_lane(condition: Value) -> Value:
    """Whether the condition holds in some lane; uniform."""
    return ballot(condition) != 0


def popcount(mask: Value) -> fx.Int32:
    """Lanes in a ballot; uniform."""
    ones = llvm.call_intrinsic(T.i64, "llvm.ctpop.i64", [as_ir_value(mask)], [], [])
    return fx.Int32(arith.trunci(T.i32, ones))


def mbcnt(mask: Value) -> fx.Int32:
    """Lanes in a ballot before this one."""
    mask = as_ir_value(mask)
    low = arith.trunci(T.i32, mask)
    high = arith.trunci(T.i32, arith.shrui(mask, i64(32)))
    return fx.Int32(rocdl.mbcnt_hi(T.i32, high, rocdl.mbcnt_lo(T.i32, low, i32(0))))


def read_first_lane(x: Value, mask: Value) -> fx.Int32:
    """The value of a ballot's first lane, of lane 0 where it is empty; uniform."""
    no = arith.constant(ir.IntegerType.get_signless(1), 0)
    first = llvm.call_intrinsic(T.i64, "llvm.cttz.i64", [as_ir_value(mask), no], [], [])
    return readlane(x, arith.andi(arith.trunci(T.i32, first), i32(LANES - 1)))


def med3(a: Value, b: Value, c: Value) -> fx.Int32:
    """The median, in the form that LLVM selects as ``v_med3_i32``."""
    return max_i32(min_i32(a, b), min_i32(max_i32(a, b), c))


def sign_of_bit(lane: Value, bit: int) -> fx.Int32:
    """-1 in lanes whose number has the bit, else 0."""
    extract = "llvm.amdgcn.sbfe.i32"
    return fx.Int32(llvm.call_intrinsic(T.i32, extract, [as_ir_value(lane), i32(bit), i32(1)], [], []))


def wave_sync() -> None:
    """Makes the wave's LDS writes visible to its lanes: LDS is in order in a wave, so only the compiler is
    kept from reordering."""
    llvm.fence(llvm.AtomicOrdering.release, syncscope="wavefront")
    rocdl.wave_barrier()
    llvm.fence(llvm.AtomicOrdering.acquire, syncscope="wavefront")


_EVERY_BANK = 0b1111
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
        total = total + dpp_mov(total, control, rows, bound_ctrl=False)
    return total


def readlane(x: Value, lane: Value) -> fx.Int32:
    """The value of lane ``lane`` (uniform, 0 .. 63); uniform."""
    return fx.Int32(rocdl.readlane(T.i32, as_ir_value(x), i32(lane)))
