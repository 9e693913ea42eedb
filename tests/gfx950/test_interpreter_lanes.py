"""Instructions that move values between lanes, between register files, or within a dword."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernel.gfx950 import UnsupportedInstructionError
from tests.gfx950.one_wave import ALL_LANES, run_lanes

COVERED = {
    "v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32", "v_permlane32_swap_b32",
    "v_permlane16_swap_b32", "v_swap_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32",
    "v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32", "ds_bpermute_b32", "ds_permute_b32",
}  # fmt: skip

NUMBERS = np.arange(64, dtype=np.uint32) * np.uint32(3) + np.uint32(100)
OLD = np.arange(64, dtype=np.uint32) + np.uint32(900)

# control: the lane that each lane reads, None where there is none
CONTROLS: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[1,0,3,2]": lambda lane: lane ^ 1,
    "quad_perm:[3,3,0,1]": lambda lane: lane // 4 * 4 + (3, 3, 0, 1)[lane % 4],
    "row_shl:1": lambda lane: lane + 1 if lane % 16 < 15 else None,
    "row_shr:3": lambda lane: lane - 3 if lane % 16 >= 3 else None,
    "row_ror:5": lambda lane: lane // 16 * 16 + (lane % 16 + 11) % 16,
    "row_mirror": lambda lane: lane ^ 15,
    "row_half_mirror": lambda lane: lane ^ 7,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
    "row_newbcast:6": lambda lane: lane // 16 * 16 + 6,
}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("bound_ctrl", [False, True])
@pytest.mark.parametrize("exec_mask", [ALL_LANES, 0xFFF0_7FFF_FFFF_8001])
def test_dpp_controls(control: str, bound_ctrl: bool, exec_mask: int) -> None:
    rows, banks = 0b1011, 0b1101
    tail = f"{control} row_mask:{rows:#x} bank_mask:{banks:#x}" + (" bound_ctrl:1" if bound_ctrl else "")
    text = f"v_mov_b32_dpp v5, v10 {tail}\nv_add_u32_dpp v6, v10, v11 {tail}"
    found = run_lanes(
        text,
        vectors={"v10": NUMBERS, "v11": OLD, "v5": OLD, "v6": OLD},
        exec_mask=exec_mask,
        read_vectors=["v5", "v6"],
    ).vectors
    for lane in range(64):
        source = CONTROLS[control](lane)
        exists = source is not None and exec_mask >> source & 1 == 1
        on = exec_mask >> lane & 1 and rows >> lane // 16 & 1 and banks >> lane % 16 // 4 & 1
        value = int(NUMBERS[source]) if exists and source is not None else 0
        written = on and (exists or bound_ctrl)
        assert int(found["v5"][lane]) == (value if written else int(OLD[lane]))
        assert int(found["v6"][lane]) == (value + int(OLD[lane]) if written else int(OLD[lane]))


@pytest.mark.parametrize("control", ["row_shl:16", "row_bcast:7", "wave_shr:1", "quad_perm:[0,1,2,4]"])
def test_unknown_dpp_controls_are_refused(control: str) -> None:
    with pytest.raises(UnsupportedInstructionError):
        run_lanes(f"v_mov_b32_dpp v5, v10 {control} row_mask:0xf bank_mask:0xf", vectors={"v10": NUMBERS})


SELECTED: dict[str, Callable[[int], int]] = {
    "BYTE_0": lambda x: x & 255,
    "BYTE_1": lambda x: x >> 8 & 255,
    "BYTE_2": lambda x: x >> 16 & 255,
    "BYTE_3": lambda x: x >> 24,
    "WORD_0": lambda x: x & 0xFFFF,
    "WORD_1": lambda x: x >> 16,
    "DWORD": lambda x: x,
}


def words(seed: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32)


@pytest.mark.parametrize("selection", SELECTED)
def test_sdwa_sources(selection: str) -> None:
    a, b = words(1) & np.uint32(31), words(2)
    tail = f"dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:{selection}"
    text = f"v_lshlrev_b32_sdwa v5, v10, v11 {tail}"
    found = run_lanes(text, vectors={"v10": a, "v11": b}, read_vectors=["v5"]).vectors["v5"]
    wanted = [SELECTED[selection](int(b[at])) << int(a[at]) & 0xFFFFFFFF for at in range(64)]
    assert found.tolist() == wanted


def test_sdwa_sign_extension_and_results() -> None:
    a, b, old = words(3), words(4), words(5)
    text = """
        v_add_u32_sdwa v5, sext(v10), v11 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:DWORD
        v_add_u32_sdwa v6, v10, v11 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD
        v_add_u32_sdwa v7, v10, v11 dst_sel:WORD_0 dst_unused:UNUSED_SEXT src0_sel:DWORD src1_sel:DWORD
        v_add_u32_sdwa v8, v10, v11 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD
    """
    found = run_lanes(
        text, vectors={"v10": a, "v11": b, "v6": old}, read_vectors=["v5", "v6", "v7", "v8"]
    ).vectors
    for at in range(64):
        x, y, total = int(a[at]), int(b[at]), int(a[at]) + int(b[at])
        byte = x >> 16 & 255
        assert int(found["v5"][at]) == (byte - 256 * (byte >> 7) + y) % 2**32
        assert int(found["v6"][at]) == int(old[at]) & 0xFFFF00FF | (total & 255) << 8
        assert int(found["v7"][at]) == (total & 0xFFFF) + 0xFFFF0000 * (total >> 15 & 1)
        assert int(found["v8"][at]) == (total & 0xFFFF) << 16


def test_sdwa_converts_either_half() -> None:
    """Every kind of float16, denormals and NaN among them, in the low or the high word."""
    a = np.concatenate([words(6)[:48], np.array([0x0001_8001, 0x7C00_FC00, 0x7E01_0400, 0] * 4, np.uint32)])
    text = """
        v_cvt_f32_f16_sdwa v5, v10 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0
        v_cvt_f32_f16_sdwa v6, v10 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1
    """
    found = run_lanes(text, vectors={"v10": a}, read_vectors=["v5", "v6"]).vectors
    halves = a.view(np.float16).reshape(64, 2).astype(np.float32)
    np.testing.assert_array_equal(found["v5"].view(np.float32), halves[:, 0])
    np.testing.assert_array_equal(found["v6"].view(np.float32), halves[:, 1])


@pytest.mark.parametrize(
    ("source", "part", "selection"),
    [
        ("v10", "DWORD", "BYTE_1"),
        ("v10", "DWORD", "DWORD"),
        ("sext(v10)", "DWORD", "WORD_1"),
        ("v10", "WORD_0", "WORD_1"),
    ],
)
def test_sdwa_converts_nothing_else(source: str, part: str, selection: str) -> None:
    tail = f"dst_sel:{part} dst_unused:UNUSED_PAD src0_sel:{selection}"
    with pytest.raises(UnsupportedInstructionError):
        run_lanes(f"v_cvt_f32_f16_sdwa v5, {source} {tail}", vectors={"v10": OLD})


@pytest.mark.parametrize("width", [16, 32])
def test_lane_swaps(width: int) -> None:
    other = NUMBERS + np.uint32(1000)
    text = f"v_permlane{width}_swap_b32_e32 v10, v11"
    found = run_lanes(text, vectors={"v10": NUMBERS, "v11": other}, read_vectors=["v10", "v11"]).vectors
    for lane in range(64):
        odd = lane // width % 2 == 1
        assert found["v10"][lane] == (other[lane - width] if odd else NUMBERS[lane])
        assert found["v11"][lane] == (other[lane] if odd else NUMBERS[lane + width])


def test_lane_swaps_under_exec_are_refused() -> None:
    with pytest.raises(UnsupportedInstructionError, match="inactive"):
        run_lanes("v_permlane32_swap_b32_e32 v10, v11", vectors={"v10": OLD, "v11": OLD}, exec_mask=1)


def test_single_lanes() -> None:
    text = """
        v_readfirstlane_b32 s20, v10
        v_readlane_b32 s21, v10, 63
        v_readlane_b32 s22, v10, s30
        v_writelane_b32 v5, s31, 7
        v_writelane_b32 v5, 9, s30
    """
    found = run_lanes(
        text,
        vectors={"v10": NUMBERS, "v5": OLD},
        scalars={"s30": 64 + 5, "s31": 77},
        exec_mask=0xFF00,
        read_vectors=["v5"],
        read_scalars=["s20", "s21", "s22"],
    )
    assert found.scalars == {"s20": NUMBERS[8], "s21": NUMBERS[63], "s22": NUMBERS[5]}
    wanted = OLD.copy()
    wanted[7], wanted[5] = 77, 9
    np.testing.assert_array_equal(found.vectors["v5"], wanted)


def test_first_lane_without_an_active_one_is_lane_0() -> None:
    found = run_lanes(
        "v_readfirstlane_b32 s20, v10", vectors={"v10": NUMBERS}, exec_mask=0, read_scalars=["s20"]
    )
    assert found.scalars["s20"] == NUMBERS[0]


def test_swap_and_accumulators_under_exec() -> None:
    text = """
        v_swap_b32 v10, v11
        v_accvgpr_write_b32 a7, v10
        v_accvgpr_write_b32 a8, 5
        v_accvgpr_mov_b32 a9, a7
        v_accvgpr_read_b32 v12, a9
        v_accvgpr_read_b32 v13, a8
    """
    even = 0x5555_5555_5555_5555
    start = {"v10": NUMBERS, "v11": OLD, "v12": OLD, "v13": OLD}
    found = run_lanes(text, vectors=start, exec_mask=even, read_vectors=["v10", "v11", "v12", "v13"]).vectors
    lanes = np.arange(64) % 2 == 0
    np.testing.assert_array_equal(found["v10"], np.where(lanes, OLD, NUMBERS))
    np.testing.assert_array_equal(found["v11"], np.where(lanes, NUMBERS, OLD))
    np.testing.assert_array_equal(found["v12"], OLD)
    np.testing.assert_array_equal(found["v13"], np.where(lanes, 5, OLD))


def test_accumulators_are_not_vector_registers() -> None:
    for text in ("v_add_u32_e32 v5, a1, v0", "v_accvgpr_read_b32 v5, v1", "v_mov_b32_e32 a0, v0"):
        with pytest.raises(UnsupportedInstructionError):
            run_lanes(text)


def test_lanes_below() -> None:
    mask = 0x8001_F00F_1234_5679
    text = "v_mbcnt_lo_u32_b32 v5, s20, 3\nv_mbcnt_hi_u32_b32 v5, s21, v5"
    scalars = {"s20": mask & 0xFFFFFFFF, "s21": mask >> 32}
    found = run_lanes(text, scalars=scalars, read_vectors=["v5"]).vectors["v5"]
    assert found.tolist() == [3 + (mask & (1 << lane) - 1).bit_count() for lane in range(64)]


def test_permutes_through_the_lds_unit() -> None:
    lanes = np.random.default_rng(3).permutation(64).astype(np.uint32)
    text = """
        ds_bpermute_b32 v5, v10, v11
        ds_permute_b32 v6, v10, v11
        s_waitcnt lgkmcnt(0)
    """
    found = run_lanes(text, vectors={"v10": lanes * 4, "v11": NUMBERS}, read_vectors=["v5", "v6"]).vectors
    np.testing.assert_array_equal(found["v5"], NUMBERS[lanes])
    pushed = np.empty(64, np.uint32)
    pushed[lanes] = NUMBERS
    np.testing.assert_array_equal(found["v6"], pushed)


# Compares, selection and carries: the instructions around lane masks.

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
COMPARE_COVERED = {
    f"v_{head}_{name}_{kind}" for head in ("cmp", "cmpx") for kind in KINDS for name in INTEGER
}
COMPARE_COVERED |= {f"v_{head}_{name}_f32" for head in ("cmp", "cmpx") for name in FLOAT}
COMPARE_COVERED |= {f"v_{name}_co_u32" for name in CARRY} | {
    "v_cndmask_b32",
    "v_mad_u64_u32",
    "v_mad_i64_i32",
}


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
