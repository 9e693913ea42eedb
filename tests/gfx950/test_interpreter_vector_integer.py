"""Integer vector instructions, lane by lane, against the ISA's definition written with Python integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.gfx950.one_wave import run_lanes

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


def median(values: list[int]) -> int:
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
    "v_med3_u32": lambda a, b, c: median([a, b, c]),
    "v_min3_i32": lambda a, b, c: min(s32(a), s32(b), s32(c)),
    "v_max3_i32": lambda a, b, c: max(s32(a), s32(b), s32(c)),
    "v_med3_i32": lambda a, b, c: median([s32(a), s32(b), s32(c)]),
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
COVERED = {*UNARY, *BINARY, *BINARY_E64, *TERNARY, *PAIRS, "v_bitop3_b32"}

SPECIAL = [
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
SPECIAL += [0xFFFFFF, 0x1000000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, M32, 0x0C0D0908, 0x0B0A0704]


def operands(count: int, seed: int) -> list[npt.NDArray[np.uint32]]:
    """Special values against each other in the first lanes, random ones in the rest."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 1 << 32, (count, 64), dtype=np.uint64).astype(np.uint32)
    for row in rows:
        row[:48] = rng.choice(np.array(SPECIAL, np.uint32), 48)
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
def test_every_lane(name: str, suffix: str, count: int, lane: Lane) -> None:
    sources = ", ".join(f"v{at + 10}" for at in range(count))
    for seed, exec_mask in ((1, (1 << 64) - 1), (2, 0xF0F0_0000_FFFF_0001)):
        check(f"{name}{suffix} v5, {sources}", lane, operands(count, seed), exec_mask)


@pytest.mark.parametrize("name", PAIRS)
def test_every_lane_of_a_pair(name: str) -> None:
    widths, lane = PAIRS[name]
    rng = np.random.default_rng(7)
    vectors: dict[str, npt.NDArray[np.uint32]] = {}
    texts, values = [], []
    for at, width in enumerate(widths):
        low, high = operands(2, 10 + at)
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
    a, b = operands(2, 3)
    found = run_lanes(
        "v_pk_mov_b32 v[10:11], v[10:11], v[10:11] op_sel:[1,0]",
        vectors={"v10": a, "v11": b},
        read_vectors=["v10", "v11"],
    )
    np.testing.assert_array_equal(found.vectors["v10"], b)
    np.testing.assert_array_equal(found.vectors["v11"], a)


def test_all_256_tables_of_bitop3() -> None:
    a, b, c = operands(3, 4)
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
