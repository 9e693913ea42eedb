"""The wait states that ``hazard_kinds`` asks for are those that LLVM 22 inserts, pair by pair.

Wide buffer stores with a scalar offset are left out: LLVM 22 does not know that they read their data late.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from kernel.gfx950.hazards import hazard_distances
from tests.gfx950.one_wave import assemble

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
