"""Races on LDS and on global memory, and what orders accesses so that they are none."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kernel.gfx950 import (
    SCHEDULES,
    BarrierError,
    Memory,
    MissingWaitError,
    RaceError,
    Schedule,
    UndefinedReadError,
)
from tests.gfx950.one_wave import launch

START = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_readfirstlane_b32 s20, v0
    s_lshr_b32 s20, s20, 6
    v_and_b32_e32 v1, 63, v0
    v_lshlrev_b32_e32 v1, 2, v1
    v_lshlrev_b32_e32 v2, 2, v0
    v_xor_b32_e32 v3, 0x100, v2
    s_waitcnt lgkmcnt(0)
"""
"""s20 the wave, v1 the same 64 dwords for every wave, v2 its own, v3 those of the neighbour."""


def run_text(
    body: str, *, threads: int = 128, grid: int = 1, schedule: Schedule | None = None, same: bool = False
) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    memory = Memory()
    out = np.zeros(1024, np.uint32)
    target = memory.register_array(out, "target")
    other = memory.register_array(np.zeros(1024, np.uint32), "other")
    arguments = struct.pack("<2q", target.address, target.address if same else other.address)
    launch(
        START + body, memory, arguments, threads=threads, grid=(grid, 1, 1), lds_bytes=1024, schedule=schedule
    )
    return out


EXCHANGE = """
    ds_write_b32 v2, v0
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v4, v3
    s_waitcnt lgkmcnt(0)
    global_store_dword v2, v4, s[4:5]
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_ordered_exchange_is_the_same_under_every_schedule(schedule: Schedule) -> None:
    out = run_text(EXCHANGE, schedule=schedule)
    np.testing.assert_array_equal(out[:128], np.arange(128) ^ 64)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("missing", ["s_barrier", "s_waitcnt lgkmcnt(0)\n    s_barrier"])
def test_without_the_barrier_or_the_wait_before_it_the_exchange_races(
    schedule: Schedule, missing: str
) -> None:
    body = EXCHANGE.replace(missing, "s_barrier" if "wait" in missing else "", 1)
    with pytest.raises((RaceError, UndefinedReadError)):  # the neighbour's bytes may not be written yet
        run_text(body, schedule=schedule)


@pytest.mark.parametrize("waves", ["up", "down"])
def test_kinds_of_lds_races(waves: str) -> None:
    schedule = Schedule(waves="up" if waves == "up" else "down")
    with pytest.raises(RaceError, match=r"writes what wave \d wrote"):
        run_text("ds_write_b32 v1, v1", schedule=schedule)
    read_then_write = """
        ds_write_b32 v2, v0
        s_waitcnt lgkmcnt(0)
        s_barrier
        ds_read_b32 v4, v1
        s_cmp_eq_u32 s20, 0
        s_cbranch_scc1 .LBB0_1
        ds_write_b32 v1, v0
    .LBB0_1:
    """
    with pytest.raises(RaceError, match=r"1 writes what wave 0 read|0 reads what wave 1 wrote"):
        run_text(read_then_write, schedule=schedule)


def test_a_read_in_flight_across_a_barrier_races_with_a_write_behind_it() -> None:
    body = """
        ds_write_b32 v2, v0
        s_waitcnt lgkmcnt(0)
        s_barrier
        ds_read_b32 v4, v3
        {wait}
        s_barrier
        ds_write_b32 v2, v0
    """
    run_text(body.format(wait="s_waitcnt lgkmcnt(0)"))
    with pytest.raises(RaceError, match="read since the last barrier"):
        run_text(body.format(wait=""))


def test_reading_the_same_bytes_is_no_race() -> None:
    run_text(
        "v_mov_b32_e32 v4, 0\ns_cmp_lg_u32 s20, 0\ns_cbranch_scc1 .LBB0_1\nds_write_b32 v1, v0\n.LBB0_1:\n"
        "s_waitcnt lgkmcnt(0)\ns_barrier\nds_read_b32 v5, v1\nds_read_b32 v6, v4\ns_waitcnt lgkmcnt(0)"
    )


def test_dma_needs_its_wait_before_the_barrier() -> None:
    body = """
        s_lshl_b32 m0, s20, 8
        global_load_lds_dword v2, s[4:5]
        {before}
        s_barrier
        {behind}
        ds_read_b32 v4, v3
        s_waitcnt vmcnt(0) lgkmcnt(0)
    """
    run_text(body.format(before="s_waitcnt vmcnt(0)", behind=""))
    for schedule in SCHEDULES:
        with pytest.raises((RaceError, MissingWaitError)):
            run_text(body.format(before="", behind="s_waitcnt vmcnt(0)"), schedule=schedule)


@pytest.mark.parametrize("grid", [1, 2])
def test_two_waves_may_not_store_to_one_byte(grid: int) -> None:
    address = "v1" if grid == 1 else "v2"
    with pytest.raises(RaceError, match="race on byte 0 of 'target'"):
        run_text(f"global_store_dword {address}, {address}, s[4:5]", grid=grid)
    run_text(
        "v_lshlrev_b32_e32 v4, 9, v0\ns_lshl_b32 s21, s2, 9\nv_add_u32_e32 v2, s21, v2\n"
        "global_store_dword v2, v0, s[4:5]",
        grid=grid,
    )


def test_bytes_beside_each_other_are_no_race() -> None:
    run_text("global_store_byte v0, v0, s[4:5]")
    with pytest.raises(RaceError, match="byte 0"):
        run_text("v_lshrrev_b32_e32 v4, 6, v0\nv_mul_u32_u24_e32 v4, 0, v4\nglobal_store_byte v4, v4, s[4:5]")


GLOBAL_EXCHANGE = """
    global_store_dword v2, v0, s[4:5]
    {wait}
    s_barrier
    global_load_dword v4, v3, s[4:5]
    s_waitcnt vmcnt(0)
"""


def test_a_barrier_orders_waves_of_one_workgroup_once_the_store_is_over() -> None:
    run_text(GLOBAL_EXCHANGE.format(wait="s_waitcnt vmcnt(0)"))
    for body in (GLOBAL_EXCHANGE.format(wait=""), GLOBAL_EXCHANGE.format(wait="").replace("s_barrier", "")):
        with pytest.raises(RaceError, match="unordered"):
            run_text(body)


def test_nothing_orders_two_workgroups() -> None:
    body = "s_cmp_eq_u32 s2, 0\ns_cbranch_scc0 .LBB0_1\nglobal_store_dword v2, v0, s[4:5]\ns_endpgm\n"
    body += ".LBB0_1:\nglobal_load_dword v4, v2, s[4:5]"
    with pytest.raises(RaceError, match="workgroup 0 wave 0 writes it at line 13, workgroup 1 wave 0 reads"):
        run_text(body, grid=2)


def test_scalar_loads_do_not_see_stores_of_the_launch() -> None:
    body = "global_store_dword v2, v0, s[4:5]\ns_waitcnt vmcnt(0)\ns_barrier\ns_load_dword s21, s[4:5], 0x0"
    with pytest.raises(RaceError, match="scalar load"):
        run_text(body, threads=64)


def test_waves_that_end_while_others_wait() -> None:
    with pytest.raises(BarrierError, match=r"waves \[0\] have ended"):
        run_text("s_cmp_eq_u32 s20, 0\ns_cbranch_scc1 .LBB0_1\ns_barrier\n.LBB0_1:")
