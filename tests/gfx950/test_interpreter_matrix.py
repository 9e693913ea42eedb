"""``v_mfma_f32_16x16x128_f8f6f4``: which byte of which lane is which element, and the arithmetic."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kernel.gfx950 import Memory, MissingWaitError, UndefinedReadError, UnsupportedInstructionError
from tests.gfx950.one_wave import launch, run_lanes

COVERED = {"v_mfma_f32_16x16x128_f8f6f4"}
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
Bytes = npt.NDArray[np.uint8]


def place(matrix: Bytes, first: str) -> dict[str, npt.NDArray[np.uint32]]:
    """``[16, 128]`` operand bytes into 8 registers from ``first`` ("v16", "a0") on.

    Lane l holds row l % 16, 16 columns from 16 g and 16 from 64 + 16 g, where g = l // 16.
    """
    lanes = np.zeros((64, 32), np.uint8)
    for lane in range(64):
        row, group = lane % 16, lane // 16
        lanes[lane, :16] = matrix[row, 16 * group : 16 * group + 16]
        lanes[lane, 16:] = matrix[row, 64 + 16 * group : 80 + 16 * group]
    words = lanes.view(np.uint32)
    return {f"{first[0]}{int(first[1:]) + at}": np.ascontiguousarray(words[:, at]) for at in range(8)}


def result(found: dict[str, npt.NDArray[np.uint32]], names: list[str]) -> npt.NDArray[np.float32]:
    """The 16 x 16 result of four registers: lane l, register i is row 4 (l // 16) + i, column l % 16."""
    matrix = np.zeros((16, 16), np.float32)
    for at, name in enumerate(names):
        for lane in range(64):
            matrix[4 * (lane // 16) + at, lane % 16] = found[name].view(np.float32)[lane]
    return matrix


OUT = [f"v{at}" for at in range(4, 8)]
TEXT = "v_mfma_f32_16x16x128_f8f6f4 v[4:7], v[16:23], v[24:31], "


def multiply(a: Bytes, b: Bytes, c: str = "0", **more: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    vectors = {**place(a, "v16"), **place(b, "v24"), **more}
    return result(run_lanes(TEXT + c, vectors=vectors, read_vectors=OUT).vectors, OUT)


def one_hot(row: int, column: int, value: float, dtype: type = E4M3) -> Bytes:
    matrix: npt.NDArray[Any] = np.zeros((16, 128), dtype)
    matrix[row, column] = value
    return matrix.view(np.uint8)


def test_every_position_of_k_is_its_own() -> None:
    # A holds a power of two of its own at k and B picks k: a wrong byte gives another value or place
    rng = np.random.default_rng(0)
    for k in rng.permutation(128)[:24].tolist():
        m, n = k * 7 % 16, k * 5 % 16
        found = multiply(one_hot(m, k, 2.0 ** (k % 15 - 7)), one_hot(n, k, 3.0))
        wanted = np.zeros((16, 16), np.float32)
        wanted[m, n] = 3 * 2.0 ** (k % 15 - 7)
        np.testing.assert_array_equal(found, wanted)


def test_an_asymmetric_product_with_c_is_exact() -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(-8, 9, (16, 128)).astype(np.float32)
    b = rng.integers(-8, 9, (16, 128)).astype(np.float32)
    b[3] *= 16
    c = rng.integers(-1000, 1000, (16, 16)).astype(np.float32)
    more = {}
    for at in range(4):
        lanes = [c[4 * (lane // 16) + at, lane % 16] for lane in range(64)]
        more[f"v{8 + at}"] = np.array(lanes, np.float32).view(np.uint32)
    found = multiply(a.astype(E4M3).view(np.uint8), b.astype(E4M3).view(np.uint8), "v[8:11]", **more)
    np.testing.assert_array_equal(found, a @ b.T + c)


@pytest.mark.parametrize(("constant", "value"), [("0", 0.0), ("1.0", 1.0), ("-4.0", -4.0)])
def test_inline_constants_as_c(constant: str, value: float) -> None:
    found = multiply(one_hot(2, 5, 1.5), one_hot(3, 5, 2.0), constant)
    wanted = np.full((16, 16), value, np.float32)
    wanted[2, 3] += 3
    np.testing.assert_array_equal(found, wanted)


def test_sums_are_rounded_once() -> None:
    rng = np.random.default_rng(2)
    finite = [x for x in range(256) if x & 127 != 127]
    a, b = rng.choice(np.array(finite, np.uint8), (2, 16, 128))
    found = multiply(a, b)
    values = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)
    for m, n in ((0, 0), (5, 11), (15, 15)):
        products = (Fraction(values[x]) * Fraction(values[y]) for x, y in zip(a[m], b[n], strict=True))
        exact = sum(products, Fraction(0))
        assert abs(Fraction(float(found[m, n])) - exact) <= abs(exact) * Fraction(1, 2**24)


def test_nan_bytes_make_nan_rows() -> None:
    a = one_hot(4, 9, 1.0)
    a[4, 9] = 0x7F
    found = multiply(a, one_hot(0, 0, 1.0))
    assert np.isnan(found[4]).all()
    assert not np.isnan(np.delete(found, 4, axis=0)).any()


def test_operand_formats() -> None:
    vectors = {**place(one_hot(1, 70, 2.0**14, E5M2), "v16"), **place(one_hot(2, 70, 3.0), "v24")}
    found = run_lanes(TEXT + "0 cbsz:1", vectors=vectors, read_vectors=OUT).vectors
    assert result(found, OUT)[1, 2] == 3 * 2.0**14
    for modifier in ("cbsz:2", "blgp:3", "cbsz:4 blgp:4", "abid:1"):
        with pytest.raises(UnsupportedInstructionError):
            run_lanes(TEXT + "0 " + modifier, vectors=vectors)


def test_accumulator_registers_hold_any_operand() -> None:
    vectors = {**place(one_hot(1, 20, 2.0), "a16"), **place(one_hot(2, 20, 3.0), "v24")}
    names = [f"a{at}" for at in range(4, 8)]
    text = "v_mfma_f32_16x16x128_f8f6f4 a[4:7], a[16:23], v[24:31], 1.0"
    text += "\nv_mfma_f32_16x16x128_f8f6f4 a[4:7], a[16:23], v[24:31], a[4:7]"
    found = result(run_lanes(text, vectors=vectors, read_vectors=names).vectors, names)
    assert found[1, 2] == 13
    assert found[0, 0] == 1


def test_exec_does_not_mask_it_and_every_lane_must_be_defined() -> None:
    vectors = {**place(one_hot(1, 20, 2.0), "v16"), **place(one_hot(2, 20, 3.0), "v24")}
    found = run_lanes(TEXT + "0", vectors=vectors, exec_mask=1, read_vectors=OUT).vectors
    assert result(found, OUT)[1, 2] == 6
    del vectors["v20"]
    with pytest.raises(UndefinedReadError, match="v20"):
        run_lanes("v_mov_b32_e32 v20, 0\n" + TEXT + "0", vectors=vectors, exec_mask=3)


def test_an_operand_in_flight_is_refused() -> None:
    vectors = {**place(one_hot(1, 20, 2.0), "v16"), **place(one_hot(2, 20, 3.0), "v24")}
    text = "v_mov_b32_e32 v41, 0\nds_write_b32 v41, v41\nds_read_b32 v18, v41\n" + TEXT + "0"
    with pytest.raises(MissingWaitError, match="v18"):
        run_lanes(text, vectors=vectors, lds_bytes=16)


# Values that nothing wrote: they may be computed with, and raise where they would have an effect.

LANES = np.arange(64, dtype=np.uint32)


def run_text(body: str, *, initialised: bool = True) -> None:
    memory = Memory()
    source = memory.register_array(np.arange(256, dtype=np.uint32), "source", initialised=initialised)
    start = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\ns_waitcnt lgkmcnt(0)\n"
    launch(start + body, memory, struct.pack("<2q", source.address, 0), lds_bytes=1024, scratch_bytes=8)


@pytest.mark.parametrize(
    "effect",
    [
        "global_store_dword v1, v10, s[4:5]",
        "global_store_dword v10, v1, s[4:5]",
        "global_load_dword v11, v10, s[4:5]",
        "ds_write_b32 v1, v10",
        "ds_write_b32 v10, v1",
        "ds_read_b32 v11, v10",
        "v_readfirstlane_b32 s20, v10\ns_add_u32 s20, s20, 1",
        "v_readlane_b32 s20, v10, 7\ns_lshl_b32 s20, s20, 1",
        "v_cmp_eq_u32_e32 vcc, 1, v10\ns_cbranch_vccz .LBB0_9",
        "v_cmp_eq_u32_e32 vcc, 1, v10\ns_and_saveexec_b64 s[20:21], vcc",
        "v_cmpx_eq_u32_e32 vcc, 1, v10",
        "v_readfirstlane_b32 s20, v10\ns_load_dword s21, s[4:5], s20",
    ],
)
@pytest.mark.parametrize(
    "origin",
    [
        "",
        "v_mov_b32_e32 v10, v20",
        "v_add_u32_e32 v10, v1, v20",
        "v_mov_b32_e32 v10, s40",
        "v_accvgpr_read_b32 v10, a3",
        "v_mov_b32_dpp v10, v20 row_mirror row_mask:0xf bank_mask:0xf",
        "v_mov_b32_e32 v10, v1\nv_permlane32_swap_b32_e32 v20, v10",
        "ds_read_b32 v10, v1\ns_waitcnt lgkmcnt(0)",
        "scratch_load_dword v10, off, off\ns_waitcnt vmcnt(0)",
        "v_add_u32_sdwa v10, v1, v21 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_1",
        "s_mov_b64 exec, 1\nv_mov_b32_e32 v20, 4\ns_mov_b64 exec, -1\n"
        "v_mov_b32_dpp v10, v20 row_newbcast:9 row_mask:0xf bank_mask:0xf",
    ],
)
def test_undefined_values_raise_where_they_have_an_effect(origin: str, effect: str) -> None:
    run_text(origin)
    with pytest.raises(UndefinedReadError) as caught:
        run_text(f"{origin}\n{effect}\n.LBB0_9:")
    assert caught.value.text == effect.splitlines()[-1]


def test_defined_lanes_of_a_partly_undefined_register_are_fine() -> None:
    body = "s_mov_b64 exec, 0xff\nv_mov_b32_e32 v10, v1\nglobal_store_dword v1, v10, s[4:5]\n"
    run_text(body)
    with pytest.raises(UndefinedReadError, match="v10 is used, nothing wrote it in 8 of the lanes") as caught:
        run_text(body + "s_mov_b64 exec, 0xffff\nglobal_store_dword v1, v10, s[4:5]")
    assert caught.value.lane == 8
    run_text(
        body
        + "s_not_b64 exec, exec\nv_mov_b32_e32 v10, 7\ns_mov_b64 exec, -1\nglobal_store_dword v1, v10, s[4:5]"
    )


def test_results_are_undefined_in_the_lanes_of_their_sources_only() -> None:
    # lanes 0-7 of v10 are defined; what is computed from it is selected away elsewhere
    text = """
        s_mov_b64 exec, 0xff
        v_mov_b32_e32 v10, v0
        s_mov_b64 exec, -1
        v_mul_u32_u24_e32 v10, 3, v10
        v_cmp_lt_u32_e64 s[20:21], v10, v11
        v_addc_co_u32_e64 v12, s[22:23], v10, v11, s[20:21]
        v_cmp_gt_u32_e32 vcc, 8, v0
        v_cndmask_b32_e32 v5, v11, v12, vcc
    """
    found = run_lanes(text, vectors={"v11": LANES + 100}, read_vectors=["v5"]).vectors["v5"]
    np.testing.assert_array_equal(found, np.where(LANES < 8, 3 * LANES + LANES + 101, LANES + 100))


def test_undefined_mask_bits_may_be_masked_away() -> None:
    text = """
        v_cmp_eq_u32_e64 s[20:21], v20, v10
        v_cmp_gt_u32_e32 vcc, 4, v10
        s_andn2_b64 s[22:23], vcc, s[20:21]
        s_and_b64 s[20:21], s[20:21], {mask}
        s_or_b64 s[20:21], s[20:21], vcc
        s_and_saveexec_b64 s[24:25], s[20:21]
        v_mov_b32_e32 v5, 9
    """
    vectors = {"v10": LANES, "v5": LANES}
    found = run_lanes(text.format(mask="15"), vectors=vectors, read_vectors=["v5"]).vectors["v5"]
    np.testing.assert_array_equal(found, np.where(LANES < 4, 9, LANES))
    with pytest.raises(UndefinedReadError, match="exec would become undefined") as caught:
        run_lanes(text.format(mask="31"), vectors=vectors)
    assert caught.value.lane == 4


def test_a_branch_on_a_mask_with_a_defined_one_is_decided() -> None:
    text = "v_cmp_eq_u32_e64 s[20:21], v20, v10\ns_or_b64 vcc, s[20:21], 1\ns_cbranch_vccz .LBB0_1\n.LBB0_1:"
    run_lanes(text, vectors={"v10": LANES})
    with pytest.raises(UndefinedReadError):
        run_lanes(text.replace("_or_", "_xor_").replace(", 1\n", ", 0\n"), vectors={"v10": LANES})


@pytest.mark.parametrize(
    "text",
    [
        "s_cselect_b32 s20, 1, 0",
        "s_cbranch_scc0 .LBB0_1",
        "s_addc_u32 s20, s4, 0",
        "s_cmp_eq_u32 s30, 1",
        "s_bcnt1_i32_b64 s20, vcc",
        "s_mov_b64 exec, s[30:31]",
        "s_mov_b32 s20, s30\ns_add_u32 s20, s20, 1",
        "s_cmp_eq_u32 s4, s4\ns_cselect_b32 s20, s30, 0\ns_mul_i32 s20, s20, 3",
        "s_load_dword s20, s[30:31], 0x0",
        "global_load_lds_dword v1, s[4:5]",
    ],
)
def test_scalar_state_starts_undefined(text: str) -> None:
    with pytest.raises(UndefinedReadError):
        run_text(f"{text}\n.LBB0_1:")


def test_moving_undefined_scalars_is_allowed() -> None:
    run_text(
        "s_mov_b32 s20, s30\nv_readfirstlane_b32 s21, v30\ns_mov_b64 s[22:23], vcc\nv_mov_b32_e32 v5, s20"
    )


def test_undefined_global_memory() -> None:
    load = "global_load_dword v10, v1, s[4:5]\ns_waitcnt vmcnt(0)\n"
    run_text(load, initialised=False)
    with pytest.raises(UndefinedReadError, match="v10"):
        run_text(load + "ds_write_b32 v1, v10", initialised=False)
    store = "global_store_dword v1, v0, s[4:5]\ns_waitcnt vmcnt(0)\n"
    run_text(store + load + "ds_write_b32 v1, v10", initialised=False)
    with pytest.raises(UndefinedReadError, match="s20"):
        run_text(
            "s_load_dword s20, s[4:5], 0x0\ns_waitcnt lgkmcnt(0)\ns_add_u32 s20, s20, 1", initialised=False
        )


def test_spills_keep_undefined_lanes_undefined() -> None:
    body = """
        s_mov_b64 exec, 0xf
        v_mov_b32_e32 v10, v1
        s_mov_b64 exec, -1
        scratch_store_dword off, v10, off
        scratch_load_dword v11, off, off
        s_waitcnt vmcnt(0)
    """
    run_text(body + "s_mov_b64 exec, 0xf\nds_write_b32 v1, v11")
    with pytest.raises(UndefinedReadError, match="v11"):
        run_text(body + "ds_write_b32 v1, v11")


def test_the_low_half_of_a_wide_sum_does_not_depend_on_the_high_half_of_the_addend() -> None:
    body = (
        "v_mov_b32_e32 v10, 7\nv_mad_u64_u32 v[12:13], s[20:21], v1, v1, {addend}\nds_write_b32 v1, {result}"
    )
    run_text(body.format(addend="v[10:11]", result="v12"))
    for addend, result in (("v[10:11]", "v13"), ("v[16:17]", "v12"), ("s[30:31]", "v12")):
        with pytest.raises(UndefinedReadError):
            run_text(body.format(addend=addend, result=result))
