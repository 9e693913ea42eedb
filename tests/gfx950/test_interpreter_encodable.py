"""Hand-written assembly means what LLVM's assembler makes of it, and what that refuses is refused."""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest

from kernel.gfx950 import InterpreterError, UnencodableError, UnsupportedInstructionError
from kernel.gfx950.isa.decode import decode
from tests.gfx950.one_wave import assemble, run_lanes

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
