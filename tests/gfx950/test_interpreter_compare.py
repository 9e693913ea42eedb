"""Compares, selection and carries: the instructions around lane masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.gfx950.one_wave import ALL_LANES, run_lanes

PARTIAL = 0x0FF0_F00F_8000_0001
Lane = Callable[[Any, Any], bool]
ORDERED: dict[str, Lane] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
INTEGER: dict[str, Lane] = {
    **ORDERED,
    "ne": lambda a, b: a != b,
    "f": lambda _a, _b: False,
    "t": lambda _a, _b: True,
}
FLOAT: dict[str, Lane] = {
    **ORDERED,
    "f": lambda _a, _b: False,
    "tru": lambda _a, _b: True,
    "lg": lambda a, b: a < b or a > b,
    "o": lambda a, b: a == a and b == b,
    "u": lambda a, b: a != a or b != b,
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b,
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
}
KINDS = {
    "i32": (32, True),
    "u32": (32, False),
    "i64": (64, True),
    "u64": (64, False),
    "i16": (16, True),
    "u16": (16, False),
}
CARRY = ("add", "sub", "subrev", "addc", "subb", "subbrev")
COVERED = {f"v_{head}_{name}_{kind}" for head in ("cmp", "cmpx") for kind in KINDS for name in INTEGER}
COVERED |= {f"v_{head}_{name}_f32" for head in ("cmp", "cmpx") for name in FLOAT}
COVERED |= {f"v_{name}_co_u32" for name in CARRY} | {"v_cndmask_b32", "v_mad_u64_u32", "v_mad_i64_i32"}


def close_integers(seed: int) -> dict[str, npt.NDArray[np.uint32]]:
    """v10:v11 and v12:v13, often equal in one half or both."""
    rng = np.random.default_rng(seed)
    special = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32)
    return {f"v{at}": rng.choice(special, 64) for at in (10, 11, 12, 13)}


def pair(values: dict[str, npt.NDArray[np.uint32]], low: int, lane: int, bits: int, signed: bool) -> int:
    value = int(values[f"v{low}"][lane]) | int(values[f"v{low + 1}"][lane]) << 32
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def mask_of(found: dict[str, int], low: str, high: str) -> int:
    return found[low] | found[high] << 32


@pytest.mark.parametrize("kind", KINDS)
def test_integer_compares(kind: str) -> None:
    bits, signed = KINDS[kind]
    sources = "v[10:11], v[12:13]" if bits == 64 else "v10, v12"
    for seed, (name, lane) in enumerate(INTEGER.items()):
        values = close_integers(seed)
        text = f"v_cmp_{name}_{kind}_e64 s[20:21], {sources}\nv_cmp_{name}_{kind}_e32 vcc, {sources}"
        found = run_lanes(
            text, vectors=values, exec_mask=PARTIAL, read_scalars=["s20", "s21", "vcc_lo", "vcc_hi"]
        ).scalars
        wanted = sum(
            1 << at
            for at in range(64)
            if PARTIAL >> at & 1
            and lane(pair(values, 10, at, bits, signed), pair(values, 12, at, bits, signed))
        )
        assert mask_of(found, "s20", "s21") == mask_of(found, "vcc_lo", "vcc_hi") == wanted


def test_float_compares() -> None:
    rng = np.random.default_rng(3)
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45], np.float32)
    a, b = rng.choice(special, 64), rng.choice(special, 64)
    for name, lane in FLOAT.items():
        found = run_lanes(
            f"v_cmp_{name}_f32_e64 s[20:21], v10, -v11",
            vectors={"v10": a, "v11": b},
            read_scalars=["s20", "s21"],
        ).scalars
        wanted = sum(1 << at for at in range(64) if lane(float(a[at]), -float(b[at])))
        assert mask_of(found, "s20", "s21") == wanted, name


def test_cmpx_writes_exec_as_well() -> None:
    values = close_integers(9)
    text = "v_cmpx_gt_u32_e32 vcc, v10, v12\ns_mov_b64 s[20:21], exec"
    names = ["s20", "s21", "vcc_lo", "vcc_hi"]
    found = run_lanes(text, vectors=values, exec_mask=PARTIAL, read_scalars=names).scalars
    wanted = sum(1 << at for at in range(64) if PARTIAL >> at & 1 and values["v10"][at] > values["v12"][at])
    assert mask_of(found, "s20", "s21") == mask_of(found, "vcc_lo", "vcc_hi") == wanted


def test_cmpx_of_every_kind_agrees_with_cmp() -> None:
    values = close_integers(11)
    for kind, names in [*((kind, INTEGER) for kind in KINDS), ("f32", FLOAT)]:
        sources = "v[10:11], v[12:13]" if kind.endswith("64") else "v10, v12"
        for name in names:
            text = (
                f"v_cmp_{name}_{kind}_e64 s[20:21], {sources}\nv_cmpx_{name}_{kind}_e64 s[22:23], {sources}"
            )
            found = run_lanes(text, vectors=values, read_scalars=["s20", "s21", "s22", "s23"]).scalars
            assert mask_of(found, "s20", "s21") == mask_of(found, "s22", "s23")


def test_select() -> None:
    rng = np.random.default_rng(4)
    a, b, old = rng.integers(0, 1 << 32, (3, 64), dtype=np.uint64).astype(np.uint32)
    mask = 0x1234_5678_9ABC_DEF0
    scalars = {"vcc_lo": mask & 0xFFFFFFFF, "vcc_hi": mask >> 32, "s20": 0xFFFFFFFF, "s21": 0}
    text = """
        v_cndmask_b32_e32 v5, v10, v11, vcc
        v_cndmask_b32_e64 v6, 0, -1, s[20:21]
        v_cndmask_b32_e64 v7, -v10, |v11|, vcc
    """
    found = run_lanes(
        text,
        vectors={"v10": a, "v11": b, "v5": old},
        scalars=scalars,
        exec_mask=PARTIAL,
        read_vectors=["v5"],
    ).vectors["v5"]
    for at in range(64):
        picked = b[at] if mask >> at & 1 else a[at]
        assert found[at] == (picked if PARTIAL >> at & 1 else old[at])
    whole = run_lanes(text, vectors={"v10": a, "v11": b}, scalars=scalars, read_vectors=["v6", "v7"]).vectors
    assert whole["v6"].tolist() == [0xFFFFFFFF] * 32 + [0] * 32
    wanted = [int(b[at]) & 0x7FFFFFFF if mask >> at & 1 else int(a[at]) ^ 0x80000000 for at in range(64)]
    assert whole["v7"].tolist() == wanted


@pytest.mark.parametrize("name", CARRY)
def test_carries(name: str) -> None:
    values = close_integers(5)
    carry_in = 0xAAAA_5555_F0F0_3C3C
    takes = name in ("addc", "subb", "subbrev")
    text = f"v_{name}_co_u32_e64 v5, s[20:21], v10, v12" + (", s[22:23]" if takes else "")
    found = run_lanes(
        text,
        vectors={"v5": values["v11"], **values},
        scalars={"s22": carry_in & 0xFFFFFFFF, "s23": carry_in >> 32},
        exec_mask=PARTIAL,
        read_vectors=["v5"],
        read_scalars=["s20", "s21"],
    )
    carries = 0
    for at in range(64):
        a, b = int(values["v10"][at]), int(values["v12"][at])
        if name in ("subrev", "subbrev"):
            a, b = b, a
        carry = carry_in >> at & 1 if takes else 0
        total = a + b + carry if name.startswith("add") else a - b - carry
        if PARTIAL >> at & 1:
            assert int(found.vectors["v5"][at]) == total % 2**32
            carries |= (not 0 <= total < 2**32) << at
        else:
            assert found.vectors["v5"][at] == values["v11"][at]
    assert mask_of(found.scalars, "s20", "s21") == carries


@pytest.mark.parametrize("signed", [False, True])
def test_wide_multiply_add(signed: bool) -> None:
    rng = np.random.default_rng(6)
    values = close_integers(6)
    values["v14"] = rng.integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32)
    name = "v_mad_i64_i32" if signed else "v_mad_u64_u32"
    found = run_lanes(
        f"{name} v[4:5], s[20:21], v10, v14, v[12:13]",
        vectors=values,
        read_vectors=["v4", "v5"],
        read_scalars=["s20", "s21"],
    )
    over = 0
    for at in range(64):
        a, b = int(values["v10"][at]), int(values["v14"][at])
        c = pair(values, 12, at, 64, signed)
        if signed:
            a, b = a - (a >> 31 << 32), b - (b >> 31 << 32)
        total = a * b + c
        assert int(found.vectors["v4"][at]) | int(found.vectors["v5"][at]) << 32 == total % 2**64
        over |= (not (-(2**63) <= total < 2**63 if signed else total < 2**64)) << at
    assert mask_of(found.scalars, "s20", "s21") == over


def test_sdwa_compare() -> None:
    values = close_integers(8)
    text = "v_cmp_eq_u32_sdwa s[20:21], v10, v12 src0_sel:WORD_1 src1_sel:BYTE_0"
    found = run_lanes(text, vectors=values, exec_mask=ALL_LANES, read_scalars=["s20", "s21"]).scalars
    wanted = sum(1 << at for at in range(64) if values["v10"][at] >> 16 == values["v12"][at] & 255)
    assert mask_of(found, "s20", "s21") == wanted
