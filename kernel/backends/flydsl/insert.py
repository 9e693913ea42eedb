"""Quantise keys to NVFP4 and scatter them into pages on gfx950; byte-exact with every other backend.

    pages[slot div 128]: codes at (slot mod 128) * 64, scales at 8192 + (slot mod 128) * 8

A lane quantises one group of 16 dims: 32 bytes of bfloat16 in, 8 bytes of codes and a scale byte out. Eight
lanes make a key. No step crosses lanes, and no LDS is used. A slot outside the pages is skipped.

Floor: 256 bytes of a bfloat16 key and 8 of its slot in, 72 out: 65,536 keys are 22 MB, 2.8 us at 8 TB/s. The
189 vector instructions of 8 keys are 2.5 us on 1,024 SIMDs at 2.4 GHz.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import flydsl.expr as fx
from flydsl._mlir.dialects import arith, llvm
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl import geometry
from kernel.backends.flydsl import ops as d
from kernel.backends.flydsl.geometry import KEYS_PER_WORKGROUP, LOAD_BYTES, InsertArguments, KeyType, Launch
from kernel.backends.flydsl.jit import launcher
from kernel.backends.flydsl.ops import Value
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUP_DIMS, GROUPS
from kernel.nvfp4 import E4M3_MAX, MIN_SCALE

# ---- Quantisation of 16 values to 8 code bytes and a scale byte, in one lane, without thresholds ----
#
# Values arrive in bfloat16, or in a wider type rounded to it TO ODD: what is not exact becomes the neighbour
# whose last bit is set. Every limit here, a threshold times the scale and 6 times a midpoint of two scales,
# has at most 7 significant bits, where bfloat16 has 8: no limit is odd, so such a value lies on the same side
# of each limit as the exact one, and equals it only if that does.
#
#     scale   amax * fl(1/6) rounds to E4M3 as amax / 6 does: a tie amax = 6 mid gives mid exactly, every
#             other quotient is 2^-8 away from a midpoint. Rounded by integer and fp32 additions
#     codes   the number of thresholds * scale that |x| strictly exceeds. x either equals such a limit or is
#             2^-8 away, so |x| / scale * (1 - 2^-10), with a reciprocal good to 2^-15, lies on the right side
#             of the threshold in both cases and never on it. Times 2^-126 an E2M1 magnitude is the top of an
#             fp32 pattern, subnormals included (.5 is 0x00400000, 1 is 0x00800000, 6 is 0x01C00000): add half
#             a step and shift. The kernel must run with fp32 denormals on
#     sign    of fma(x, reciprocal, +0): negative exactly where x < 0, also where the product underflows

_SUBNORMAL = 2.0**-6
"""E4M3 values below are multiples of 2^-9."""
_ROUND_TO_TICKS = 2.0**14
"""A float of this size has a last place of 2^-9."""
_TO_CODE = 2.0**-126 * (1 - 2.0**-10)
_UPPER = -65536
"""Mask of the upper 16 bits, those of a bfloat16."""
_SCALE_SHIFT, _SCALE_BIAS = 20, 120 << 3
"""Mantissa bits that fp32 has beyond E4M3's 3, and the difference of the exponents' biases there."""
_CODE_SHIFT = 22


@dataclass(frozen=True)
class Group:
    """Sixteen values as fp32, and the largest magnitude, a bfloat16 as fp32."""

    values: Sequence[Value]
    largest: Value


def unpacked(words: Sequence[Value], key_type: KeyType) -> Group:
    """The group in the dwords that hold its values."""
    if key_type is KeyType.BFLOAT16:
        return Group([value for word in words for value in _halves(word)], _largest_of_pairs(words))
    if key_type is KeyType.FLOAT16:
        words = [bits for word in words for bits in _floats_of_halves(word)]
    words = [_to_odd(word) for word in words]
    largest = None
    for word in words:
        magnitude = arith.andi(word, d.i32(0x7FFFFFFF))
        largest = magnitude if largest is None else arith.maxui(largest, magnitude)
    # Bits below a bfloat16's stay in the values: they move none across a limit or onto it.
    return Group([_float(word) for word in words], _float(arith.andi(largest, d.i32(_UPPER))))


def quantized(group: Group) -> tuple[list[Value], Value]:
    """Two dwords of eight codes each, and the scale byte."""
    scale, byte = _scale(group.largest)
    reciprocal = llvm.call_intrinsic(T.f32, "llvm.amdgcn.rcp.f32", [scale], [], [])
    reciprocal = arith.mulf(reciprocal, d.f32(_TO_CODE))
    half = GROUP_DIMS // 2
    codes = [_codes(group.values[at : at + half], reciprocal) for at in (0, half)]
    return codes, byte


def _codes(values: Sequence[Value], reciprocal: Value) -> Value:
    """Eight codes, the first in the lowest nibble."""
    codes = None
    for at, value in enumerate(values):
        fused = llvm.call_intrinsic(T.f32, "llvm.fma.f32", [value, reciprocal, d.f32(0.0)], [], [])
        scaled = _bits(fused)
        rounded = arith.shrui(arith.addi(scaled, d.i32(1 << (_CODE_SHIFT - 1))), d.i32(_CODE_SHIFT))
        magnitude = arith.minui(arith.andi(rounded, d.i32(0x1FF)), d.i32(7))
        code = arith.ori(magnitude, arith.andi(arith.shrui(scaled, d.i32(28)), d.i32(8)))
        code = arith.shli(code, d.i32(4 * at)) if at else code
        codes = code if codes is None else arith.ori(codes, code)
    return codes


def _scale(largest: Value) -> tuple[Value, Value]:
    """``e4m3_rne(clamp(largest / 6, 2^-9, 448))`` as fp32 and as a byte."""
    wanted = arith.mulf(largest, d.f32(1.0 / 6.0))
    wanted = arith.minnumf(arith.maxnumf(wanted, d.f32(MIN_SCALE)), d.f32(E4M3_MAX))
    bits = _bits(wanted)
    odd = arith.andi(arith.shrui(bits, d.i32(_SCALE_SHIFT)), d.i32(1))
    below_half = d.i32((1 << (_SCALE_SHIFT - 1)) - 1)
    normal = arith.andi(arith.addi(arith.addi(bits, below_half), odd), d.i32(-(1 << _SCALE_SHIFT)))
    ticks = arith.addf(wanted, d.f32(_ROUND_TO_TICKS))
    subnormal = arith.cmpf(arith.CmpFPredicate.OLT, wanted, d.f32(_SUBNORMAL))
    value = d.select(subnormal, arith.subf(ticks, d.f32(_ROUND_TO_TICKS)), _float(normal))
    normal_byte = arith.subi(arith.shrui(normal, d.i32(_SCALE_SHIFT)), d.i32(_SCALE_BIAS))
    return value, d.select(subnormal, arith.andi(_bits(ticks), d.i32(15)), normal_byte)


def _largest_of_pairs(words: Sequence[Value]) -> Value:
    """The largest magnitude of packed bfloat16 values."""
    pair = d.vector_type(2, T.i16)
    largest = None
    for word in words:
        magnitudes = llvm.BitcastOp(pair, arith.andi(word, d.i32(0x7FFF7FFF))).result
        largest = magnitudes if largest is None else arith.maxui(largest, magnitudes)
    both = llvm.BitcastOp(T.i32, largest).result
    return _float(arith.maxui(arith.andi(both, d.i32(_UPPER)), arith.shli(both, d.i32(16))))


def _halves(word: Value) -> list[Value]:
    """Two packed bfloat16 as fp32."""
    return [_float(arith.shli(word, d.i32(16))), _float(arith.andi(word, d.i32(_UPPER)))]


def _floats_of_halves(word: Value) -> list[Value]:
    """The fp32 bits of two packed float16."""
    pair = llvm.BitcastOp(d.vector_type(2, T.f16), word).result
    return [_bits(arith.extf(T.f32, d.element(pair, k))) for k in range(2)]


def _to_odd(bits: Value) -> Value:
    """Sets the last bit that a bfloat16 has where bits below it are set."""
    carry = arith.addi(arith.andi(bits, d.i32(0xFFFF)), d.i32(0xFFFF))
    return arith.ori(bits, arith.andi(carry, d.i32(0x10000)))


def _bits(value: Value) -> Value:
    return llvm.BitcastOp(T.i32, as_ir_value(value)).result


def _float(bits: Value) -> Value:
    return llvm.BitcastOp(T.f32, as_ir_value(bits)).result


_CODE_BYTES_A_GROUP = GROUP_DIMS // 2


class GroupWriter:
    """Traces the kernel's body: this lane's group of a key.

    Args:
        key_type: the keys' type.
        arguments: the kernel's arguments.
        workgroup: its number.
        thread: number of this lane in the workgroup.
    """

    def __init__(
        self, key_type: KeyType, arguments: InsertArguments, workgroup: d.Value, thread: d.Value
    ) -> None:
        self.key_type, self.arguments = key_type, arguments
        self.key = workgroup * KEYS_PER_WORKGROUP + d.shift_right(thread, geometry.log2(GROUPS))
        self.group = thread & (GROUPS - 1)

    def run(self) -> None:
        """Quantise and store the group, if there is a key."""
        d.if_then(self.key < self.arguments.num_keys, self._insert)

    def _insert(self) -> None:
        args = self.arguments
        at = d.pointer(args.slots + d.zext(self.key) * 8, d.GLOBAL)
        slot = fx.Int64(llvm.load(T.i64, at, alignment=8))
        group_bytes = GROUP_DIMS * self.key_type.num_bytes
        start = args.keys + d.zext(self.key) * args.key_stride + d.zext(self.group * group_bytes)
        key = d.pointer(start, d.GLOBAL)
        loads = [d.load(4, d.offset(key, at)) for at in range(0, group_bytes, LOAD_BYTES)]
        words = [d.element(load, j) for load in loads for j in range(4)]
        # Unsigned: skips a negative slot and one past the pages.
        inside = arith.cmpi(arith.CmpIPredicate.ult, d.i64(slot), d.i64(args.num_slots))
        d.if_then(inside, lambda: self._store(slot, words))

    def _store(self, slot: fx.Int64, words: list[d.Value]) -> None:
        codes, scale = quantized(unpacked(words, self.key_type))
        page_id = fx.Int64(arith.shrui(d.i64(slot), d.i64(geometry.LOG_BLOCK)))
        page = d.pointer(self.arguments.pages + page_id * self.arguments.page_stride, d.GLOBAL)
        token = fx.Int32(arith.trunci(T.i32, d.i64(slot))) & (BLOCK_TOKENS - 1)
        unit = token * GROUPS + self.group
        place = d.offset(page, d.i64(unit * _CODE_BYTES_A_GROUP))
        d.store(d.pack(codes, T.i32), place, _CODE_BYTES_A_GROUP)
        d.store(arith.trunci(T.i8, scale), d.offset(page, d.i64(unit + CODE_BYTES)), 1)


def build(key_type: KeyType) -> Launch:
    """The launcher for keys of a type: of :class:`InsertArguments`, the number of workgroups, a stream."""
    return launcher(
        "insert",
        geometry.insert_name(key_type),
        InsertArguments,
        lambda arguments: GroupWriter(key_type, arguments, fx.block_idx.x, fx.thread_idx.x).run(),
    )
