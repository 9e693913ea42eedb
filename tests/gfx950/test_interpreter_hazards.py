"""Wait states counted over all paths, and what is too close."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Callable

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch
from flydsl._mlir.dialects import llvm
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl import toolchain
from kernel.backends.flydsl.runtime import launching, preflight
from kernel.errors import LaunchError
from kernel.gfx950 import HazardError
from kernel.gfx950.hazards import KINDS, HazardDistance, check_hazards, hazard_distances
from kernel.gfx950.hip import device as hip_device
from kernel.gfx950.hip import simulated_device
from tests.gfx950.one_wave import assemble

MFMA = "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[16:23], v[24:31], v[4:7]"

# kind: (producer, consumer)
PAIRS = {
    "matrix result read by a vector or memory instruction": (MFMA, "v_max_f32_e32 v40, v41, v3"),
    "matrix result overwritten by a vector or memory instruction": (MFMA, "v_mov_b32_e32 v2, 0"),
    "matrix result read as A or B of the next": (
        MFMA,
        "v_mfma_f32_16x16x128_f8f6f4 v[8:11], v[16:23], v[0:7], 0",
    ),
    "matrix result partly read as C of the next": (
        MFMA,
        "v_mfma_f32_16x16x128_f8f6f4 v[8:11], v[16:23], v[24:31], v[2:5]",
    ),
    "C overwritten by a vector instruction": (MFMA, "v_mov_b32_e32 v7, 0"),
    "vector result read by a matrix instruction": ("v_mov_b32_e32 v17, v40", MFMA),
    "vector result read across lanes by dpp": (
        "v_mov_b32_e32 v50, v40",
        "v_mov_b32_dpp v51, v50 row_mirror row_mask:0xf bank_mask:0xf",
    ),
    "vector result read by a lane swap": ("v_mov_b32_e32 v50, v40", "v_permlane32_swap_b32_e32 v51, v50"),
    "vector result read by v_readlane or v_readfirstlane": (
        "v_mov_b32_e32 v50, v40",
        "v_readfirstlane_b32 s20, v50",
    ),
    "transcendental result read by another vector instruction": (
        "v_rcp_f32_e32 v50, v40",
        "v_mul_f32_e32 v51, v50, v40",
    ),
    "part of a register that sdwa wrote, used by a vector instruction": (
        "v_add_u32_sdwa v50, v40, v41 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
        "v_mul_f32_e32 v51, v50, v40",
    ),
    "data of a 12- or 16-byte store overwritten by a vector instruction": (
        "global_store_dwordx4 v[10:11], v[50:53], off",
        "v_mov_b32_e32 v53, v40",
    ),
    "data of a 12- or 16-byte store with a scalar offset overwritten by a vector instruction": (
        "buffer_store_dwordx4 v[50:53], v40, s[20:23], s24 offen",
        "v_pk_mul_f32 v[50:51], v[60:61], v[62:63]",
    ),
    "scalar of a vector instruction read by a vector instruction": (
        "v_readfirstlane_b32 s20, v40",
        "v_add_u32_e32 v50, s20, v41",
    ),
    "scalar of a vector instruction read by a memory instruction": (
        "v_readfirstlane_b32 s20, v40",
        "buffer_load_dword v50, v40, s[20:23], 0 offen",
    ),
    "scalar of a vector instruction read as a lane number": (
        "v_readfirstlane_b32 s20, v40",
        "v_readlane_b32 s22, v41, s20",
    ),
    "exec of a vector compare used by dpp": (
        "v_cmpx_eq_u32_e32 vcc, v40, v41",
        "v_mov_b32_dpp v51, v50 row_mirror row_mask:0xf bank_mask:0xf",
    ),
    "exec of a vector compare used by a memory instruction": (
        "v_cmpx_eq_u32_e32 vcc, v40, v41",
        "global_load_dword v50, v[10:11], off",
    ),
    "exec of a vector compare used by a lane access or a matrix instruction": (
        "v_cmpx_eq_u32_e32 vcc, v40, v41",
        "v_readfirstlane_b32 s20, v50",
    ),
    "m0 used by a DMA to LDS": ("s_mov_b32 m0, 0", "buffer_load_dword v40, s[20:23], 0 offen lds"),
}


def distances(body: str) -> dict[str, HazardDistance]:
    return {found.kind: found for found in hazard_distances(assemble(body).kernels["kernel"])}


def test_every_kind_is_tried() -> None:
    assert set(PAIRS) == {kind.name for kind in KINDS}


@pytest.mark.parametrize("kind", PAIRS)
def test_distances(kind: str) -> None:
    producer, consumer = PAIRS[kind]
    needed = distances(f"{producer}\n{consumer}")[kind].needed
    for states in (0, needed - 1, needed):
        gap = f"s_nop {states - 1}\n" if states else ""
        body = f"{producer}\n{gap}{consumer}"
        found = distances(body)[kind]
        assert (found.seen, found.ok) == (states, states >= needed)
        if states < needed:
            with pytest.raises(HazardError, match="wait states after line 2") as caught:
                check_hazards(assemble(body).kernels["kernel"])
            assert caught.value.line == (4 if states else 3)
        else:
            check_hazards(assemble(body).kernels["kernel"])


STORE = "global_store_dwordx4 v[10:11], v[50:53], off"


@pytest.mark.parametrize(
    ("producer", "consumer", "needed"),
    [
        # Every form of the kinds above that LLVM treats alike.
        (MFMA, "ds_read_b32 v3, v40", 12),
        (MFMA, "global_load_dword v3, v[10:11], off", 12),
        ("v_cmp_eq_u32_e32 vcc, v40, v41", "v_mov_b32_e32 v50, vcc_lo", 2),
        ("v_cmp_eq_u32_e32 vcc, v40, v41", "v_cndmask_b32_e32 v50, v42, v43, vcc", 2),
        ("v_cmp_eq_u32_e64 s[20:21], v40, v41", "v_cndmask_b32_e64 v50, v42, v43, s[20:21]", 2),
        ("v_add_co_u32_e32 v50, vcc, v40, v41", "v_addc_co_u32_e32 v51, vcc, v42, v43, vcc", 2),
        ("v_readfirstlane_b32 s20, v40", "v_writelane_b32 v50, s20, 3", 2),
        ("v_readlane_b32 s20, v40, 3", "v_cmp_eq_u32_e32 vcc, s20, v41", 2),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "v_mov_b32_e32 v50, exec_lo", 2),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "v_readlane_b32 s20, v50, 3", 4),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "v_writelane_b32 v50, s30, 3", 4),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "v_permlane32_swap_b32_e32 v51, v50", 4),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", MFMA, 4),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "buffer_store_dword v50, v40, s[20:23], 0 offen", 5),
        ("global_store_dwordx3 v10, v[50:52], s[20:21]", "v_mov_b32_e32 v52, v40", 2),
        ("buffer_store_dwordx4 v[50:53], v40, s[20:23], 0 offen", "v_mov_b32_e32 v50, v40", 2),
        ("scratch_store_dwordx4 off, v[50:53], s20", "v_mov_b32_e32 v50, v40", 2),
        (STORE, "v_permlane32_swap_b32_e32 v51, v60", 2),
        (STORE, "v_mfma_f32_16x16x128_f8f6f4 v[50:53], v[16:23], v[24:31], v[4:7]", 2),
        ("v_mov_b32_sdwa v50, v40 dst_sel:BYTE_1 dst_unused:UNUSED_PAD", "v_mov_b32_e32 v50, v41", 1),
        # What the hardware takes care of.
        ("v_rcp_f32_e32 v50, v40", "v_rcp_f32_e32 v51, v50", 0),
        ("v_rcp_f32_e32 v50, v40", "v_mov_b32_e32 v50, v41", 0),
        ("v_mov_b32_sdwa v50, v40 dst_sel:DWORD src0_sel:WORD_1", "v_mov_b32_e32 v51, v50", 0),
        (STORE, "ds_read_b32 v50, v40", 0),
        (STORE, "v_mov_b32_e32 v54, v40", 0),
        ("global_store_dwordx2 v[10:11], v[50:51], off", "v_mov_b32_e32 v50, v40", 0),
        ("buffer_store_dwordx2 v[50:51], v40, s[20:23], s24 offen", "v_mov_b32_e32 v50, v40", 0),
        ("ds_write_b128 v10, v[50:53]", "v_mov_b32_e32 v50, v40", 0),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "ds_read_b32 v50, v42", 0),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "v_mov_b32_e32 v50, v42", 0),
        ("v_readfirstlane_b32 s20, v40", "s_mov_b32 s30, s20", 0),
        ("v_readfirstlane_b32 s20, v40", "s_load_dword s30, s[20:21], 0x0", 0),
        ("s_mov_b32 s20, 0", "v_mov_b32_e32 v50, s20", 0),
        ("s_mov_b64 exec, s[20:21]", "v_readfirstlane_b32 s30, v50", 0),
    ],
)
def test_wait_states_as_llvm_inserts_them(producer: str, consumer: str, needed: int) -> None:
    """Numbers of LLVM 22's hazard recogniser for gfx950 (``llc -run-pass=post-RA-hazard-rec``)."""
    gap = f"s_nop {needed - 1}\n" if needed else ""
    check_hazards(assemble(f"{producer}\n{gap}{consumer}").kernels["kernel"])
    if needed:
        gap = f"s_nop {needed - 2}\n" if needed > 1 else ""
        with pytest.raises(HazardError, match=f"{needed} are needed") as caught:
            check_hazards(assemble(f"{producer}\n{gap}{consumer}").kernels["kernel"])
        assert caught.value.text == consumer


def test_unrelated_registers_are_no_hazard() -> None:
    assert all(
        found.seen is None
        for found in distances(f"{MFMA}\nv_mov_b32_e32 v16, 0\nv_mov_b32_e32 v60, v61").values()
    )


def test_accumulating_into_the_same_registers_needs_nothing() -> None:
    same = "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[16:23], v[24:31], v[0:3]"
    check_hazards(assemble(f"{same}\n{same}").kernels["kernel"])


def test_the_shortest_path_counts_round_a_loop() -> None:
    body = f"""
        s_nop 0
    .LBB0_1:
        v_max_f32_e32 v40, v40, v0
        s_nop 9
        {MFMA}
        s_nop 5
        s_cbranch_scc1 .LBB0_1
        s_nop 15
        v_max_f32_e32 v41, v40, v1
    """
    found = distances(body)["matrix result read by a vector or memory instruction"]
    assert (found.seen, found.needed) == (7, 12)


# The wait states that ``KINDS`` asks for are those that LLVM 22 inserts, pair by pair.
#
# Wide buffer stores with a scalar offset are left out: LLVM 22 does not know that they read their data late.

LLC = shutil.which("llc-22")


def _group(registers: str) -> str:
    """``v[0:3]`` as machine code writes it."""
    first, last = map(int, registers[2:-1].split(":"))
    return "$" + "_".join(f"vgpr{at}" for at in range(first, last + 1))


def _matrix(result: str, c: str, a: str = "v[16:23]", b: str = "v[24:31]") -> tuple[str, str]:
    return (
        f"v_mfma_f32_16x16x128_f8f6f4 {result}, {a}, {b}, {c}",
        f"{_group(result)} = V_MFMA_F32_16X16X128_F8F6F4_f8_f8_vgprcd_e64 "
        f"{_group(a)}, {_group(b)}, {_group(c)}, 0, 0, implicit $mode, implicit $exec",
    )


# The same instruction as this project reads it and as LLVM's machine code.
PRODUCERS = [
    _matrix("v[0:3]", "v[4:7]"),
    ("v_mov_b32_e32 v50, v40", "$vgpr50 = V_MOV_B32_e32 $vgpr40, implicit $exec"),
    ("v_rcp_f32_e32 v50, v40", "$vgpr50 = nofpexcept V_RCP_F32_e32 $vgpr40, implicit $mode, implicit $exec"),
    (
        "v_add_u32_sdwa v50, v40, v41 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
        "$vgpr50 = V_ADD_U32_sdwa 0, $vgpr40, 0, $vgpr41, 0, 5, 0, 6, 6, implicit $exec",
    ),
    (
        "v_add_u32_sdwa v50, v40, v41 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:DWORD",
        "$vgpr50 = V_ADD_U32_sdwa 0, $vgpr40, 0, $vgpr41, 0, 6, 0, 0, 6, implicit $exec",
    ),
    ("v_readfirstlane_b32 s20, v40", "$sgpr20 = V_READFIRSTLANE_B32 $vgpr40, implicit $exec"),
    ("v_readlane_b32 s20, v40, 3", "$sgpr20 = V_READLANE_B32 $vgpr40, 3"),
    (
        "v_cmp_eq_u32_e64 s[20:21], v40, v41",
        "$sgpr20_sgpr21 = V_CMP_EQ_U32_e64 $vgpr40, $vgpr41, implicit $exec",
    ),
    (
        "v_cmp_eq_u32_e32 vcc, v40, v41",
        "V_CMP_EQ_U32_e32 $vgpr40, $vgpr41, implicit-def $vcc, implicit $exec",
    ),
    (
        "v_cmpx_eq_u32_e32 vcc, v40, v41",
        "V_CMPX_EQ_U32_e32 $vgpr40, $vgpr41, implicit-def $exec, implicit-def $vcc, implicit $exec",
    ),
    (
        "v_add_co_u32_e64 v50, s[20:21], v40, v41",
        "$vgpr50, $sgpr20_sgpr21 = V_ADD_CO_U32_e64 $vgpr40, $vgpr41, 0, implicit $exec",
    ),
    (
        "v_permlane32_swap_b32_e32 v50, v51",
        "$vgpr50, $vgpr51 = V_PERMLANE32_SWAP_B32_e64 $vgpr50, $vgpr51, 0, 0, implicit $exec",
    ),
    (
        "v_mov_b32_dpp v50, v40 row_mirror row_mask:0xf bank_mask:0xf",
        "$vgpr50 = V_MOV_B32_dpp undef $vgpr50, $vgpr40, 320, 15, 15, 0, implicit $exec",
    ),
    ("s_mov_b32 s20, 0", "$sgpr20 = S_MOV_B32 0"),
    ("s_mov_b64 exec, 0", "$exec = S_MOV_B64 0"),
    ("s_mov_b32 m0, 0", "$m0 = S_MOV_B32 0"),
    (
        "global_store_dwordx4 v[10:11], v[50:53], off",
        "GLOBAL_STORE_DWORDX4 $vgpr10_vgpr11, $vgpr50_vgpr51_vgpr52_vgpr53, 0, 0, implicit $exec",
    ),
    (
        "global_store_dwordx3 v10, v[50:52], s[0:1]",
        "GLOBAL_STORE_DWORDX3_SADDR $vgpr10, $vgpr50_vgpr51_vgpr52, $sgpr0_sgpr1, 0, 0, implicit $exec",
    ),
    (
        "global_store_dwordx2 v[10:11], v[50:51], off",
        "GLOBAL_STORE_DWORDX2 $vgpr10_vgpr11, $vgpr50_vgpr51, 0, 0, implicit $exec",
    ),
    (
        "buffer_store_dwordx4 v[50:53], v10, s[0:3], 0 offen",
        "BUFFER_STORE_DWORDX4_OFFEN_exact $vgpr50_vgpr51_vgpr52_vgpr53, $vgpr10, "
        "$sgpr0_sgpr1_sgpr2_sgpr3, 0, 0, 0, 0, implicit $exec",
    ),
    (
        "scratch_store_dwordx4 off, v[50:53], s4",
        "SCRATCH_STORE_DWORDX4_SADDR $vgpr50_vgpr51_vgpr52_vgpr53, $sgpr4, 0, 0, implicit $exec, "
        "implicit $flat_scr",
    ),
    (
        "ds_write_b128 v10, v[50:53]",
        "DS_WRITE_B128_gfx9 $vgpr10, $vgpr50_vgpr51_vgpr52_vgpr53, 0, 0, implicit $exec",
    ),
]
CONSUMERS = [
    _matrix("v[70:73]", "v[0:3]"),
    _matrix("v[70:73]", "v[2:5]"),
    _matrix("v[0:3]", "v[0:3]"),
    _matrix("v[50:53]", "v[74:77]"),
    _matrix("v[70:73]", "v[50:53]"),
    _matrix("v[70:73]", "v[74:77]", "v[0:7]"),
    _matrix("v[70:73]", "v[74:77]", "v[16:23]", "v[44:51]"),
    ("v_mov_b32_e32 v60, v1", "$vgpr60 = V_MOV_B32_e32 $vgpr1, implicit $exec"),
    ("v_mov_b32_e32 v1, v60", "$vgpr1 = V_MOV_B32_e32 $vgpr60, implicit $exec"),
    ("v_mov_b32_e32 v5, v60", "$vgpr5 = V_MOV_B32_e32 $vgpr60, implicit $exec"),
    ("v_mov_b32_e32 v17, v60", "$vgpr17 = V_MOV_B32_e32 $vgpr60, implicit $exec"),
    ("ds_write_b32 v60, v1", "DS_WRITE_B32_gfx9 $vgpr60, $vgpr1, 0, 0, implicit $exec"),
    ("ds_read_b32 v1, v60", "$vgpr1 = DS_READ_B32_gfx9 $vgpr60, 0, 0, implicit $exec"),
    (
        "global_load_dword v1, v[60:61], off",
        "$vgpr1 = GLOBAL_LOAD_DWORD $vgpr60_vgpr61, 0, 0, implicit $exec",
    ),
    ("v_mov_b32_e32 v60, v50", "$vgpr60 = V_MOV_B32_e32 $vgpr50, implicit $exec"),
    ("v_mov_b32_e32 v50, v60", "$vgpr50 = V_MOV_B32_e32 $vgpr60, implicit $exec"),
    ("v_mov_b32_e32 v52, v60", "$vgpr52 = V_MOV_B32_e32 $vgpr60, implicit $exec"),
    ("v_rcp_f32_e32 v60, v50", "$vgpr60 = nofpexcept V_RCP_F32_e32 $vgpr50, implicit $mode, implicit $exec"),
    ("ds_read_b32 v50, v60", "$vgpr50 = DS_READ_B32_gfx9 $vgpr60, 0, 0, implicit $exec"),
    (
        "global_load_dword v50, v[60:61], off",
        "$vgpr50 = GLOBAL_LOAD_DWORD $vgpr60_vgpr61, 0, 0, implicit $exec",
    ),
    (
        "global_store_dword v[60:61], v50, off",
        "GLOBAL_STORE_DWORD $vgpr60_vgpr61, $vgpr50, 0, 0, implicit $exec",
    ),
    (
        "global_load_dword v62, v60, s[20:21]",
        "$vgpr62 = GLOBAL_LOAD_DWORD_SADDR $sgpr20_sgpr21, $vgpr60, 0, 0, implicit $exec",
    ),
    (
        "buffer_load_dword v62, v60, s[20:23], 0 offen",
        "$vgpr62 = BUFFER_LOAD_DWORD_OFFEN $vgpr60, $sgpr20_sgpr21_sgpr22_sgpr23, 0, 0, 0, 0, implicit $exec",
    ),
    (
        "buffer_load_dword v60, s[0:3], 0 offen lds",
        "BUFFER_LOAD_DWORD_LDS_OFFEN $vgpr60, $sgpr0_sgpr1_sgpr2_sgpr3, 0, 0, 0, 0, implicit $exec, "
        "implicit $m0",
    ),
    (
        "scratch_load_dword v62, off, s20",
        "$vgpr62 = SCRATCH_LOAD_DWORD_SADDR $sgpr20, 0, 0, implicit $exec, implicit $flat_scr",
    ),
    ("s_load_dword s30, s[20:21], 0x0", "$sgpr30 = S_LOAD_DWORD_IMM $sgpr20_sgpr21, 0, 0"),
    ("s_mov_b32 s30, s20", "$sgpr30 = S_MOV_B32 $sgpr20"),
    ("v_mov_b32_e32 v60, s20", "$vgpr60 = V_MOV_B32_e32 $sgpr20, implicit $exec"),
    ("v_mov_b32_e32 v60, vcc_lo", "$vgpr60 = V_MOV_B32_e32 $vcc_lo, implicit $exec"),
    ("v_mov_b32_e32 v60, exec_lo", "$vgpr60 = V_MOV_B32_e32 $exec_lo, implicit $exec"),
    (
        "v_cndmask_b32_e32 v60, v61, v62, vcc",
        "$vgpr60 = V_CNDMASK_B32_e32 $vgpr61, $vgpr62, implicit $vcc, implicit $exec",
    ),
    (
        "v_cndmask_b32_e64 v60, v61, v62, s[20:21]",
        "$vgpr60 = V_CNDMASK_B32_e64 0, $vgpr61, 0, $vgpr62, $sgpr20_sgpr21, implicit $exec",
    ),
    (
        "v_addc_co_u32_e32 v60, vcc, v61, v62, vcc",
        "$vgpr60 = V_ADDC_U32_e32 $vgpr61, $vgpr62, implicit-def $vcc, implicit $vcc, implicit $exec",
    ),
    (
        "v_mov_b32_dpp v60, v50 row_mirror row_mask:0xf bank_mask:0xf",
        "$vgpr60 = V_MOV_B32_dpp undef $vgpr60, $vgpr50, 320, 15, 15, 0, implicit $exec",
    ),
    (
        "v_permlane32_swap_b32_e32 v60, v50",
        "$vgpr60, $vgpr50 = V_PERMLANE32_SWAP_B32_e64 $vgpr60, $vgpr50, 0, 0, implicit $exec",
    ),
    ("v_readfirstlane_b32 s30, v50", "$sgpr30 = V_READFIRSTLANE_B32 $vgpr50, implicit $exec"),
    ("v_readlane_b32 s30, v60, s20", "$sgpr30 = V_READLANE_B32 $vgpr60, $sgpr20, implicit $exec"),
    ("v_writelane_b32 v60, s20, 3", "$vgpr60 = V_WRITELANE_B32 $sgpr20, 3, $vgpr60"),
]  # fmt: skip


def _asked_by_us(producer: str, consumer: str) -> int:
    found = hazard_distances(assemble(f"{producer}\n{consumer}").kernels["kernel"])
    return max((distance.needed for distance in found if distance.seen == 0), default=0)


def _inserted_by_llvm(pairs: list[tuple[str, str]]) -> list[int]:
    assert LLC is not None
    functions = [
        f"---\nname: f{at}\nbody: |\n  bb.0:\n    {first}\n    {second}\n    S_ENDPGM 0\n...\n"
        for at, (first, second) in enumerate(pairs)
    ]
    command = [LLC, "-x", "mir", "-mtriple=amdgcn-amd-amdhsa", "-mcpu=gfx950", "-mattr=-xnack"]
    done = subprocess.run(
        [*command, "-run-pass=post-RA-hazard-rec", "-", "-o", "-"],
        input="".join(functions), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    bodies = re.findall(r"^name:\s+f\d+$(.*?)^\.\.\.$", done.stdout, re.M | re.S)
    assert len(bodies) == len(pairs)
    return [sum(int(count) + 1 for count in re.findall(r"S_NOP (\d+)", body)) for body in bodies]


@pytest.mark.skipif(LLC is None, reason="llc-22 is not installed: no hazard recogniser to compare with")
def test_every_pair_needs_what_llvm_inserts() -> None:
    pairs = [(first, second) for first in PRODUCERS for second in CONSUMERS]
    inserted = _inserted_by_llvm([(first[1], second[1]) for first, second in pairs])
    differing = [
        f"{first[0]} -> {second[0]}: LLVM {llvm}, here {asked}"
        for (first, second), llvm in zip(pairs, inserted)
        if llvm != (asked := _asked_by_us(first[0], second[0]))
    ]
    assert differing == []
    assert sum(states > 0 for states in inserted) > 80


# A kernel with too few wait states does not pass on the simulated device, which has no clock to show it.

THREADS = 64


@functools.cache
def first_lane(gap: str) -> Callable[..., None]:
    """A launch of ``out[i] = x[0]`` over a wave: a vector instruction writes a scalar, then ``gap``, then one
    reads it, in inline assembly, where LLVM leaves the distance to whoever wrote it."""
    text = f"v_readfirstlane_b32 s20, $1\n{gap}v_mov_b32 $0, s20"

    @flyc.kernel(name="first_lane", known_block_size=[THREADS, 1, 1])  # type: ignore[untyped-decorator]
    def kernel(x: fx.Int64, out: fx.Int64) -> None:
        lane = fx.Int32(fx.thread_idx.x)
        i32 = fx.PointerType.get(T.i32, fx.AddressSpace.Global, 4)
        value = as_ir_value(fx.inttoptr(i32, x)[lane])
        copied = llvm.inline_asm(value.type, [value], text, "=v,v,~{s20}", has_side_effects=True)
        fx.inttoptr(i32, out)[lane] = fx.Int32(copied)

    @flyc.jit  # type: ignore[untyped-decorator]
    def launch(x: fx.Int64, out: fx.Int64, stream: fx.Stream) -> None:
        kernel(x, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        device = simulated_device()
        toolchain.prepare_linker()
        preflight(device)
        with launching(device, [x, out]) as stream:
            launch(x.data_ptr(), out.data_ptr(), fx.Stream(stream))

    return run


def test_a_kernel_with_enough_wait_states_runs() -> None:
    x, out = torch.arange(7, 7 + THREADS, dtype=torch.int32), torch.zeros(THREADS, dtype=torch.int32)
    first_lane("s_nop 1\n")(x, out)
    assert out.tolist() == [7] * THREADS


@pytest.mark.parametrize(("gap", "seen"), [("", 0), ("s_nop 0\n", 1)])
def test_a_kernel_with_too_few_is_refused_and_both_instructions_are_named(gap: str, seen: int) -> None:
    x, out = torch.arange(THREADS, dtype=torch.int32), torch.full((THREADS,), -1, dtype=torch.int32)
    for _ in range(2):  # not only the first time
        with pytest.raises(LaunchError) as caught:
            first_lane(gap)(x, out)
        cause = caught.value.__cause__
        assert isinstance(cause, HazardError)
        assert cause.kernel == "first_lane"
        assert cause.text is not None
        assert cause.text.startswith("v_mov_b32_e32")
        assert f"line {cause.line}: `{cause.text}`: scalar of a vector instruction" in str(caught.value)
        assert f"{seen} wait states after line" in str(caught.value)
        assert "(`v_readfirstlane_b32 s20, v" in str(caught.value)
        assert out.tolist() == [-1] * THREADS


def test_a_code_object_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(hip_device, "check_hazards", lambda kernel: checked.append(kernel.name))
    hip_device._program.cache_clear()
    x, out = torch.arange(THREADS, dtype=torch.int32), torch.zeros(THREADS, dtype=torch.int32)
    for _ in range(3):
        first_lane("s_nop 2\n")(x, out)
    assert checked == ["first_lane"]
