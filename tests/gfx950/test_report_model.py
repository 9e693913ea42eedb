"""Counts, model clocks, resources and natural loops, on kernels that can be worked out by hand."""

from __future__ import annotations

import pytest

from kernel.gfx950.report.model import (
    UnknownRateError,
    count_classes,
    dma_bytes,
    lds_lane_bytes,
    model_clocks,
    natural_loops,
    waves_per_simd,
)
from tests.gfx950.assembly_kernel import kernel_of

MFMA = "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:23], 0"


def test_each_pipe_is_counted_at_its_rate() -> None:
    """MFMAs take 32 clocks, vector instructions 4; 64 lanes move 40 bytes on each of 4 SIMDs, 128 a clock."""
    trip = kernel_of(
        f"""
        {MFMA}
        v_max3_f32 v30, v31, v32, v33
        {MFMA}
        v_and_b32_e32 v30, v31, v32
        v_mov_b32_e32 v30, v31
        ds_read_b128 v[40:43], v50
        ds_write_b64 v50, v[40:41]
        ds_read2_b64 v[40:43], v50 offset1:1
        s_nop 3
        s_waitcnt lgkmcnt(0)
        """
    ).instructions
    clocks = model_clocks(trip)
    assert (clocks.mfma, clocks.valu, clocks.lds) == (64, 12, 64 * 40 * 4 // 128)
    assert (clocks.bound, clocks.most, clocks.mfma_share) == ("lds", 80, 0.8)
    assert count_classes(trip) == {"mfma": 2, "valu": 3, "lds_read": 2, "lds_write": 1, "nop": 1, "wait": 1}


def test_the_matrix_pipe_bounds_where_it_has_the_most_clocks() -> None:
    clocks = model_clocks(kernel_of(f"{MFMA}\n" + "v_mov_b32_e32 v30, v31\n" * 8).instructions)
    assert (clocks.bound, clocks.mfma_share) == ("mfma", 1.0)
    clocks = model_clocks(kernel_of(f"{MFMA}\n" + "v_mov_b32_e32 v30, v31\n" * 9).instructions)
    assert (clocks.bound, clocks.mfma_share) == ("valu", 32 / 36)


@pytest.mark.parametrize(
    "text",
    [
        "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], 0",
        "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:13], v[16:23], 0 cbsz:2",
    ],
)
def test_a_matrix_instruction_of_unknown_rate_is_refused(text: str) -> None:
    with pytest.raises(UnknownRateError, match=r"line 3: .*clocks are not known"):
        model_clocks(kernel_of(text).instructions)


def test_an_lds_instruction_of_unknown_width_is_refused() -> None:
    (instruction,) = kernel_of("ds_bpermute_b32 v0, v1, v2").instructions
    with pytest.raises(UnknownRateError, match="bytes are not known"):
        lds_lane_bytes(instruction)


def test_what_a_load_writes_into_lds() -> None:
    """64 lanes of 16 or 4 bytes by DMA, nothing where registers are loaded."""
    loads = kernel_of(
        """
        buffer_load_dwordx4 v0, s[4:7], 0 offen lds
        buffer_load_dword v0, s[4:7], 0 offen lds
        buffer_load_dwordx4 v[0:3], v4, s[4:7], 0 offen
        """
    ).instructions
    assert [dma_bytes(load) for load in loads] == [1024, 256, 0]
    (unknown,) = kernel_of("buffer_load_ushort v0, s[4:7], 0 offen lds").instructions
    with pytest.raises(UnknownRateError, match="bytes are not known"):
        dma_bytes(unknown)


@pytest.mark.parametrize(
    ("vgpr", "sgpr", "lds_bytes", "workgroup_waves", "waves"),
    [
        (256, 72, 34_816, 4, 2),
        (257, 72, 34_816, 4, 1),  # granules of 8
        (168, 72, 34_816, 4, 3),
        (64, 72, 34_816, 4, 4),  # four workgroups of 35,840 B fit 160 KiB of LDS
        (64, 72, 81_920, 4, 2),
        (64, 72, 81_921, 4, 1),
        (64, 72, 0, 8, 8),
        (128, 72, 50_000, 8, 4),  # two waves of a workgroup on each SIMD
        (192, 72, 0, 8, 2),
        (32, 16, 0, 4, 8),
        (600, 16, 0, 4, 0),
    ],
)
def test_waves_that_fit_a_simd(
    vgpr: int, sgpr: int, lds_bytes: int, workgroup_waves: int, waves: int
) -> None:
    assert waves_per_simd(vgpr, sgpr, lds_bytes, workgroup_waves) == waves


NESTED = """
    s_mov_b32 s0, 0
.LBB0_1:
    s_add_i32 s0, s0, 1
.LBB0_2:
    s_add_i32 s1, s1, 1
    s_cmp_lt_i32 s1, 4
    s_cbranch_scc0 .LBB0_4
    s_barrier
    s_branch .LBB0_2
.LBB0_4:
    s_cmp_lt_i32 s0, 9
    s_cbranch_scc1 .LBB0_1
.LBB0_5:
    s_cbranch_vccnz .LBB0_5
    s_endpgm
"""


def test_natural_loops_outer_ones_first() -> None:
    loops = [(loop.header, sorted(loop.body)) for loop in natural_loops(kernel_of(NESTED))]
    assert loops == [(1, list(range(1, 9))), (2, list(range(2, 7))), (9, [9])]


def test_a_jump_back_into_the_middle_is_no_natural_loop() -> None:
    """Two ways into the cycle: neither entry dominates it."""
    kernel = kernel_of(
        """
        s_cbranch_scc1 .LBB0_2
    .LBB0_1:
        s_nop 0
    .LBB0_2:
        s_nop 0
        s_cbranch_vccnz .LBB0_1
        s_endpgm
        """
    )
    assert natural_loops(kernel) == []


def test_loops_that_share_a_header_are_one() -> None:
    kernel = kernel_of(
        """
    .LBB0_1:
        s_cbranch_scc1 .LBB0_3
        s_cbranch_vccnz .LBB0_1
        s_endpgm
    .LBB0_3:
        s_nop 0
        s_branch .LBB0_1
        """
    )
    (loop,) = natural_loops(kernel)
    assert sorted(loop.body) == [0, 1, 3, 4]
