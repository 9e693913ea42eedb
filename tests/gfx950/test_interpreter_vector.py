"""Single-precision instructions against exact rational arithmetic and the rules of IEEE 754."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernel.gfx950 import UnsupportedInstructionError
from tests.gfx950.one_wave import run_lanes

QUIET_NAN = 0x7FC00000


def is_nan(x: int) -> bool:
    return x & 0x7FFFFFFF > 0x7F800000


def is_signalling(x: int) -> bool:
    return is_nan(x) and not x & 0x00400000


def is_inf(x: int) -> bool:
    return x & 0x7FFFFFFF == 0x7F800000


def exact(x: int) -> Fraction:
    """The value of a finite bit pattern."""
    mantissa, exponent = x & 0x7FFFFF, x >> 23 & 0xFF
    value = Fraction(mantissa if exponent == 0 else mantissa | 0x800000) * Fraction(2) ** (
        max(exponent, 1) - 150
    )
    return -value if x >> 31 else value


def rounded(value: Fraction, zero_sign: int = 0) -> int:
    """Round to nearest, ties to even, denormals kept; ``zero_sign`` is the sign bit of an exact zero."""
    if value == 0:
        return zero_sign << 31
    sign, magnitude = int(value < 0), abs(value)
    exponent = max(math.floor(math.log2(magnitude)) if magnitude > Fraction(2) ** -1000 else -1000, -126)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > -126 and magnitude < Fraction(2) ** exponent:
        exponent -= 1
    units = magnitude / Fraction(2) ** (exponent - 23)
    whole = round(units)  # Python rounds a Fraction to even on ties
    pattern = whole if exponent == -126 else whole + ((exponent + 126) << 23)
    return sign << 31 | min(pattern, 0x7F800000)


def add(a: int, b: int) -> int:
    if is_nan(a) or is_nan(b):
        return QUIET_NAN
    if is_inf(a) or is_inf(b):
        return QUIET_NAN if is_inf(a) and is_inf(b) and a != b else (a if is_inf(a) else b)
    total = exact(a) + exact(b)
    return rounded(total, a >> 31 & b >> 31 if total == 0 else 0)


def multiply(a: int, b: int) -> int:
    sign = (a ^ b) >> 31
    if is_nan(a) or is_nan(b):
        return QUIET_NAN
    if is_inf(a) or is_inf(b):
        return QUIET_NAN if 0 in (a & 0x7FFFFFFF, b & 0x7FFFFFFF) else sign << 31 | 0x7F800000
    return rounded(exact(a) * exact(b), sign)


def fused(a: int, b: int, c: int) -> int:
    if any(is_nan(x) or is_inf(x) for x in (a, b, c)):
        product = multiply(a, b) if not (is_nan(a) or is_nan(b)) else QUIET_NAN
        if is_inf(a) or is_inf(b) or is_nan(product) or is_nan(c):
            return add(product, c) if not is_nan(product) else QUIET_NAN
        return c
    product_sign = (a ^ b) >> 31
    total = exact(a) * exact(b) + exact(c)
    return rounded(total, product_sign & c >> 31 if total == 0 else 0)


def order(x: int) -> int:
    """An integer that orders all finite and infinite values, -0 below +0."""
    return x if x < 0x80000000 else ~(x & 0x7FFFFFFF)


def best(values: list[int], choose: Callable[..., int]) -> int:
    """maxNum / minNum: a signalling NaN wins, a quiet one loses."""
    result = values[0]
    for value in values[1:]:
        if is_signalling(result) or is_signalling(value) or (is_nan(result) and is_nan(value)):
            result = QUIET_NAN
        elif is_nan(result) or is_nan(value):
            result = value if is_nan(result) else result
        else:
            result = choose(result, value, key=order)
    return result


def maximum(*values: int) -> int:
    return best(list(values), max)


def minimum(*values: int) -> int:
    return best(list(values), min)


def median(a: int, b: int, c: int) -> int:
    if any(is_nan(x) for x in (a, b, c)):
        return minimum(a, b, c)
    return sorted((a, b, c), key=order)[1]


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def reciprocal(a: int) -> int:
    if is_nan(a):
        return QUIET_NAN
    if is_inf(a):
        return a & 0x80000000
    return (a & 0x80000000) | 0x7F800000 if exact(a) == 0 else rounded(1 / exact(a))


def integral(function: Callable[[Fraction], int]) -> Callable[[int], int]:
    def apply(a: int) -> int:
        if is_nan(a):
            return QUIET_NAN
        return a if is_inf(a) else rounded(Fraction(function(exact(a))), a >> 31)

    return apply


def to_integer(low: int, high: int) -> Callable[[int], int]:
    def apply(a: int) -> int:
        if is_nan(a):
            return 0
        if is_inf(a):
            return (low if a >> 31 else high) & 0xFFFFFFFF
        return min(max(math.trunc(exact(a)), low), high) & 0xFFFFFFFF

    return apply


def half_from_float(a: int) -> int:
    value = struct.unpack("<f", struct.pack("<I", a))[0]
    try:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    except OverflowError:
        return 0x7C00 | (0x8000 if value < 0 else 0)


def bfloat_bits(a: int) -> int:
    if is_nan(a):
        return a >> 16 | 0x40
    low = a & 0xFFFF
    return (a >> 16) + (low > 0x8000 or (low == 0x8000 and a >> 16 & 1 == 1))


def negate(x: int) -> int:
    return x ^ 0x80000000


OPERATIONS: dict[str, tuple[int, Callable[..., int]]] = {
    "v_add_f32": (2, add),
    "v_sub_f32": (2, lambda a, b: add(a, negate(b))),
    "v_subrev_f32": (2, lambda a, b: add(negate(a), b)),
    "v_mul_f32": (2, multiply),
    "v_fma_f32": (3, fused),
    "v_max_f32": (2, maximum),
    "v_min_f32": (2, minimum),
    "v_max3_f32": (3, maximum),
    "v_min3_f32": (3, minimum),
    "v_med3_f32": (3, median),
    "v_rcp_f32": (1, reciprocal),
    "v_rcp_iflag_f32": (1, reciprocal),
    "v_trunc_f32": (1, integral(math.trunc)),
    "v_floor_f32": (1, integral(math.floor)),
    "v_ceil_f32": (1, integral(math.ceil)),
    "v_rndne_f32": (1, integral(round)),
    "v_cvt_f32_u32": (1, lambda a: rounded(Fraction(a))),
    "v_cvt_f32_i32": (1, lambda a: rounded(Fraction(a - (1 << 32) if a >> 31 else a))),
    "v_cvt_u32_f32": (1, to_integer(0, 0xFFFFFFFF)),
    "v_cvt_i32_f32": (1, to_integer(-(1 << 31), (1 << 31) - 1)),
    "v_cvt_f32_ubyte0": (1, lambda a: bits(a & 255)),
    "v_cvt_f32_ubyte1": (1, lambda a: bits(a >> 8 & 255)),
    "v_cvt_f32_ubyte2": (1, lambda a: bits(a >> 16 & 255)),
    "v_cvt_f32_ubyte3": (1, lambda a: bits(a >> 24)),
    "v_cvt_f32_f16": (1, lambda a: bits(struct.unpack("<e", struct.pack("<H", a & 0xFFFF))[0])),
    "v_cvt_f16_f32": (1, half_from_float),
    "v_cvt_pk_bf16_f32": (2, lambda a, b: bfloat_bits(a) | bfloat_bits(b) << 16),
}
COVERED = {
    *OPERATIONS,
    "v_ldexp_f32",
    "v_fmac_f32",
    "v_pk_add_f32",
    "v_pk_mul_f32",
    "v_pk_fma_f32",
}
COVERED |= {"v_pk_mov_b32"}

SPECIAL = [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x807FFFFF, 0x3F800000, 0xBF800000, 0x7F7FFFFF]
SPECIAL += [0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001, 0xFF812345, 0x3F000000]
SPECIAL += [
    0x3F800001,
    0x33800000,
    0x4F7FFFFF,
    0x4F800000,
    0xCF000000,
    0x4EFFFFFF,
    0x40200000,
    0xC0600000,
    0x3FFFFFFF,
]


def operands(count: int, seed: int, finite: bool = False) -> list[npt.NDArray[np.uint32]]:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 1 << 32, (count, 64), dtype=np.uint64).astype(np.uint32)
    special = np.array([x for x in SPECIAL if not finite or not (is_nan(x) or is_inf(x))], np.uint32)
    rows[:, :36] = rng.choice(special, (count, 36))
    near = (rng.standard_normal((count, 16)) * 4).astype(np.float32).view(np.uint32)
    rows[:, 36:52] = near
    if finite:
        rows[:, 52:] = (rng.standard_normal((count, 12)) * 1e-38).astype(np.float32).view(np.uint32)
    return list(rows)


def same(found: int, wanted: int) -> bool:
    return found == wanted or (is_nan(found) and is_nan(wanted) and not is_signalling(found))


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_lane(name: str) -> None:
    count, lane = OPERATIONS[name]
    for seed in (1, 2, 3):
        rows = operands(count, seed, finite=name == "v_cvt_f16_f32")
        names = [f"v{at + 10}" for at in range(count)]
        vectors = dict(zip(names, rows, strict=True))
        found = run_lanes(f"{name} v5, {', '.join(names)}", vectors=vectors, read_vectors=["v5"]).vectors[
            "v5"
        ]
        for at in range(64):
            inputs = [int(row[at]) for row in rows]
            wanted = lane(*inputs)
            assert same(int(found[at]), wanted), (
                f"{[hex(x) for x in inputs]}: {found[at]:#x}, not {wanted:#x}"
            )


def test_rounding_of_a_sum_that_double_precision_would_round_twice() -> None:
    # 1 + 2^-24 + 2^-60: to nearest even it is a tie in double's view, not in fact
    a, b, c = (np.full(64, bits(x), np.uint32) for x in (1.0, 2.0**-24 + 2.0**-47, 1.0))
    found = run_lanes(
        "v_fma_f32 v5, v10, v11, v12", vectors={"v10": a, "v11": b, "v12": c}, read_vectors=["v5"]
    )
    assert int(found.vectors["v5"][0]) == fused(int(a[0]), int(b[0]), int(c[0])) == 0x3F800001


def test_accumulating_form() -> None:
    a, b, c = operands(3, 5, finite=True)
    found = run_lanes(
        "v_fmac_f32_e32 v5, v10, v11", vectors={"v10": a, "v11": b, "v5": c}, read_vectors=["v5"]
    )
    for at in range(64):
        assert same(int(found.vectors["v5"][at]), fused(int(a[at]), int(b[at]), int(c[at])))


def test_ldexp() -> None:
    (a,) = operands(1, 6, finite=True)
    exponent = np.random.default_rng(6).integers(-300, 300, 64).astype(np.int32)
    vectors = {"v10": a, "v11": exponent.view(np.uint32)}
    found = run_lanes("v_ldexp_f32 v5, v10, v11", vectors=vectors, read_vectors=["v5"]).vectors["v5"]
    for at in range(64):
        x = int(a[at])
        assert int(found[at]) == rounded(exact(x) * Fraction(2) ** int(exponent[at]), x >> 31)


def test_source_modifiers_and_clamp() -> None:
    a, b = operands(2, 7)
    found = run_lanes(
        "v_mul_f32_e64 v5, -v10, |v11|\nv_add_f32_e64 v6, v10, -|v11|\nv_add_f32_e64 v7, v10, v11 clamp",
        vectors={"v10": a, "v11": b},
        read_vectors=["v5", "v6", "v7"],
    ).vectors
    for at in range(64):
        x, y = int(a[at]), int(b[at])
        assert same(int(found["v5"][at]), multiply(negate(x), y & 0x7FFFFFFF))
        assert same(int(found["v6"][at]), add(x, y | 0x80000000))
        total = add(x, y)
        clamped = 0 if is_nan(total) else min(max(order(total), 0), bits(1.0))
        assert int(found["v7"][at]) & 0x7FFFFFFF == clamped


@pytest.mark.parametrize("modifiers", ["mul:2", "div:2"])
def test_output_modifiers_are_refused(modifiers: str) -> None:
    with pytest.raises(UnsupportedInstructionError, match="modifier"):
        run_lanes(f"v_mul_f32_e64 v5, v0, v0 {modifiers}")


def test_packed_pairs_and_their_selections() -> None:
    a, b, c, d, e, f = operands(6, 8, finite=True)
    vectors = {"v10": a, "v11": b, "v12": c, "v13": d, "v14": e, "v15": f}
    text = """
        v_pk_add_f32 v[20:21], v[10:11], v[12:13]
        v_pk_mul_f32 v[22:23], v[10:11], v[12:13] op_sel:[1,0] op_sel_hi:[0,1]
        v_pk_fma_f32 v[24:25], v[10:11], v[12:13], v[14:15] neg_lo:[1,0,0] neg_hi:[0,0,1]
        v_pk_add_f32 v[26:27], v[10:11], 1.0 op_sel_hi:[1,0]
        v_pk_mov_b32 v[28:29], v[10:11], v[12:13] op_sel:[1,0]
    """
    names = [f"v{at}" for at in range(20, 30)]
    found = run_lanes(text, vectors=vectors, read_vectors=names).vectors
    one = bits(1.0)
    for at in range(64):
        u, v, w, x, y, z = (int(row[at]) for row in (a, b, c, d, e, f))
        wanted = [add(u, w), add(v, x), multiply(v, w), multiply(u, x)]
        wanted += [fused(negate(u), w, y), fused(v, x, negate(z)), add(u, one), add(v, one), v, w]
        assert all(same(int(found[name][at]), value) for name, value in zip(names, wanted, strict=True))


def test_the_high_half_of_a_packed_constant_is_refused() -> None:
    with pytest.raises(UnsupportedInstructionError, match="op_sel_hi"):
        run_lanes("v_pk_add_f32 v[4:5], v[10:11], 1.0")


# Integer vector instructions, lane by lane, against the ISA's definition written with Python integers.

M32 = 0xFFFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF


def s32(x: int) -> int:
    return x - (1 << 32) if x & 0x80000000 else x


def s16(x: int) -> int:
    x &= 0xFFFF
    return x - 0x10000 if x & 0x8000 else x


def s24(x: int) -> int:
    x &= 0xFFFFFF
    return x - (1 << 24) if x & 0x800000 else x


def integer_median(values: list[int]) -> int:
    return sorted(values)[1]


def perm(a: int, b: int, selector: int) -> int:
    pool = b.to_bytes(4, "little") + a.to_bytes(4, "little")
    out = []
    for pick in selector.to_bytes(4, "little"):
        if pick <= 7:
            out.append(pool[pick])
        elif pick <= 11:
            out.append(0xFF if pool[(1, 3, 5, 7)[pick - 8]] & 0x80 else 0)
        else:
            out.append(0 if pick == 12 else 0xFF)
    return int.from_bytes(bytes(out), "little")


def bfe_i32(a: int, at: int, width: int) -> int:
    at, width = at & 31, width & 31
    digits = f"{a:032b}"[::-1][at : at + width]
    value = int(digits[::-1] or "0", 2)
    return value - (1 << len(digits)) if digits and digits[-1] == "1" else value


Lane = Callable[..., int]
UNARY: dict[str, Lane] = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: a ^ M32,
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32": lambda a: f"{a:032b}".find("1") & M32,
    "v_ffbl_b32": lambda a: f"{a:032b}"[::-1].find("1") & M32,
}
BINARY: dict[str, Lane] = {
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_mul_u32_u24": lambda a, b: (a % 2**24) * (b % 2**24),
    "v_mul_hi_u32_u24": lambda a, b: (a % 2**24) * (b % 2**24) // 2**32,
    "v_mul_i32_i24": lambda a, b: s24(a) * s24(b),
    "v_min_u32": min,
    "v_max_u32": max,
    "v_min_i32": lambda a, b: min(s32(a), s32(b)),
    "v_max_i32": lambda a, b: max(s32(a), s32(b)),
    "v_lshlrev_b32": lambda a, b: b << a % 32,
    "v_lshrrev_b32": lambda a, b: b >> a % 32,
    "v_ashrrev_i32": lambda a, b: s32(b) >> a % 32,
    "v_add_u16": lambda a, b: (a + b) % 2**16,
    "v_sub_u16": lambda a, b: (a - b) % 2**16,
    "v_subrev_u16": lambda a, b: (b - a) % 2**16,
    "v_mul_lo_u16": lambda a, b: (a * b) % 2**16,
    "v_min_u16": lambda a, b: min(a % 2**16, b % 2**16),
    "v_max_u16": lambda a, b: max(a % 2**16, b % 2**16),
    "v_min_i16": lambda a, b: min(s16(a), s16(b)) % 2**16,
    "v_max_i16": lambda a, b: max(s16(a), s16(b)) % 2**16,
    "v_lshlrev_b16": lambda a, b: (b << a % 16) % 2**16,
    "v_lshrrev_b16": lambda a, b: (b % 2**16) >> a % 16,
    "v_ashrrev_i16": lambda a, b: (s16(b) >> a % 16) % 2**16,
}
BINARY_E64: dict[str, Lane] = {
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b // 2**32,
    "v_mul_hi_i32": lambda a, b: s32(a) * s32(b) >> 32,
    "v_bfm_b32": lambda a, b: (2 ** (a % 32) - 1) << b % 32,
    "v_bcnt_u32_b32": lambda a, b: bin(a).count("1") + b,
    "v_pk_add_u16": lambda a, b: (a + b) % 2**16 | ((a >> 16) + (b >> 16)) % 2**16 << 16,
    "v_pk_sub_u16": lambda a, b: (a - b) % 2**16 | ((a >> 16) - (b >> 16)) % 2**16 << 16,
    "v_pk_mul_lo_u16": lambda a, b: (a * b) % 2**16 | ((a >> 16) * (b >> 16)) % 2**16 << 16,
    "v_pk_max_u16": lambda a, b: max(a % 2**16, b % 2**16) | max(a >> 16, b >> 16) << 16,
    "v_pk_min_u16": lambda a, b: min(a % 2**16, b % 2**16) | min(a >> 16, b >> 16) << 16,
    "v_pk_max_i16": lambda a, b: max(s16(a), s16(b)) % 2**16 | max(s16(a >> 16), s16(b >> 16)) % 2**16 << 16,
    "v_pk_min_i16": lambda a, b: min(s16(a), s16(b)) % 2**16 | min(s16(a >> 16), s16(b >> 16)) % 2**16 << 16,
    "v_pk_lshlrev_b16": lambda a, b: (b << a % 16) % 2**16 | ((b >> 16) << (a >> 16) % 16) % 2**16 << 16,
    "v_pk_lshrrev_b16": lambda a, b: (b % 2**16) >> a % 16 | ((b >> 16) >> (a >> 16) % 16) << 16,
}
TERNARY: dict[str, Lane] = {
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_mad_u32_u24": lambda a, b, c: (a % 2**24) * (b % 2**24) + c,
    "v_mad_i32_i24": lambda a, b, c: s24(a) * s24(b) + c,
    "v_min3_u32": lambda a, b, c: min(a, b, c),
    "v_max3_u32": lambda a, b, c: max(a, b, c),
    "v_med3_u32": lambda a, b, c: integer_median([a, b, c]),
    "v_min3_i32": lambda a, b, c: min(s32(a), s32(b), s32(c)),
    "v_max3_i32": lambda a, b, c: max(s32(a), s32(b), s32(c)),
    "v_med3_i32": lambda a, b, c: integer_median([s32(a), s32(b), s32(c)]),
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_lshl_or_b32": lambda a, b, c: (a << b % 32) | c,
    "v_lshl_add_u32": lambda a, b, c: (a << b % 32) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << c % 32,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
    "v_bfe_u32": lambda a, b, c: (a >> b % 32) & (2 ** (c % 32) - 1),
    "v_bfe_i32": bfe_i32,
    "v_perm_b32": perm,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> c % 32,
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c % 4),
}
PAIRS: dict[str, tuple[str, Lane]] = {
    # sources: w a dword, q a register pair
    "v_mov_b64": ("q", lambda a: a),
    "v_lshlrev_b64": ("wq", lambda a, b: b << a % 64),
    "v_lshrrev_b64": ("wq", lambda a, b: b >> a % 64),
    "v_ashrrev_i64": ("wq", lambda a, b: (b - 2**64 if b >> 63 else b) >> a % 64),
    "v_lshl_add_u64": ("qwq", lambda a, b, c: (a << b % 8) + c),
}
INTEGER_COVERED = {*UNARY, *BINARY, *BINARY_E64, *TERNARY, *PAIRS, "v_bitop3_b32"}

INTEGER_SPECIAL = [
    0,
    1,
    2,
    5,
    31,
    32,
    33,
    63,
    64,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x10000,
    0x7FFFFF,
    0x800000,
]
INTEGER_SPECIAL += [
    0xFFFFFF,
    0x1000000,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFE,
    M32,
    0x0C0D0908,
    0x0B0A0704,
]


def integer_operands(count: int, seed: int) -> list[npt.NDArray[np.uint32]]:
    """Special values against each other in the first lanes, random ones in the rest."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 1 << 32, (count, 64), dtype=np.uint64).astype(np.uint32)
    for row in rows:
        row[:48] = rng.choice(np.array(INTEGER_SPECIAL, np.uint32), 48)
    small = rng.integers(0, 40, 64).astype(np.uint32)
    rows[-1][40:56] = small[40:56]
    return list(rows)


def check(text: str, lane: Lane, rows: list[npt.NDArray[np.uint32]], exec_mask: int) -> None:
    before = np.arange(64, dtype=np.uint32) + np.uint32(0xABC00000)
    names = [f"v{at + 10}" for at in range(len(rows))]
    found = run_lanes(
        text,
        vectors={"v5": before, **dict(zip(names, rows, strict=True))},
        exec_mask=exec_mask,
        read_vectors=["v5"],
    ).vectors["v5"]
    for at in range(64):
        wanted = lane(*[int(row[at]) for row in rows]) & M32 if exec_mask >> at & 1 else int(before[at])
        assert int(found[at]) == wanted, f"lane {at}: {[hex(int(row[at])) for row in rows]}"


def every_operation() -> list[Any]:
    cases: list[Any] = []
    for table, count, suffix in (
        (UNARY, 1, "_e32"),
        (BINARY, 2, "_e32"),
        (BINARY_E64, 2, ""),
        (TERNARY, 3, ""),
    ):
        cases += [pytest.param(name, suffix, count, lane, id=name) for name, lane in table.items()]
    return cases


@pytest.mark.parametrize(("name", "suffix", "count", "lane"), every_operation())
def test_every_lane_of_integers(name: str, suffix: str, count: int, lane: Lane) -> None:
    sources = ", ".join(f"v{at + 10}" for at in range(count))
    for seed, exec_mask in ((1, (1 << 64) - 1), (2, 0xF0F0_0000_FFFF_0001)):
        check(f"{name}{suffix} v5, {sources}", lane, integer_operands(count, seed), exec_mask)


@pytest.mark.parametrize("name", PAIRS)
def test_every_lane_of_a_pair(name: str) -> None:
    widths, lane = PAIRS[name]
    rng = np.random.default_rng(7)
    vectors: dict[str, npt.NDArray[np.uint32]] = {}
    texts, values = [], []
    for at, width in enumerate(widths):
        low, high = integer_operands(2, 10 + at)
        if width == "w":
            low = rng.integers(0, 130, 64).astype(np.uint32)
            vectors[f"v{10 + 2 * at}"] = low
            texts.append(f"v{10 + 2 * at}")
            values.append(low.astype(object))
        else:
            vectors[f"v{10 + 2 * at}"], vectors[f"v{11 + 2 * at}"] = low, high
            texts.append(f"v[{10 + 2 * at}:{11 + 2 * at}]")
            values.append(low.astype(object) + (high.astype(object) << 32))
    found = run_lanes(
        f"{name} v[4:5], {', '.join(texts)}", vectors=vectors, read_vectors=["v4", "v5"]
    ).vectors
    for at in range(64):
        wanted = lane(*[int(value[at]) for value in values]) & M64
        assert int(found["v4"][at]) | int(found["v5"][at]) << 32 == wanted


def test_a_pair_moves_onto_itself() -> None:
    a, b = integer_operands(2, 3)
    found = run_lanes(
        "v_pk_mov_b32 v[10:11], v[10:11], v[10:11] op_sel:[1,0]",
        vectors={"v10": a, "v11": b},
        read_vectors=["v10", "v11"],
    )
    np.testing.assert_array_equal(found.vectors["v10"], b)
    np.testing.assert_array_equal(found.vectors["v11"], a)


def test_all_256_tables_of_bitop3() -> None:
    a, b, c = integer_operands(3, 4)
    names = {"v10": a, "v11": b, "v12": c}
    bits = [[(int(row[at]) >> bit) & 1 for bit in range(32)] for row in (a, b, c) for at in (0, 13, 60)]
    for table in range(256):
        text = f"v_bitop3_b32 v5, v10, v11, v12 bitop3:{table:#x}"
        found = run_lanes(text, vectors=names, read_vectors=["v5"]).vectors["v5"]
        for number, at in enumerate((0, 13, 60)):
            x, y, z = bits[number], bits[number + 3], bits[number + 6]
            wanted = sum((table >> (4 * x[bit] + 2 * y[bit] + z[bit]) & 1) << bit for bit in range(32))
            assert int(found[at]) == wanted


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("-16", 0xFFFFFFF0),
        ("64", 64),
        ("0x1234", 0x1234),
        ("0.5", 0x3F000000),
        ("-4.0", 0xC0800000),
        ("0.15915494", 0x3E22F983),
        ("s20", 0x89ABCDEF),
        ("vcc_hi", 0x11223344),
        ("m0", 0x55667788),
    ],
)
def test_scalar_and_constant_sources(source: str, wanted: int) -> None:
    scalars = {"s20": 0x89ABCDEF, "vcc_hi": 0x11223344, "m0": 0x55667788}
    found = run_lanes(f"v_mov_b32_e32 v5, {source}", scalars=scalars, read_vectors=["v5"])
    assert set(found.vectors["v5"].tolist()) == {wanted}
