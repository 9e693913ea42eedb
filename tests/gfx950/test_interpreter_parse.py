"""Reading assembly: LLVM's text, llvm-objdump's listing, and what must be refused with its line."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kernel.gfx950 import (
    AssemblySyntaxError,
    InterpreterError,
    KernelArgument,
    KernelMetadata,
    Memory,
    UnsupportedInstructionError,
    from_descriptor,
    parse_program,
    run,
)
from kernel.gfx950.isa.decode import decode
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
