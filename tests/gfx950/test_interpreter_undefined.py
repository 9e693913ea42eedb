"""Values that nothing wrote: they may be computed with, and raise where they would have an effect."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kernel.gfx950 import Memory, UndefinedReadError
from tests.gfx950.one_wave import launch, run_lanes

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
