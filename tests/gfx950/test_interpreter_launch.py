"""Launches: what registers hold at the start, grids and blocks, schedules, limits, counts."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from kernel.gfx950 import (
    BarrierError,
    InstructionLimitError,
    KernelMetadata,
    Memory,
    OutOfBoundsError,
    RunOptions,
    Schedule,
    UnsupportedInstructionError,
    parse_program,
    run,
)
from tests.gfx950.one_wave import assemble, launch

IDS = """
    s_load_dwordx2 s[8:9], s[0:1], 0x0
    v_and_b32_e32 v1, 0x3ff, v0
    v_bfe_u32 v2, v0, 10, 10
    v_bfe_u32 v3, v0, 20, 10
    v_mul_u32_u24_e32 v4, 3, v2
    v_mul_u32_u24_e32 v5, 15, v3
    v_add3_u32 v4, v4, v5, v1
    s_mul_i32 s10, s4, 3
    s_add_u32 s10, s10, s3
    s_mul_i32 s10, s10, 2
    s_add_u32 s10, s10, s2
    s_mulk_i32 s10, 0x7800
    v_lshlrev_b32_e32 v4, 3, v4
    v_mov_b32_e32 v6, v0
    v_mov_b32_e32 v7, s10
    v_add_u32_e32 v4, s10, v4
    s_waitcnt lgkmcnt(0)
    global_store_dwordx2 v4, v[6:7], s[8:9]
"""


@pytest.mark.parametrize("order", ["up", "down", "mixed"])
def test_grids_and_blocks_of_three_dimensions(order: str) -> None:
    block, grid = (3, 5, 7), (2, 3, 4)
    program = assemble(IDS, kernarg_bytes=8, workgroup_id=(True, True, True), workitem_id_dimensions=3)
    memory = Memory()
    out = np.zeros((24, 0x7800 // 8, 2), np.uint32)
    region = memory.register_array(out, "ids", initialised=False)
    schedule = {
        "up": Schedule(),
        "down": Schedule("down", "down"),
        "mixed": Schedule("mixed", "mixed", seed=3),
    }[order]
    arguments = struct.pack("<q", region.address)
    report = run(
        program, "kernel", grid=grid, block=block, kernargs=arguments, memory=memory, schedule=schedule
    )
    assert (report.workgroups, report.waves) == (24, 48)
    for group in range(24):
        for thread in range(105):
            x, y, z = thread % 3, thread // 3 % 5, thread // 15
            assert out[group, thread].tolist() == [x | y << 10 | z << 20, 0x7800 * group]
    assert region.unwritten().size == 24 * (0x7800 - 105 * 8)


def test_one_dimension_of_thread_and_workgroup_numbers() -> None:
    memory = Memory()
    out = np.full((2, 128), 9999, np.uint32)
    region = memory.register_array(out, "out")
    launch(
        "s_load_dwordx2 s[8:9], s[0:1], 0x0\ns_lshl_b32 s3, s2, 9\nv_lshlrev_b32_e32 v1, 2, v0\n"
        "v_add_u32_e32 v1, s3, v1\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v0, s[8:9]",
        memory,
        struct.pack("<q", region.address),
        threads=100,
        grid=(2, 1, 1),
    )
    for row in out:
        assert row.tolist() == [*range(100), *[9999] * 28]


def test_preloaded_arguments() -> None:
    text = "kernel:\nv_lshlrev_b32_e32 v1, 2, v0\nv_mov_b32_e32 v2, s4\n"
    text += "global_store_dword v1, v2, s[2:3]\ns_endpgm"
    known = KernelMetadata(name="kernel", kernarg_bytes=16, user_sgprs=5, kernarg_preload_dwords=3)
    memory = Memory()
    out = np.zeros(64, np.uint32)
    region = memory.register_array(out, "out")
    arguments = struct.pack("<qii", region.address, 77, 0)
    launch_ = {"grid": (1, 1, 1), "block": (64, 1, 1)}
    run(parse_program(text, {"kernel": known}), "kernel", kernargs=arguments, memory=memory, **launch_)  # type: ignore[arg-type]
    assert set(out.tolist()) == {77}
    more = replace(known, user_sgprs=6)
    with pytest.raises(UnsupportedInstructionError, match="6 user scalar registers"):
        run(parse_program(text, {"kernel": more}), "kernel", kernargs=arguments, memory=memory, **launch_)  # type: ignore[arg-type]


def test_arguments_that_are_no_launch() -> None:
    program, memory = assemble("s_nop 0"), Memory()
    good = bytes(16)
    with pytest.raises(ValueError, match="the program holds kernel"):
        run(program, "other", grid=(1, 1, 1), block=(64, 1, 1), kernargs=good, memory=memory)
    with pytest.raises(ValueError, match="grid"):
        run(program, "kernel", grid=(0, 1, 1), block=(64, 1, 1), kernargs=good, memory=memory)
    with pytest.raises(ValueError, match="block"):
        run(program, "kernel", grid=(1, 1, 1), block=(64, 32, 1), kernargs=good, memory=memory)
    with pytest.raises(ValueError, match="16"):
        run(program, "kernel", grid=(1, 1, 1), block=(64, 1, 1), kernargs=bytes(8), memory=memory)
    with pytest.raises(ValueError, match="no metadata"):
        run(
            parse_program("k:\ns_endpgm"), "k", grid=(1, 1, 1), block=(64, 1, 1), kernargs=good, memory=memory
        )
    options = RunOptions(dynamic_lds_bytes=200_000)
    with pytest.raises(OutOfBoundsError, match="163840"):
        run(
            program, "kernel", grid=(1, 1, 1), block=(64, 1, 1), kernargs=good, memory=memory, options=options
        )
    assert memory.regions == ()


def test_an_endless_loop_ends() -> None:
    options = RunOptions(wave_instruction_limit=1000)
    with pytest.raises(InstructionLimitError, match="1000 instructions") as caught:
        launch(".LBB0_1:\ns_branch .LBB0_1", Memory(), bytes(16), options=options)
    assert caught.value.line == 3


@pytest.mark.timeout(20)
def test_an_endless_loop_with_a_barrier_ends() -> None:
    """Each trip ends the count of instructions between barriers."""
    endless = ".LBB0_1:\ns_barrier\ns_branch .LBB0_1"
    with pytest.raises(InstructionLimitError, match="more than 50 barriers"):
        launch(endless, Memory(), bytes(16), options=RunOptions(barrier_limit=50))


@pytest.mark.parametrize("limit", [2, 3])
def test_as_many_barriers_as_allowed_may_pass(limit: int) -> None:
    with nullcontext() if limit == 3 else pytest.raises(InstructionLimitError):
        launch("s_barrier\n" * 3, Memory(), bytes(16), options=RunOptions(barrier_limit=limit))


def test_running_past_the_end() -> None:
    program = parse_program("k:\n s_nop 0\n", {"k": KernelMetadata(name="k")})
    with pytest.raises(BarrierError, match="past the last instruction"):
        run(program, "k", grid=(1, 1, 1), block=(64, 1, 1), kernargs=b"", memory=Memory())


COUNTED = """
    v_lshlrev_b32_e32 v1, 8, v0
    v_lshlrev_b32_e32 v2, 2, v0
    s_mov_b32 s6, 4
.LBB0_1:
    ds_write_b32 v1, v0
    ds_write_b32 v2, v0
    s_waitcnt lgkmcnt(0)
    s_sub_i32 s6, s6, 1
    s_cmp_lg_u32 s6, 0
    s_cbranch_scc1 .LBB0_1
    s_barrier
"""


def test_counts_conflicts_and_traces() -> None:
    options = RunOptions(bank_conflicts=True, trace=True)
    report = launch(COUNTED, Memory(), bytes(16), grid=(2, 1, 1), lds_bytes=0x4000, options=options)
    assert report.instructions == 2 * (3 + 4 * 6 + 2)
    assert report.by_class() == {
        "valu": 4, "salu": 2 + 16 + 2, "lds_write": 16, "wait": 8, "branch": 8, "barrier": 2,
    }  # fmt: skip
    assert report.by_mnemonic()["ds_write_b32"] == 16
    # 64 lanes in one bank against 64 lanes in 64 banks
    assert report.bank_conflicts == {7: (8, 8 * 63), 8: (8, 0)}
    assert set(report.traces) == {(0, 0), (1, 0)}
    assert report.traces[1, 0].tolist() == [0, 1, 2, *[3, 4, 5, 6, 7, 8] * 4, 9, 10]


@pytest.mark.parametrize(
    ("width", "shift", "wanted"),
    [
        ("b32", 2, 0),
        ("b32", 3, 1),
        ("b64", 3, 0),
        ("b64", 8, 62),
        ("b128", 4, 0),
        ("b128", 5, 4),
        ("b128", 8, 60),
    ],
)
def test_bank_conflicts_by_width(width: str, shift: int, wanted: int) -> None:
    data = {"b32": "v4", "b64": "v[4:5]", "b128": "v[4:7]"}[width]
    setup = "\n".join(f"v_mov_b32_e32 v{at}, 0" for at in range(4, 8))
    body = f"{setup}\nv_lshlrev_b32_e32 v1, {shift}, v0\nds_write_{width} v1, {data}"
    options = RunOptions(bank_conflicts=True)
    report = launch(body, Memory(), bytes(16), lds_bytes=64 << shift, options=options)
    assert report.bank_conflicts == {7: (1, wanted)}


def test_memory_is_left_as_it_was() -> None:
    memory = Memory()
    region = memory.register_array(np.zeros(4, np.uint32), "four")
    launch("s_nop 0", memory, bytes(16))
    assert memory.regions == (region,)
