"""Reading assembly: LLVM's text, llvm-objdump's listing, and what must be refused with its line."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess

import numpy as np
import pytest

from kernel.gfx950 import (
    AssemblySyntaxError,
    InterpreterError,
    KernelArgument,
    KernelMetadata,
    Memory,
    UnencodableError,
    UnsupportedInstructionError,
    from_descriptor,
    parse_program,
    run,
)
from kernel.gfx950.isa import INSTRUCTIONS
from kernel.gfx950.launch import decode
from tests.gfx950 import (
    test_interpreter_lanes,
    test_interpreter_matrix,
    test_interpreter_memory,
    test_interpreter_scalar,
    test_interpreter_vector,
)
from tests.gfx950.one_wave import assemble, run_lanes

COMPILED = """
	.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx950"
	.amdhsa_code_object_version 6
	.text
	.globl	doubling
	.p2align	8
	.type	doubling,@function
doubling:                               ; @doubling
; %bb.0:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_lshlrev_b32_e32 v1, 2, v0
	s_mov_b32 s6, 3
	;;#ASMSTART
	; pin
	;;#ASMEND
	s_waitcnt lgkmcnt(0)
	global_load_dword v2, v1, s[4:5]
	s_waitcnt vmcnt(0)
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	v_add_u32_e32 v2, v2, v2
	s_add_i32 s6, s6, -1
	s_cmp_lg_u32 s6, 0
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	global_store_dword v1, v2, s[4:5]
	s_endpgm
.Lfunc_end0:
	.size	doubling, .Lfunc_end0-doubling
	.section	.rodata,"a",@progbits
	.p2align	6, 0x0
	.amdhsa_kernel doubling
		.amdhsa_group_segment_fixed_size 512
		.amdhsa_private_segment_fixed_size 8
		.amdhsa_kernarg_size 12
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_system_sgpr_workgroup_id_y 1
		.amdhsa_system_sgpr_workgroup_id_z 0
		.amdhsa_system_vgpr_workitem_id 1
		.amdhsa_next_free_vgpr 3
		.amdhsa_next_free_sgpr 7
		.amdhsa_accum_offset 4
		.amdhsa_float_denorm_mode_32 3
		.amdhsa_float_denorm_mode_16_64 3
	.end_amdhsa_kernel
	.text
	.fill 256, 4, 3212836864
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .offset:         0
        .size:           8
        .value_kind:     by_value
      - .offset:         8
        .size:           4
        .value_kind:     hidden_block_count_x
    .group_segment_fixed_size: 512
    .name:           doubling
    .reqd_workgroup_size:
      - 64
      - 1
      - 1
    .symbol:         doubling.kd
    .vgpr_count:     3
    .vgpr_spill_count: 0
amdhsa.target:   amdgcn-amd-amdhsa-unknown-gfx950
...
	.end_amdgpu_metadata
"""

LISTING = """
a.so:	file format elf64-amdgpu

Disassembly of section .text:

0000000000001700 <doubling>:
	s_load_dwordx2 s[4:5], s[0:1], 0x0                         // 000000001700: C0060100 00000000
	v_lshlrev_b32_e32 v1, 2, v0                                // 000000001708: 24020082
	s_mov_b32 s6, 3                                            // 00000000170C: BE860083
	s_waitcnt lgkmcnt(0)                                       // 000000001710: BF8CC07F
	global_load_dword v2, v1, s[4:5]                           // 000000001714: DC508000 02040001
	s_waitcnt vmcnt(0)                                         // 00000000171C: BF8C0F70
	v_add_u32_e32 v2, v2, v2                                   // 000000001720: 68040502
	s_add_i32 s6, s6, -1                                       // 000000001724: 8106C106
	s_cmp_lg_u32 s6, 0                                         // 000000001728: BF078006
	s_cbranch_scc1 65532                                       // 00000000172C: BF85FFFC <doubling+0x20>
	global_store_dword v1, v2, s[4:5]                          // 000000001730: DC708000 00040201
	s_endpgm                                                   // 000000001738: BF810000
	s_nop 0                                                    // 00000000173C: BF800000
"""
SYMBOLIC = LISTING.replace("	v_add_u32_e32", "0000000000001720 <L0>:\n	v_add_u32_e32").replace(
    "65532 ", "L0    "
)
KNOWN = KernelMetadata(name="doubling", kernarg_bytes=8)


@pytest.mark.parametrize("form", ["compiled", "listing", "symbolic"])
def test_every_form_of_text_runs_alike(form: str) -> None:
    text = {"compiled": COMPILED, "listing": LISTING, "symbolic": SYMBOLIC}[form]
    program = parse_program(text, {} if form == "compiled" else {"doubling": KNOWN})
    memory = Memory()
    values = np.arange(64, dtype=np.uint32)
    region = memory.register_array(values, "values")
    arguments = struct.pack("<qi", region.address, 1)
    report = run(program, "doubling", grid=(1, 1, 1), block=(64, 1, 1), kernargs=arguments, memory=memory)
    np.testing.assert_array_equal(values, np.arange(64) * 8)
    assert report.instructions == 6 + 3 * 4 + 2
    assert memory.regions == (region,)


def test_metadata_of_compiled_text() -> None:
    kernel = parse_program(COMPILED).kernels["doubling"]
    known = kernel.metadata
    assert known is not None
    assert (known.lds_bytes, known.scratch_bytes, known.kernarg_bytes) == (512, 8, 12)
    assert known.workgroup_id == (True, True, False)
    assert (known.workitem_id_dimensions, known.vgprs, known.sgprs) == (2, 3, 7)
    assert known.arguments == (KernelArgument(0, 8, "by_value"), KernelArgument(8, 4, "hidden_block_count_x"))
    assert known.notes == {
        "agpr_count": 0,
        "group_segment_fixed_size": 512,
        "vgpr_count": 3,
        "vgpr_spill_count": 0,
    }
    assert (
        kernel.instructions[0].line
        == COMPILED.splitlines().index("	s_load_dwordx2 s[4:5], s[0:1], 0x0") + 1
    )


def test_metadata_of_a_kernel_descriptor() -> None:
    descriptor = bytearray(64)
    struct.pack_into("<III", descriptor, 0, 1024, 16, 72)
    rsrc1 = (31 - 1) | 3 << 16 | 3 << 18 | 1 << 21 | 1 << 23
    rsrc2 = 2 << 1 | 1 << 7 | 1 << 9 | 2 << 11
    struct.pack_into("<IIIHH", descriptor, 44, 60, rsrc1, rsrc2, 1 << 3, 0)
    known = from_descriptor("k", bytes(descriptor), (KernelArgument(0, 8, "by_value"),))
    assert (known.lds_bytes, known.scratch_bytes, known.kernarg_bytes, known.user_sgprs) == (1024, 16, 72, 2)
    assert known.kernarg_pointer
    assert known.workgroup_id == (True, False, True)
    assert (known.workitem_id_dimensions, known.vgprs, known.accum_offset) == (3, 248, 244)
    assert known.arguments == (KernelArgument(0, 8, "by_value"),)
    struct.pack_into("<I", descriptor, 48, rsrc1 & ~(3 << 16))
    with pytest.raises(UnsupportedInstructionError, match="float_denorm_mode_32"):
        from_descriptor("k", bytes(descriptor))
    with pytest.raises(AssemblySyntaxError, match="64 are needed"):
        from_descriptor("k", bytes(60))


UNSUPPORTED = [
    "v_made_up_f32 v0, v1, v2",
    "v_add_u32_e32 v0, v1",
    "v_add_u32_e32 v0, v1, v2, v3",
    "v_add_u32_e32 v0, v1, -v2",
    "v_add_u32_e64 v0, v1, v2 clamp",
    "v_add_u32_e32 v0, v1, ttmp3",
    "v_add_u32_e32 v0, v1, src_vccz",
    "v_add_u32_e32 v0, v1, v256",
    "v_add_u32_e32 s0, v1, v2",
    "v_add_u32_e32 v0, v1, s[2:3]",
    "v_add_u32_e32 v[0:1], v1, v2",
    "v_add_u32_e32 v0, v1, v2 offset:4",
    "v_add_u32_e32 v0, v1, v2 row_shr:1",
    "v_mul_lo_u32_dpp v0, v1, v2 row_shr:1 extra",
    "v_add_f32_e64 v0, v1, v2 mul:2",
    "v_cmp_eq_u32_e32 s[4:5], v1, v2",
    "v_cmp_eq_u32_e64 exec, v1, v2",
    "v_cvt_f32_f64_e32 v0, v[2:3]",
    "v_pk_fma_f16 v0, v1, v2, v3",
    "v_pk_max_u16 v0, v1, v2 op_sel:[1,0]",
    "v_pk_add_u16 v0, v1, 1",
    "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], 0",
    "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[16:23], v[24:31], 0x40000000",
    "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[16:21], v[24:31], 0",
    "s_mov_b32 s102, 0",
    "s_mov_b32 s0, s[2:3]",
    "s_add_u32 s0, s1, v2",
    "s_getreg_b32 s0, hwreg(HW_REG_MODE)",
    "s_movk_i32 s0, 0x10000",
    "s_mov_b64 s[0:1], 0x123456789",
    "s_trap 2",
    "s_memtime s[0:1]",
    "s_barrier 1",
    "s_endpgm 1",
    "s_waitcnt vscnt(0)",
    "s_waitcnt_depctr 0",
    "s_load_dword s0, s[2:3], 0x0 glc",
    "s_load_dwordx4 s[0:1], s[2:3], 0x0",
    "flat_load_dword v0, v[2:3]",
    "global_load_dword v0, v[2:3], s[4:5]",
    "global_load_dword v0, v2, off",
    "global_load_dwordx2 v0, v2, s[4:5]",
    "global_load_dword v0, v2, s[4:5] offset:4096",
    "global_load_short_d16 v0, v2, s[4:5]",
    "global_atomic_add v[0:1], v2, off",
    "buffer_load_dword v0, v2, s[4:7], 0 offen lds",
    "buffer_load_ubyte v2, s[4:7], 0 offen lds",
    "buffer_load_dword v0, v2, s[4:5], 0 offen",
    "buffer_load_dword v0, v2, s[4:7], 0 offen offset:4096",
    "ds_read_b32 v0, v1 gds",
    "ds_read2_b32 v[0:1], v2 offset0:256",
    "ds_read_b64_tr_b8 v[0:1], v2",
    "ds_add_u32 v0, v1",
    "scratch_load_dword v0, v1, off",
    "v_bitop3_b32 v0, v1, v2, v3 bitop3:0x100",
    "v_permlane32_swap_b32_e32 v1, v1",
    "v_lshlrev_b32_sdwa v0, v1, v2 dst_sel:NIBBLE_0 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
    "v_lshlrev_b32_sdwa v0, v1, 4 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
    "v_fma_f32 v0, v1, v2, v3 op_sel:[1,0,0]",
    "v_mov_b32_e32 v0, lds_direct",
    "v_mov_b32_e32 v0, |v1|",
]


@pytest.mark.parametrize("text", UNSUPPORTED)
def test_what_is_not_implemented_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(InterpreterError) as caught:
        decode(assemble(f"\ts_nop 0\n\t{text}").kernels["kernel"])
    assert isinstance(caught.value, UnsupportedInstructionError | AssemblySyntaxError)
    assert caught.value.line == 3
    assert caught.value.text == text
    assert f"line 3: `{text}`" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("s_nop 0", 1),
        ("k:\n s_nop 0, , 1", 2),
        ("k:\n v_mov_b32_e32 v0, v1 nt nt", 2),
        ("k:\n v_mov_b32_e32 v0 nt, v1", 2),
        ("k:\n .long 5\n s_endpgm", 2),
        ("k:\n s_endpgm\n .amdhsa_kernel k\n .amdhsa_kernarg_size many\n .end_amdhsa_kernel", 4),
        ("k:\n s_endpgm\n .amdhsa_kernel k", 3),
        ("0000000000001700 <k>:\n s_endpgm\n0000000000001800 <k>:", 3),
    ],
)
def test_malformed_text(text: str, line: int) -> None:
    with pytest.raises(AssemblySyntaxError) as caught:
        parse_program(text)
    assert caught.value.line == line


def test_branches_to_nowhere() -> None:
    for text in ("s_branch .LBB0_7", "s_branch 5"):
        with pytest.raises(AssemblySyntaxError, match="branch target"):
            run_lanes(text)
    with pytest.raises(AssemblySyntaxError, match="no instruction"):
        decode(parse_program(LISTING.replace("65532", "65530"), {"doubling": KNOWN}).kernels["doubling"])


def test_registers_beyond_the_kernels_own_are_refused() -> None:
    text = COMPILED.replace("v_lshlrev_b32_e32 v1, 2, v0", "v_lshlrev_b32_e32 v3, 2, v0")
    with pytest.raises(UnsupportedInstructionError, match="given 3 such registers"):
        decode(parse_program(text).kernels["doubling"])


def test_metadata_of_a_kernel_that_is_not_there() -> None:
    with pytest.raises(AssemblySyntaxError, match="'other'"):
        parse_program(LISTING, {"other": KNOWN})


# Hand-written assembly means what LLVM's assembler makes of it, and what that refuses is refused.

ASSEMBLER = shutil.which("llvm-mc-22")

ENCODABLE = """
    v_mov_b32_e32 v1, 300
    v_mov_b32 v1, s2
    v_add_u32_e32 v1, 300, v2
    v_add_u32_e32 v1, s2, v3
    v_add_u32 v1, v2, s3
    v_add_u32_e64 v1, s2, s2
    v_mul_f32_e32 v1, 0.3, v2
    v_fma_f32 v1, 0.5, v2, v3
    v_fma_f32 v1, 0.15915494, v2, v3
    v_add3_u32 v1, s2, s2, v3
    v_add3_u32 v1, v2, 64, -16
    v_add3_u32 v1, v2, 0xffffffff, 0x3f800000
    v_add3_u32_e64 v1, v2, v3, v4
    v_cndmask_b32_e32 v1, v2, v3, vcc
    v_cndmask_b32_e64 v1, 5, v3, s[4:5]
    v_addc_co_u32_e64 v1, s[2:3], v2, v3, s[4:5]
    v_cmp_eq_u32_e64 s[2:3], s4, v2
    v_mad_u64_u32 v[2:3], s[4:5], s6, s6, v[4:5]
    v_lshl_add_u64 v[2:3], s[4:5], 3, s[4:5]
    v_lshlrev_b64 v[2:3], 0xffffffff, v[4:5]
    v_pk_add_f32 v[2:3], s[4:5], s[4:5]
    v_readlane_b32 s1, v2, s3
    v_readlane_b32 s1, v2, m0
    v_writelane_b32 v1, s2, s2
    v_writelane_b32 v1, s2, m0
    v_accvgpr_write_b32 a1, s2
    v_add_u32_sdwa v1, s2, v3
    v_mov_b32_dpp v1, v2 row_mirror bound_ctrl:0
    v_mov_b32_dpp v1, v2 row_mirror bound_ctrl:1
    v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:15], a[16:23], 1.0
    s_add_u32 s1, 300, 300
    s_load_dwordx4 s[4:7], s[2:3], 0x0
    s_load_dwordx16 s[16:31], s[2:3], -0x100000
    s_cmpk_eq_i32 s1, -5
    global_load_dwordx3 v[4:6], v[2:3], off
    buffer_load_dword v1, off, s[4:7], 64
    buffer_store_dwordx4 v[4:7], v2, s[4:7], s9 offen
    ds_write2_b32 v1, a2, a3
    ds_read_b96 v[4:6], v2
    scratch_load_dwordx2 v[4:5], off, s1 offset:4095
"""
UNENCODABLE = """
    v_mov_b32_e64 v1, 300
    v_add_u32_e32 v1, v2, 300
    v_add_u32_e32 v1, v2, s3
    v_add_u32_e32 v1, v2, a3
    v_add_u32 v1, v2, 300
    v_add_u32 v1, 300, s2
    v_add_u32_e64 v1, s2, s3
    v_add_f32_e32 v1, -v2, v3
    v_add_f32_e32 v1, v2, v3 clamp
    v_mac_f32_e32 v1, v2, v3
    v_add3_u32 v1, v2, 65, v3
    v_add3_u32 v1, s2, s3, v3
    v_add3_u32 v1, s2, v3, vcc_lo
    v_add3_u32_e32 v1, v2, v3, v4
    v_add3_u32_dpp v1, v2, v3, v4 row_mirror
    v_mul_lo_u32_sdwa v1, v2, v3
    v_fma_f32 v1, 0.3, v2, v3
    v_ldexp_f32 v1, v2, 300
    v_cndmask_b32_e32 v1, s2, v3, vcc
    v_cndmask_b32_e32 v1, 300, v3, vcc
    v_cndmask_b32_e64 v1, s2, v3, s[4:5]
    v_cndmask_b32_e64 v1, s4, v3, s[4:5]
    v_addc_co_u32_e32 v1, vcc, s2, v3, vcc
    v_addc_co_u32_e64 v1, s[2:3], s8, v3, s[4:5]
    v_cmp_eq_u32_e64 vcc, 300, v2
    v_cmp_eq_u32 vcc, v2, 300
    v_cmp_eq_u32 s[2:3], 300, v2
    v_cmp_eq_u32_e64 s[3:4], v1, v2
    v_cmp_eq_u64_e32 vcc, v[2:3], v[3:4]
    v_cmp_eq_u32_dpp vcc, v1, v2 row_mirror
    v_mad_u64_u32 v[2:3], s[4:5], s6, s7, v[4:5]
    v_mad_u64_u32 v[3:4], vcc, s6, s6, v[4:5]
    v_mov_b64_e32 v[2:3], s[3:4]
    v_mov_b64_e32 v[3:4], v[2:3]
    v_lshl_add_u64 v[2:3], s[4:5], s4, s[4:5]
    v_lshlrev_b64 v[2:3], 300, v[4:5]
    v_pk_add_f32 v[2:3], s[4:5], s[6:7]
    v_readlane_b32 s1, v2, 300
    v_readlane_b32 m0, v2, 3
    v_readlane_b32 s1, a2, 3
    v_readfirstlane_b32 m0, v2
    v_readfirstlane_b32_e64 s1, v2
    v_writelane_b32 v1, s2, s3
    v_writelane_b32 v1, 300, s2
    v_accvgpr_write_b32 a1, 300
    v_add_u32_sdwa v1, s2, s3
    v_add_u32_sdwa v1, v2, 300
    v_mul_f32_dpp v1, v2, s3 row_mirror
    v_mul_f32_dpp v1, v2, 1.0 row_mirror
    v_mov_b32_dpp v1, v2 row_mirror bound_ctrl:2
    v_mov_b32_dpp v1, v2 row_mirror bound_ctrl:-1
    v_mfma_f32_16x16x128_f8f6f4 v[1:4], v[8:15], v[16:23], 0
    v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[9:16], v[16:23], 0
    v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:23], 300
    v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:23], 3.5
    s_add_u32 s1, 300, 301
    s_mov_b64 s[3:4], 0
    s_mov_b64 s[2:3], s[3:4]
    s_and_saveexec_b64 s[3:4], vcc
    s_cmp_eq_u64 s[2:3], 3.5
    s_cmpk_eq_u32 s1, -5
    s_load_dwordx4 s[2:5], s[0:1], 0x0
    s_load_dwordx4 s[4:7], s[1:2], 0x0
    s_load_dword s1, s[2:3], 0x100000
    s_load_dword s1, s[2:3], 0.5
    s_load_dword m0, s[2:3], 0x0
    s_buffer_load_dword s1, s[4:7], -4
    global_load_dwordx2 v[3:4], v[2:3], off
    global_load_dword v1, v[3:4], off
    global_load_dword v1, v2, s[3:4]
    global_load_dwordx4 v[4:7], v1, exec
    buffer_load_dword v1, v2, s[2:5], 0 offen
    buffer_load_dword v1, v2, s[4:7], 300 offen
    buffer_load_dword v1, v2, s[4:7], 0
    buffer_load_dword v1, 1, s[4:7], 0 offen
    ds_read_b64 v[3:4], v2
    ds_read_b32 v1, a2
    ds_write_b64 v1, v[3:4]
    ds_write_b32 v1, s1
    ds_write_b32 1, v2
    ds_write2_b32 v1, v2, a3
    ds_bpermute_b32 v1, v2, v3 offset:-4
    scratch_load_dwordx2 v[3:4], off, s1
    scratch_load_dword v3, off, 0
    scratch_load_dword v3, off, s1 offset:4096
"""


def lines(table: str) -> list[str]:
    return [line.strip() for line in table.strip().splitlines()]


@pytest.mark.parametrize("line", lines(ENCODABLE))
def test_what_has_an_encoding_is_read(line: str) -> None:
    decode(assemble(f"\ts_nop 0\n\t{line}", scratch_bytes=64).kernels["kernel"])


@pytest.mark.parametrize("line", lines(UNENCODABLE))
def test_what_has_none_is_refused_at_its_line(line: str) -> None:
    with pytest.raises((UnencodableError, UnsupportedInstructionError)) as refused:
        decode(assemble(f"\ts_nop 0\n\t{line}", scratch_bytes=64).kernels["kernel"])
    assert (refused.value.line, refused.value.text) == (3, line)
    assert str(refused.value).startswith(f"line 3: `{line}`: ")


def test_the_error_says_what_has_no_bits() -> None:
    for line, what in (
        ("v_add3_u32 v1, s2, s3, v3", "v_add3_u32 has no encoding with s2 and s3 as sources"),
        ("v_add3_u32 v1, v2, 65, v3", "v_add3_u32 has no encoding with the literal constant 65"),
        ("v_add_u32_e32 v1, v2, s3", "v_add_u32_e32 has no encoding with s3 as the second source"),
        ("global_load_dwordx2 v[3:4], v[2:3], off", "2 vector registers start at a multiple of 2"),
        ("s_load_dwordx4 s[2:5], s[0:1], 0x0", "4 scalar registers start at a multiple of 4"),
    ):
        with pytest.raises(InterpreterError, match=re.escape(what)):
            decode(assemble(f"\t{line}").kernels["kernel"])


@pytest.mark.skipif(ASSEMBLER is None, reason="llvm-mc-22 is not installed: no assembler to compare with")
def test_llvm_agrees_on_every_line_of_the_tables() -> None:
    assert ASSEMBLER is not None
    table = [*lines(ENCODABLE), *lines(UNENCODABLE)]
    done = subprocess.run(
        [ASSEMBLER, "-triple=amdgcn-amd-amdhsa", "-mcpu=gfx950", "-filetype=null"],
        input="\n".join(table) + "\n", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    refused = {table[int(at) - 1] for at in re.findall(r"^<stdin>:(\d+):\d+: error:", done.stderr, re.M)}
    assert refused == set(lines(UNENCODABLE))


# What LLVM's assembler takes an instruction for, where the text leaves something out or says it the old way.
_LANES = np.arange(64, dtype=np.uint32)


@pytest.mark.parametrize("bound_ctrl", ["bound_ctrl:0", "bound_ctrl:1"])
def test_bound_ctrl_sets_the_bit_whatever_its_number(bound_ctrl: str) -> None:
    """A lane without a source lane is written, with 0."""
    found = run_lanes(
        f"v_mov_b32_dpp v5, v10 row_shr:1 row_mask:0xf bank_mask:0xf {bound_ctrl}",
        vectors={"v5": _LANES + 1000, "v10": _LANES + 100},
        read_vectors=["v5"],
    ).vectors["v5"]
    np.testing.assert_array_equal(found, np.where(_LANES % 16 == 0, 0, _LANES + 99))


def test_without_bound_ctrl_a_lane_without_a_source_keeps_its_value() -> None:
    found = run_lanes(
        "v_mov_b32_dpp v5, v10 row_shr:1 row_mask:0xf bank_mask:0xf",
        vectors={"v5": _LANES + 1000, "v10": _LANES + 100},
        read_vectors=["v5"],
    ).vectors["v5"]
    np.testing.assert_array_equal(found, np.where(_LANES % 16 == 0, _LANES + 1000, _LANES + 99))


@pytest.mark.parametrize(
    ("unused", "around"),
    [("", 0xAABB00DD), ("dst_unused:UNUSED_PRESERVE", 0xAABB00DD), ("dst_unused:UNUSED_PAD", 0)],
)
def test_sdwa_keeps_the_rest_of_its_result_unless_told(unused: str, around: int) -> None:
    found = run_lanes(
        f"v_mov_b32_sdwa v5, v10 dst_sel:BYTE_1 {unused}",
        vectors={"v5": np.full(64, 0xAABBCCDD, np.uint32), "v10": _LANES},
        read_vectors=["v5"],
    ).vectors["v5"]
    np.testing.assert_array_equal(found, np.uint32(around) | _LANES << np.uint32(8))


# Every mnemonic that the interpreter knows is tested by definition somewhere.


def test_every_mnemonic_has_a_test() -> None:
    covered: set[str] = set()
    for module in (
        test_interpreter_lanes,
        test_interpreter_matrix,
        test_interpreter_memory,
        test_interpreter_scalar,
        test_interpreter_vector,
    ):
        covered |= module.COVERED
    covered |= test_interpreter_lanes.COMPARE_COVERED | test_interpreter_vector.INTEGER_COVERED
    assert set(INSTRUCTIONS) - {"s_barrier", "s_endpgm"} == covered
