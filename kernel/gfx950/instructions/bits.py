"""Integer and bit operations of the vector ALU on 64 lanes: uint32 arrays (or numpy scalars) in and out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kernel.gfx950.form import Value

U32, U64 = np.uint32, np.uint64
_31, _63 = np.uint32(31), np.uint32(63)
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
    choices = np.empty((64, 16), np.uint8)
    words = choices.view(U32)
    words[:, 0], words[:, 1] = b, a
    pick: npt.NDArray[np.uint32] = np.empty(64, U32)
    pick[:] = selector
    if np.count_nonzero(pick & U32(0xF8F8F8F8)):
        # 8 and 9 are the signs of b's halves, 10 and 11 those of a's
        choices[:, 8:12] = (choices[:, 1:8:2].view(np.int8) >> 7).view(np.uint8)
        choices[:, 12], choices[:, 13] = 0, 0xFF
        pick = np.minimum(pick.view(np.uint8), np.uint8(13)).view(U32)
    cells = pick.view(np.uint8).reshape(64, 4) + _SIXTEENS
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
