"""Vector arithmetic of one result register (or pair): a table of operations and the builder they share.

An operation states the types of its sources and of its result by letter (see ``form.TypeLetter``). DPP,
SDWA, float source modifiers and clamp are handled here once, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.isa import table
from kernel.gfx950.isa.form import (
    Form,
    Step,
    TypeLetter,
    Value,
    ValueSource,
    dpp_step,
    sdwa_step,
    write32,
    write64,
)
from kernel.gfx950.isa.table import Hazard, Row
from kernel.gfx950.program import Operand
from kernel.gfx950.wave import Wave

# ---- Integers and bits: uint32 arrays of 64 lanes (or numpy scalars) in and out ----

U32, U64 = np.uint32, np.uint64
_24, _31, _63 = np.uint32(0xFFFFFF), np.uint32(31), np.uint32(63)
_BYTES_OF_PAIRS = np.repeat(np.arange(0, 64 * 8, 8), 4)
_SIXTEENS = np.arange(0, 64 * 16, 16)[:, None]


def wide(a: Value) -> Value:
    return np.asarray(a).astype(U64)


def multiply_high(a: Value, b: Value) -> Value:
    return (wide(a) * wide(b) >> U64(32)).astype(U32)


def multiply_high_signed(a: Value, b: Value) -> Value:
    return (np.asarray(a).astype(np.int64) * np.asarray(b).astype(np.int64) >> 32).astype(np.int32)


def funnel_shift(high: Value, low: Value, amount: Value) -> Value:
    return (((wide(high) << U64(32)) | wide(low)) >> wide(amount)).astype(U32)


def signed24(a: Value) -> Value:
    return ((np.asarray(a).view(U32) << U32(8)).view(np.int32) >> 8).astype(np.int64)


def multiply_signed24(a: Value, b: Value) -> Value:
    """The low 32 bits of the product of two signed 24-bit numbers."""
    return (signed24(a) * signed24(b)).astype(np.int32)


def byte_permute(a: Value, b: Value, selector: Value) -> Value:
    """V_PERM_B32: selectors 0-3 pick a byte of b, 4-7 of a, 8-11 a replicated sign, 12 is 0x00, above
    0xFF."""
    if selector.ndim == 0 and not int(selector) & 0xF8F8F8F8:
        pairs = np.empty((64, 2), U32)
        pairs[:, 0], pairs[:, 1] = b, a
        places = np.frombuffer(int(selector).to_bytes(4, "little"), np.uint8)
        return pairs.view(np.uint8).take(places, axis=1).view(U32)[:, 0]
    pick: npt.NDArray[np.uint32] = selector if selector.ndim else np.full(64, selector)
    if not np.count_nonzero(pick & U32(0xF8F8F8F8)):
        pairs = np.empty((64, 2), U32)
        pairs[:, 0], pairs[:, 1] = b, a
        return pairs.reshape(-1).view(np.uint8).take(pick.view(np.uint8) + _BYTES_OF_PAIRS).view(U32)
    choices = np.empty((64, 16), np.uint8)
    words = choices.view(U32)
    words[:, 0], words[:, 1] = b, a
    # 8 and 9 are the signs of b's halves, 10 and 11 those of a's
    choices[:, 8:12] = (choices[:, 1:8:2].view(np.int8) >> 7).view(np.uint8)
    choices[:, 12], choices[:, 13] = 0, 0xFF
    cells = np.minimum(pick.view(np.uint8), np.uint8(13)).reshape(64, 4) + _SIXTEENS
    return choices.reshape(-1).take(cells).view(U32)[:, 0]


def bit_field_unsigned(a: Value, at: Value, width: Value) -> Value:
    return (a >> (at & _31)) & ((U32(1) << (width & _31)) - U32(1))


def bit_field_signed(a: Value, at: Value, width: Value) -> Value:
    start = (at & U32(31)).astype(np.int64)
    count = np.minimum((width & U32(31)).astype(np.int64), 32 - start)
    part = (np.asarray(a).astype(np.int64) & 0xFFFFFFFF) >> start & ((np.int64(1) << count) - 1)
    sign = np.where(count > 0, np.int64(1) << np.maximum(count - 1, 0), 0)
    return ((part ^ sign) - sign).astype(np.int32)


def reverse_bits(a: Value) -> Value:
    value: Value = np.asarray(a, U32)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        value = ((value >> U32(shift)) & U32(mask)) | ((value & U32(mask)) << U32(shift))
    return (value >> U32(16)) | (value << U32(16))


def count_ones(a: Value) -> Value:
    value: Value = np.asarray(a, U32)
    value = value - ((value >> U32(1)) & U32(0x55555555))
    value = (value & U32(0x33333333)) + ((value >> U32(2)) & U32(0x33333333))
    return ((value + (value >> U32(4)) & U32(0x0F0F0F0F)) * U32(0x01010101)) >> U32(24)


def leading_zeros(a: Value) -> Value:
    """V_FFBH_U32: 0xFFFFFFFF where no bit is set."""
    value = np.asarray(a, U32)
    _, exponent = np.frexp(value.astype(np.float64))
    return np.where(value == 0, U32(0xFFFFFFFF), (32 - exponent).astype(U32))


def trailing_zeros(a: Value) -> Value:
    """V_FFBL_B32: 0xFFFFFFFF where no bit is set."""
    value = np.asarray(a, U32)
    lowest = value & (~value + U32(1))
    return np.where(value == 0, U32(0xFFFFFFFF), count_ones(lowest - U32(1)))


def median(a: Value, b: Value, c: Value) -> Value:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def shift64(shift: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    return lambda amount, a: shift(a, (amount & _63).astype(a.dtype))


def scaled(a: Value, exponent: Value) -> Value:
    return np.ldexp(np.asarray(a, np.float32), np.clip(np.asarray(exponent), -400, 400))


def bfloat16_pair(a: Value, b: Value) -> Value:
    """Round to nearest even; the first source goes to the low half."""

    def one(x: Value) -> Value:
        bits = np.asarray(x, np.float32).view(U32)
        rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
        return np.where(np.isnan(x), (bits >> U32(16)) | U32(0x40), rounded)

    return one(a) | (one(b) << U32(16))


def half_result(a: Value) -> Value:
    """A 16-bit result: gfx9 clears the upper half of the register."""
    return np.asarray(a).view(np.uint16).astype(U32)


# ---- IEEE single precision: NaN, signed zero and rounding ----
#
# The mode is the one the metadata is checked for: round to nearest even, denormals kept, ``ieee_mode`` on, so
# that a signalling NaN operand gives a quiet NaN. Which NaN payload comes out of an operation is not promised
# by the ISA in all cases; here it is the first NaN operand, quieted.

Lanes = Any
_QUIET = np.uint32(0x00400000)
_EXPONENT = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_ZERO = np.float32(0)


def _bits(value: Lanes) -> npt.NDArray[np.uint32]:
    return np.asarray(value, np.float32).view(np.uint32)


def _signalling(value: Lanes) -> npt.NDArray[np.bool_]:
    bits = _bits(value)
    found: npt.NDArray[np.bool_] = ((bits & _MAGNITUDE) > _EXPONENT) & ((bits & _QUIET) == 0)
    return found


def quiet(value: Lanes) -> Lanes:
    """Signalling NaNs made quiet, everything else as it is."""
    return np.where(_signalling(value), (_bits(value) | _QUIET).view(np.float32), value)


def _extreme(a: Lanes, b: Lanes, propagating: Any, ignoring: Any, merge: Any) -> Lanes:
    """maxNum and minNum of IEEE 754-2008: a quiet NaN loses, a signalling one wins; +0 is above -0."""
    result = propagating(a, b)
    equal = a == b
    if np.count_nonzero(equal):  # equal patterns merge to themselves, the two zeros to the right one
        result = np.where(equal, merge(_bits(a), _bits(b)).view(np.float32), result)
    if np.count_nonzero(np.isnan(result)):
        kept = np.where(np.isnan(a) & np.isnan(b), quiet(a), ignoring(a, b))
        kept = np.where(_signalling(b), quiet(b), kept)
        kept = np.where(_signalling(a), quiet(a), kept)
        result = np.where(np.isnan(result), kept, result)
    return result


def maximum(a: Lanes, b: Lanes) -> Lanes:
    return _extreme(a, b, np.maximum, np.fmax, np.bitwise_and)


def minimum(a: Lanes, b: Lanes) -> Lanes:
    return _extreme(a, b, np.minimum, np.fmin, np.bitwise_or)


def maximum3(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    result = np.maximum(np.maximum(a, b), c)
    return result if _plain(result) else maximum(maximum(a, b), c)


def minimum3(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    result = np.minimum(np.minimum(a, b), c)
    return result if _plain(result) else minimum(minimum(a, b), c)


def _plain(extreme: Lanes) -> bool:
    """Whether no lane is a NaN or a zero, so that numpy and the device agree."""
    return np.count_nonzero(extreme) == extreme.size and not np.count_nonzero(np.isnan(extreme))


def median3(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """The middle value; with a NaN among them the minimum of the others (ISA: V_MED3_F32)."""
    any_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    high = maximum(a, b)
    middle = maximum(minimum(a, b), minimum(high, c))
    return np.where(any_nan, minimum3(a, b, c), middle)


def fused_multiply_add(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a * b + c rounded once.

    The product is exact in double. The sum is rounded to odd there (Boldo and Melquiond, "Emulation of FMA
    and correctly rounded sums", 2008), after which rounding to single gives the correctly rounded result.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = np.array(total, np.float64).view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + toward, bits).view(np.float64).astype(np.float32)


def reciprocal(a: Lanes) -> Lanes:
    """Correctly rounded; the device's is within 1 ulp and may differ. Serves integer division."""
    return np.float32(1) / np.asarray(a, np.float32)


def to_unsigned(a: Lanes) -> npt.NDArray[np.uint32]:
    """Truncated and saturated; NaN gives 0."""
    wide = np.trunc(np.asarray(a, np.float64))
    return np.where(np.isnan(wide), 0, np.clip(wide, 0, 0xFFFFFFFF)).astype(np.uint32)


def to_signed(a: Lanes) -> npt.NDArray[np.int32]:
    """Truncated and saturated; NaN gives 0."""
    wide = np.trunc(np.asarray(a, np.float64))
    return np.where(np.isnan(wide), 0, np.clip(wide, -(1 << 31), (1 << 31) - 1)).astype(np.int32)


def clamp(value: Lanes) -> Lanes:
    """The clamp modifier: to [0, 1], and NaN to 0 (``dx10_clamp``, which is always on)."""
    return np.where(np.isnan(value), _ZERO, np.clip(value, _ZERO, np.float32(1)))


# ---- Operations ----


@dataclass(frozen=True)
class Operation:
    """``sources`` and ``result`` are type letters; ``function`` takes and gives 64 lanes."""

    sources: str
    result: str
    function: Callable[..., Value]


# Operations with a short encoding, and with dpp and sdwa.
_SHORT = {
    "v_mov_b32": Operation("u", "u", lambda a: a),
    "v_not_b32": Operation("u", "u", np.invert),
    "v_and_b32": Operation("uu", "u", np.bitwise_and),
    "v_or_b32": Operation("uu", "u", np.bitwise_or),
    "v_xor_b32": Operation("uu", "u", np.bitwise_xor),
    "v_xnor_b32": Operation("uu", "u", lambda a, b: ~(a ^ b)),
    "v_add_u32": Operation("uu", "u", np.add),
    "v_sub_u32": Operation("uu", "u", np.subtract),
    "v_subrev_u32": Operation("uu", "u", lambda a, b: b - a),
    "v_mul_u32_u24": Operation("uu", "u", lambda a, b: (a & _24) * (b & _24)),
    "v_mul_hi_u32_u24": Operation("uu", "u", lambda a, b: multiply_high(a & _24, b & _24)),
    "v_min_u32": Operation("uu", "u", np.minimum),
    "v_max_u32": Operation("uu", "u", np.maximum),
    "v_lshlrev_b32": Operation("uu", "u", lambda a, b: b << (a & _31)),
    "v_lshrrev_b32": Operation("uu", "u", lambda a, b: b >> (a & _31)),
    "v_bfrev_b32": Operation("u", "u", reverse_bits),
    "v_ffbh_u32": Operation("u", "u", leading_zeros),
    "v_ffbl_b32": Operation("u", "u", trailing_zeros),
    "v_ashrrev_i32": Operation("ui", "i", lambda a, b: b >> (a & _31).astype(np.int32)),
    "v_min_i32": Operation("ii", "i", np.minimum),
    "v_max_i32": Operation("ii", "i", np.maximum),
    "v_mul_i32_i24": Operation("uu", "i", multiply_signed24),
    "v_add_f32": Operation("ff", "f", lambda a, b: quiet(a + b)),
    "v_sub_f32": Operation("ff", "f", lambda a, b: quiet(a - b)),
    "v_subrev_f32": Operation("ff", "f", lambda a, b: quiet(b - a)),
    "v_mul_f32": Operation("ff", "f", lambda a, b: quiet(a * b)),
    "v_max_f32": Operation("ff", "f", maximum),
    "v_min_f32": Operation("ff", "f", minimum),
    "v_trunc_f32": Operation("f", "f", lambda a: quiet(np.trunc(a))),
    "v_floor_f32": Operation("f", "f", lambda a: quiet(np.floor(a))),
    "v_ceil_f32": Operation("f", "f", lambda a: quiet(np.ceil(a))),
    "v_rndne_f32": Operation("f", "f", lambda a: quiet(np.rint(a))),
    "v_cvt_f32_u32": Operation("u", "f", lambda a: np.asarray(a).astype(np.float32)),
    "v_cvt_f32_i32": Operation("i", "f", lambda a: np.asarray(a).astype(np.float32)),
    "v_cvt_u32_f32": Operation("f", "u", to_unsigned),
    "v_cvt_i32_f32": Operation("f", "i", to_signed),
    "v_cvt_f32_ubyte0": Operation("u", "f", lambda a: np.asarray(a & U32(255)).astype(np.float32)),
    "v_cvt_f32_ubyte1": Operation("u", "f", lambda a: np.asarray(a >> U32(8) & U32(255)).astype(np.float32)),
    "v_cvt_f32_ubyte2": Operation("u", "f", lambda a: np.asarray(a >> U32(16) & U32(255)).astype(np.float32)),
    "v_cvt_f32_ubyte3": Operation("u", "f", lambda a: np.asarray(a >> U32(24)).astype(np.float32)),
    "v_cvt_f32_f16": Operation("h", "f", lambda a: quiet(np.asarray(a).view(np.float16).astype(np.float32))),
    "v_cvt_f16_f32": Operation("f", "u", lambda a: half_result(np.asarray(quiet(a)).astype(np.float16))),
    "v_add_u16": Operation("hh", "h", lambda a, b: a + b),
    "v_sub_u16": Operation("hh", "h", lambda a, b: a - b),
    "v_subrev_u16": Operation("hh", "h", lambda a, b: b - a),
    "v_mul_lo_u16": Operation("hh", "h", lambda a, b: a * b),
    "v_min_u16": Operation("hh", "h", np.minimum),
    "v_max_u16": Operation("hh", "h", np.maximum),
    "v_min_i16": Operation("kk", "h", np.minimum),
    "v_max_i16": Operation("kk", "h", np.maximum),
    "v_lshlrev_b16": Operation("hh", "h", lambda a, b: b << (a & np.uint16(15))),
    "v_lshrrev_b16": Operation("hh", "h", lambda a, b: b >> (a & np.uint16(15))),
    "v_ashrrev_i16": Operation("hk", "h", lambda a, b: b >> (a & np.uint16(15)).astype(np.int16)),
}  # fmt: skip

# Operations with the long encoding only.
_LONG = {
    "v_add3_u32": Operation("uuu", "u", lambda a, b, c: a + b + c),
    "v_mul_lo_u32": Operation("uu", "u", np.multiply),
    "v_mul_hi_u32": Operation("uu", "u", multiply_high),
    "v_mad_u32_u24": Operation("uuu", "u", lambda a, b, c: (a & _24) * (b & _24) + c),
    "v_min3_u32": Operation("uuu", "u", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": Operation("uuu", "u", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u32": Operation("uuu", "u", median),
    "v_and_or_b32": Operation("uuu", "u", lambda a, b, c: (a & b) | c),
    "v_or3_b32": Operation("uuu", "u", lambda a, b, c: a | b | c),
    "v_lshl_or_b32": Operation("uuu", "u", lambda a, b, c: (a << (b & _31)) | c),
    "v_lshl_add_u32": Operation("uuu", "u", lambda a, b, c: (a << (b & _31)) + c),
    "v_add_lshl_u32": Operation("uuu", "u", lambda a, b, c: (a + b) << (c & _31)),
    "v_xad_u32": Operation("uuu", "u", lambda a, b, c: (a ^ b) + c),
    "v_bfi_b32": Operation("uuu", "u", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfe_u32": Operation("uuu", "u", bit_field_unsigned),
    "v_bfm_b32": Operation("uu", "u", lambda a, b: ((U32(1) << (a & _31)) - U32(1)) << (b & _31)),
    "v_perm_b32": Operation("uuu", "u", byte_permute),
    "v_alignbit_b32": Operation("uuu", "u", lambda a, b, c: funnel_shift(a, b, c & _31)),
    "v_alignbyte_b32": Operation("uuu", "u", lambda a, b, c: funnel_shift(a, b, (c & U32(3)) << U32(3))),
    "v_bcnt_u32_b32": Operation("uu", "u", lambda a, b: count_ones(a) + b),
    "v_min3_i32": Operation("iii", "i", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": Operation("iii", "i", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i32": Operation("iii", "i", median),
    "v_bfe_i32": Operation("uuu", "i", bit_field_signed),
    "v_mul_hi_i32": Operation("ii", "i", multiply_high_signed),
    "v_mad_i32_i24": Operation(
        "uui", "i", lambda a, b, c: multiply_signed24(a, b) + c
    ),
    "v_fma_f32": Operation("fff", "f", fused_multiply_add),
    "v_max3_f32": Operation("fff", "f", maximum3),
    "v_min3_f32": Operation("fff", "f", minimum3),
    "v_med3_f32": Operation("fff", "f", median3),
    "v_ldexp_f32": Operation("fi", "f", scaled),
    "v_cvt_pk_bf16_f32": Operation("ff", "u", bfloat16_pair),
    "v_lshlrev_b64": Operation("uU", "U", shift64(lambda a, n: a << n)),
    "v_lshrrev_b64": Operation("uU", "U", shift64(lambda a, n: a >> n)),
    "v_ashrrev_i64": Operation("uI", "I", shift64(lambda a, n: a >> n)),
    "v_lshl_add_u64": Operation("UuU", "U", lambda a, n, c: (a << wide(n & U32(7))) + c),
}  # fmt: skip

_TRANSCENDENTAL = {
    "v_rcp_f32": Operation("f", "f", reciprocal),
    "v_rcp_iflag_f32": Operation("f", "f", reciprocal),
}


def arithmetic(form: Form, operation: Operation) -> Step:
    """A step for ``operation`` in whatever encoding the form has."""
    encoding = form.allow_encoding("dpp", "sdwa")
    operands = form.operands(1 + len(operation.sources))
    pair = operation.result in ("U", "I")
    destination = form.vector(operands[0], 2 if pair else 1)
    function = operation.function
    if form.flag("clamp"):
        if operation.result != "f":
            raise UnsupportedInstructionError(f"{form.mnemonic} with clamp")
        unclamped = function

        def function(*sources: Value) -> Value:
            return clamp(unclamped(*sources))

    if operation.result == "h":
        wide = function

        def function(*sources: Value) -> Value:
            return half_result(wide(*sources))

    letter = "u" if operation.result == "h" else operation.result
    if encoding == "sdwa":
        return sdwa_step(form, operands, operation.sources, letter, function)
    sources = [
        form.source(operand, cast("TypeLetter", letter))
        for operand, letter in zip(operands[1:], operation.sources, strict=True)
    ]
    if encoding == "dpp":
        return dpp_step(form, operands, operation.sources, letter, function, sources)
    put = write64(destination) if pair else write32(destination, letter)

    def step(wave: Wave) -> None:
        put(wave, function(*[source(wave) for source in sources]))

    if set(operation.sources) != {letter} or letter not in ("u", "f"):
        return step
    return _in_whole_waves(operands, sources, function, letter, step)


def _in_whole_waves(
    operands: Sequence[Operand],
    sources: Sequence[ValueSource],
    function: Callable[..., Value],
    letter: str,
    step: Step,
) -> Step:
    """``step``, shortened where every lane is active and every register defined: rows in, a row out."""
    destination = operands[0].index
    plain = [operand.kind == "vector" and not operand.modified for operand in operands[1:]]
    # of what is no register the destination stands in
    places = [
        operand.index if is_row else destination for operand, is_row in zip(operands[1:], plain, strict=True)
    ]
    unsigned, in_place = letter == "u", isinstance(function, np.ufunc)
    if any(operand.kind == "vector" and operand.modified for operand in operands[1:]):
        return step

    def one(wave: Wave) -> None:
        states = wave.vector_states
        if wave.full and not (states[destination] or states[a]):
            rows = wave.u32 if unsigned else wave.f32
            x = rows[a] if a_is_row else first(wave)
            if wave.taint is None:
                rows[destination][:] = function(x)
                return
        step(wave)

    def two(wave: Wave) -> None:
        states = wave.vector_states
        if wave.full and not (states[destination] or states[a] or states[b]):
            rows = wave.u32 if unsigned else wave.f32
            x = rows[a] if a_is_row else first(wave)
            y = rows[b] if b_is_row else second(wave)
            if wave.taint is None:
                if in_place:
                    function(x, y, out=rows[destination])
                else:
                    rows[destination][:] = function(x, y)
                return
        step(wave)

    def three(wave: Wave) -> None:
        states = wave.vector_states
        if wave.full and not (states[destination] or states[a] or states[b] or states[c]):
            rows = wave.u32 if unsigned else wave.f32
            x = rows[a] if a_is_row else first(wave)
            y = rows[b] if b_is_row else second(wave)
            z = rows[c] if c_is_row else third(wave)
            if wave.taint is None:
                rows[destination][:] = function(x, y, z)
                return
        step(wave)

    first, second, third = (*sources, *sources, *sources)[:3]
    a, b, c = (*places, destination, destination)[:3]
    a_is_row, b_is_row, c_is_row = (*plain, False, False)[:3]
    return (one, two, three)[len(sources) - 1]


def _multiply_accumulate(form: Form) -> Step:
    """v_fmac_f32: the destination is the third source."""
    destination, a, b = form.operands(3)
    register = form.vector(destination)
    first, second, third = form.source(a, "f"), form.source(b, "f"), form.source(destination, "f")
    put = write32(register, "f")
    return lambda wave: put(wave, fused_multiply_add(first(wave), second(wave), third(wave)))


def _table_of_three(form: Form) -> Step:
    """v_bitop3_b32: bit 4a + 2b + c of the table is the result for the source bits a, b, c."""
    table = form.number("bitop3")
    if not 0 <= table <= 0xFF:
        raise UnsupportedInstructionError(f"bitop3:{table:#x}: a table has 8 bits")
    return arithmetic(form, Operation("uuu", "u", _bitop3_function(table)))


def _bitop3_function(table: int) -> Callable[[Value, Value, Value], Value]:
    # the terms where a = 0 and a = 1, each a function of b and c alone
    def half(bits: int) -> Callable[[Value, Value], Value]:
        ones = U32(0xFFFFFFFF)
        functions: list[Callable[[Value, Value], Value]] = [
            lambda _b, _c: U32(0),
            lambda b, c: ~(b | c),
            lambda b, c: ~b & c,
            lambda b, _c: ~b,
            lambda b, c: b & ~c,
            lambda _b, c: ~c,
            lambda b, c: b ^ c,
            lambda b, c: ~(b & c),
            lambda b, c: b & c,
            lambda b, c: ~(b ^ c),
            lambda _b, c: c,
            lambda b, c: ~b | c,
            lambda b, _c: b,
            lambda b, c: b | ~c,
            lambda b, c: b | c,
            lambda _b, _c: ones,
        ]
        return functions[bits]

    clear, set_ = half(table & 15), half(table >> 4)
    if table & 15 == 15 - (table >> 4):
        return lambda a, b, c: clear(b, c) ^ a

    def function(a: Value, b: Value, c: Value) -> Value:
        zero = clear(b, c)
        return zero ^ (a & (zero ^ set_(b, c)))

    return function


# ---- The table's rows ----

row = partial(
    Row, kind="valu", destinations=1, keeps=False, writes_exec=False, sets_scc=False, falls_through=True,
    suffixes=("e32", "e64", "dpp", "sdwa"), rule=table.vector, wide=(), lane_bytes=0, hazard="none",
)  # fmt: skip
"""The family of vector instructions."""
LONG_ONLY = ("e64",)


def _rows() -> Iterator[Row]:
    def operation(name: str, found: Operation, suffixes: tuple[str, ...], hazard: Hazard = "none") -> Row:
        wide = tuple(at for at, letter in enumerate(found.sources) if letter in ("U", "I"))
        build = partial(arithmetic, operation=found)
        return row(name, build=build, suffixes=suffixes, wide=wide, hazard=hazard)

    every = ("e32", "e64", "dpp", "sdwa")
    for name, found in _SHORT.items():
        yield operation(name, found, every)
    for name, found in _LONG.items():
        yield operation(name, found, LONG_ONLY)
    for name, found in _TRANSCENDENTAL.items():
        yield operation(name, found, every, "transcendental")
    yield operation("v_mov_b64", Operation("U", "U", lambda a: a), ("e32", "e64"))
    yield row("v_fmac_f32", build=_multiply_accumulate, keeps=True, suffixes=("e32", "e64", "dpp"))
    yield row("v_bitop3_b32", build=_table_of_three, suffixes=LONG_ONLY)


ROWS = tuple(_rows())
