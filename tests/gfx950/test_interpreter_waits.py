"""A register or LDS byte touched before the wait that covers it is an error, for every counter."""

from __future__ import annotations

import re
import struct
from dataclasses import replace

import numpy as np
import pytest

from kernel.gfx950 import (
    SCHEDULES,
    BarrierError,
    Kernel,
    Memory,
    MissingWaitError,
    RaceError,
    Schedule,
    UndefinedReadError,
)
from kernel.gfx950.parse import parse_instruction
from tests.gfx950.one_wave import launch
from tests.gfx950.scorers import HEADS
from tests.mutation.campaign import Campaign
from tests.mutation.campaigns import prefill
from tests.mutation.mutants import Mutant, mutated
from tests.mutation.prefill_launches import PrefillLaunch

START = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    v_mov_b32_e32 v9, 1
    s_waitcnt lgkmcnt(0)
"""


def run_text(body: str, lds_bytes: int = 1024) -> None:
    memory = Memory()
    source = memory.register_array(np.arange(1024, dtype=np.uint32), "source", writable=False)
    target = memory.register_array(np.zeros(1024, np.uint32), "target")
    arguments = struct.pack("<2q", source.address, target.address)
    launch(START + body, memory, arguments, lds_bytes=lds_bytes, scratch_bytes=16)


VECTOR_LOADS = {
    "global_load_dword v10, v1, s[4:5]": "vmcnt",
    "scratch_load_dword v10, off, off": "vmcnt",
    "ds_read_b32 v10, v1": "lgkmcnt",
    "ds_bpermute_b32 v10, v1, v9": "lgkmcnt",
}
SETUP = "ds_write_b32 v1, v0\nscratch_store_dword off, v0, off\ns_waitcnt vmcnt(0) lgkmcnt(0)\n"


@pytest.mark.parametrize("load", VECTOR_LOADS)
@pytest.mark.parametrize(
    "use", ["v_mov_b32_e32 v11, v10", "v_mov_b32_e32 v10, v9", "v_readfirstlane_b32 s20, v10"]
)
def test_vector_loads(load: str, use: str) -> None:
    counter = VECTOR_LOADS[load]
    other = "lgkmcnt" if counter == "vmcnt" else "vmcnt"
    run_text(f"{SETUP}{load}\ns_waitcnt {counter}(0)\n{use}")
    for wait in ("", f"s_waitcnt {counter}(1)\n", f"s_waitcnt {other}(0)\n"):
        with pytest.raises(MissingWaitError, match="v10 is touched before") as caught:
            run_text(f"{SETUP}{load}\n{wait}{use}")
        assert caught.value.text == use


@pytest.mark.parametrize(
    "use",
    [
        "global_store_dword v1, v10, s[6:7]",
        "ds_write_b32 v1, v10",
        "global_load_dword v12, v10, s[4:5]",
        "global_load_dword v10, v1, s[4:5]",
        "ds_read_b32 v10, v1",
        "v_cmp_eq_u32_e32 vcc, v10, v9",
        "v_cndmask_b32_e64 v12, v9, v10, s[20:21]",
        "v_permlane32_swap_b32_e32 v9, v10",
        "v_mov_b32_dpp v12, v10 row_mirror row_mask:0xf bank_mask:0xf",
        "v_mov_b32_dpp v10, v9 row_mirror row_mask:0xf bank_mask:0xf",
        "v_add_u32_sdwa v12, v9, v10 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_0",
        "v_writelane_b32 v10, s20, 3",
        "v_mov_b64_e32 v[12:13], v[10:11]",
        "v_mov_b64_e32 v[10:11], v[12:13]",
        "v_accvgpr_write_b32 a0, v10",
        "scratch_store_dword off, v10, off",
    ],
)
def test_every_way_to_touch_a_register(use: str) -> None:
    setup = (
        SETUP + "s_mov_b64 s[20:21], 0\nv_mov_b32_e32 v11, 0\nv_mov_b32_e32 v12, 0\nv_mov_b32_e32 v13, 0\n"
    )
    load = "v_mov_b32_e32 v8, 0\nds_read_b32 v10, v8\n"  # lane 0's number: a harmless address
    run_text(f"{setup}{load}s_waitcnt lgkmcnt(0)\n{use}")
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{setup}{load}{use}")


def test_vector_memory_finishes_in_order_and_stores_count() -> None:
    two = "global_load_dword v10, v1, s[4:5]\nglobal_load_dword v11, v1, s[4:5]\n"
    run_text(f"{two}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v10")
    with pytest.raises(MissingWaitError, match="v11"):
        run_text(f"{two}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v11")
    behind_a_store = "global_load_dword v10, v1, s[4:5]\nglobal_store_dword v1, v0, s[6:7]\n"
    run_text(f"{behind_a_store}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v10")
    before_a_store = "global_store_dword v1, v0, s[6:7]\nglobal_load_dword v10, v1, s[4:5]\n"
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{before_a_store}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v10")


def test_a_register_may_be_loaded_again_while_a_load_of_it_is_in_flight() -> None:
    """Vector memory loads write in order: the later one's wait counts, and its data stay."""
    first = "global_load_dwordx2 v[10:11], v1, s[4:5]\n"
    second = "global_load_dword v10, v1, s[4:5] offset:4\n"
    run_text(f"{first}{second}s_waitcnt vmcnt(0)\nglobal_store_dword v1, v10, s[6:7]")
    run_text(f"{first}{second}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v11")
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{first}{second}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v10")
    one_lane = f"s_mov_b64 exec, 1\n{second}s_waitcnt vmcnt(0)\ns_mov_b64 exec, -1\n"
    run_text(f"{first}{one_lane}v_add_u32_e32 v12, v10, v11")
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{SETUP}ds_read_b32 v10, v1\n{second}")
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{SETUP}{second}ds_read_b32 v10, v1")


def test_lds_operations_finish_in_order() -> None:
    body = f"{SETUP}ds_read_b32 v10, v1\nds_read_b32 v11, v1\nds_write_b32 v1, v9\ns_waitcnt lgkmcnt(1)\n"
    run_text(f"{body}v_add_u32_e32 v12, v10, v11")
    with pytest.raises(MissingWaitError, match="v11"):
        run_text(f"{body.replace('lgkmcnt(1)', 'lgkmcnt(2)')}v_add_u32_e32 v12, v10, v11")


def test_scalar_loads_return_in_any_order() -> None:
    load = "s_load_dword s20, s[4:5], 0x0\n"
    use = "s_add_u32 s21, s20, 1"
    run_text(f"{load}s_waitcnt lgkmcnt(0)\n{use}")
    for text in (
        f"{load}{use}",
        f"{load}s_mov_b32 s20, 1",
        f"{load}v_mov_b32_e32 v10, s20",
        f"{load}s_mov_b32 s21, s20",
    ):
        with pytest.raises(MissingWaitError, match="s20"):
            run_text(text)
    # one later operation is left: it may be the load
    for two in (f"{load}s_load_dword s22, s[4:5], 0x4\n", f"{SETUP}{load}ds_read_b32 v10, v1\n"):
        with pytest.raises(MissingWaitError, match="s20"):
            run_text(f"{two}s_waitcnt lgkmcnt(1)\n{use}")


def test_a_scalar_load_does_not_cover_an_lds_read_before_it() -> None:
    body = f"{SETUP}ds_read_b32 v10, v1\ns_load_dword s20, s[4:5], 0x0\n"
    run_text(f"{body}s_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v11, v10")
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{body}s_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v11, v10")


def test_waits_at_the_counters_highest_value_do_nothing() -> None:
    with pytest.raises(MissingWaitError):
        run_text("global_load_dword v10, v1, s[4:5]\ns_waitcnt vmcnt(63) lgkmcnt(15)\nv_mov_b32_e32 v11, v10")


def test_raw_wait_immediates() -> None:
    run_text(
        f"{SETUP}ds_read_b32 v10, v1\nglobal_load_dword v11, v1, s[4:5]\ns_waitcnt 0\n"
        "v_add_u32_e32 v12, v10, v11"
    )
    with pytest.raises(MissingWaitError, match="v10"):  # vmcnt(0) alone
        run_text(f"{SETUP}ds_read_b32 v10, v1\ns_waitcnt 0x0f70\nv_mov_b32_e32 v12, v10")


DMA = "s_mov_b32 m0, 0\nglobal_load_lds_dword v1, s[4:5]\n"


def test_dma_must_be_waited_for() -> None:
    run_text(f"{DMA}s_waitcnt vmcnt(0)\nds_read_b32 v10, v1")
    for use in ("ds_read_b32 v10, v1", "ds_write_b32 v1, v0", "s_waitcnt lgkmcnt(0)\nds_read_b32 v10, v1"):
        with pytest.raises(MissingWaitError, match="DMA to it is in flight"):
            run_text(DMA + use)
    run_text(f"{DMA}ds_write_b32 v1, v0 offset:256")


def test_dma_may_not_overwrite_what_an_lds_read_in_flight_reads() -> None:
    body = "ds_write_b32 v1, v0\nds_read_b32 v10, v1\n"
    run_text(f"{body}s_waitcnt lgkmcnt(0)\n{DMA}")
    with pytest.raises(MissingWaitError, match="DMA overwrites"):
        run_text(body + DMA)


def test_the_message_says_which_load() -> None:
    with pytest.raises(
        MissingWaitError, match=r"the load of line 7 .*kernel kernel, workgroup \(0, 0, 0\), wave 0"
    ):
        run_text("global_load_dword v10, v1, s[4:5]\nv_mov_b32_e32 v11, v10")


# Races on LDS and on global memory, and what orders accesses so that they are none.

RACE_START = """
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


def run_races(
    body: str, *, threads: int = 128, grid: int = 1, schedule: Schedule | None = None, same: bool = False
) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    memory = Memory()
    out = np.zeros(1024, np.uint32)
    target = memory.register_array(out, "target")
    other = memory.register_array(np.zeros(1024, np.uint32), "other")
    arguments = struct.pack("<2q", target.address, target.address if same else other.address)
    launch(
        RACE_START + body,
        memory,
        arguments,
        threads=threads,
        grid=(grid, 1, 1),
        lds_bytes=1024,
        schedule=schedule,
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
    out = run_races(EXCHANGE, schedule=schedule)
    np.testing.assert_array_equal(out[:128], np.arange(128) ^ 64)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("missing", ["s_barrier", "s_waitcnt lgkmcnt(0)\n    s_barrier"])
def test_without_the_barrier_or_the_wait_before_it_the_exchange_races(
    schedule: Schedule, missing: str
) -> None:
    body = EXCHANGE.replace(missing, "s_barrier" if "wait" in missing else "", 1)
    with pytest.raises((RaceError, UndefinedReadError)):  # the neighbour's bytes may not be written yet
        run_races(body, schedule=schedule)


@pytest.mark.parametrize("waves", ["up", "down"])
def test_kinds_of_lds_races(waves: str) -> None:
    schedule = Schedule(waves="up" if waves == "up" else "down")
    with pytest.raises(RaceError, match=r"writes what wave \d wrote"):
        run_races("ds_write_b32 v1, v1", schedule=schedule)
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
        run_races(read_then_write, schedule=schedule)


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
    run_races(body.format(wait="s_waitcnt lgkmcnt(0)"))
    with pytest.raises(RaceError, match="read since the last barrier"):
        run_races(body.format(wait=""))


def test_reading_the_same_bytes_is_no_race() -> None:
    run_races(
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
    run_races(body.format(before="s_waitcnt vmcnt(0)", behind=""))
    for schedule in SCHEDULES:
        with pytest.raises((RaceError, MissingWaitError)):
            run_races(body.format(before="", behind="s_waitcnt vmcnt(0)"), schedule=schedule)


@pytest.mark.parametrize("grid", [1, 2])
def test_two_waves_may_not_store_to_one_byte(grid: int) -> None:
    address = "v1" if grid == 1 else "v2"
    with pytest.raises(RaceError, match="race on byte 0 of 'target'"):
        run_races(f"global_store_dword {address}, {address}, s[4:5]", grid=grid)
    run_races(
        "v_lshlrev_b32_e32 v4, 9, v0\ns_lshl_b32 s21, s2, 9\nv_add_u32_e32 v2, s21, v2\n"
        "global_store_dword v2, v0, s[4:5]",
        grid=grid,
    )


def test_bytes_beside_each_other_are_no_race() -> None:
    run_races("global_store_byte v0, v0, s[4:5]")
    with pytest.raises(RaceError, match="byte 0"):
        run_races(
            "v_lshrrev_b32_e32 v4, 6, v0\nv_mul_u32_u24_e32 v4, 0, v4\nglobal_store_byte v4, v4, s[4:5]"
        )


GLOBAL_EXCHANGE = """
    global_store_dword v2, v0, s[4:5]
    {wait}
    s_barrier
    global_load_dword v4, v3, s[4:5]
    s_waitcnt vmcnt(0)
"""


def test_a_barrier_orders_waves_of_one_workgroup_once_the_store_is_over() -> None:
    run_races(GLOBAL_EXCHANGE.format(wait="s_waitcnt vmcnt(0)"))
    for body in (GLOBAL_EXCHANGE.format(wait=""), GLOBAL_EXCHANGE.format(wait="").replace("s_barrier", "")):
        with pytest.raises(RaceError, match="unordered"):
            run_races(body)


def test_nothing_orders_two_workgroups() -> None:
    body = "s_cmp_eq_u32 s2, 0\ns_cbranch_scc0 .LBB0_1\nglobal_store_dword v2, v0, s[4:5]\ns_endpgm\n"
    body += ".LBB0_1:\nglobal_load_dword v4, v2, s[4:5]"
    with pytest.raises(RaceError, match="workgroup 0 wave 0 writes it at line 13, workgroup 1 wave 0 reads"):
        run_races(body, grid=2)


def test_scalar_loads_do_not_see_stores_of_the_launch() -> None:
    body = "global_store_dword v2, v0, s[4:5]\ns_waitcnt vmcnt(0)\ns_barrier\ns_load_dword s21, s[4:5], 0x0"
    with pytest.raises(RaceError, match="scalar load"):
        run_races(body, threads=64)


def test_waves_that_end_while_others_wait() -> None:
    with pytest.raises(BarrierError, match=r"waves \[0\] have ended"):
        run_races("s_cmp_eq_u32 s20, 0\ns_cbranch_scc1 .LBB0_1\ns_barrier\n.LBB0_1:")


# Waves in any order: the prefill scorer writes the same bytes, and a race in it is seen.

ORDERS = (
    *SCHEDULES,
    *(Schedule(waves="mixed", workgroups="mixed", seed=seed) for seed in (3, 4)),
)


@pytest.mark.parametrize("case", ["unaligned", "aligned", "forced", "decode"])
@pytest.mark.parametrize("heads", HEADS)
def test_every_order_of_waves_writes_the_same_bytes(heads: int, case: str) -> None:
    """Each order gives the oracle's bits, in cells that a launch owns and in none else."""
    found = prefill(heads)
    launches = [launch for launch in found.launches if launch.case.name == case]
    for at, schedule in enumerate(ORDERS):
        launches[at % len(launches)].under(schedule).run(found.kernel)


@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(turn, marks=pytest.mark.nightly) for turn in range(1, len(SCHEDULES)))]
)
def test_without_a_barrier_some_launch_races(turn: int) -> None:
    """Each barrier of the kernel, orders of waves in turn: nothing of the others hides that it is missing."""
    found = prefill(4)
    barriers = [at for at, one in enumerate(found.kernel.instructions) if one.mnemonic == "s_barrier"]
    assert len(barriers) > 2
    for number, at in enumerate(barriers, turn):
        schedule = SCHEDULES[number % len(SCHEDULES)]
        kernel = mutated(found.kernel, Mutant("deleted", at, "s_nop 0"))
        with pytest.raises((RaceError, BarrierError, UndefinedReadError)):
            _run_all(_launches_through(found, at), kernel, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("heads", HEADS)
def test_two_waves_that_write_one_lds_byte_race(heads: int, schedule: Schedule) -> None:
    """Entry ``lane`` of the LUT instead of entry ``thread``: all waves write the same bytes."""
    found = prefill(heads)
    with pytest.raises(RaceError, match=r"LDS byte .* writes what wave . wrote"):
        found.launches[0].under(schedule).run(_with_lanes_for_threads(found.kernel))


def _run_all(launches: list[PrefillLaunch], kernel: Kernel, schedule: Schedule) -> None:
    for one in launches:
        one.under(schedule).run(kernel)


def _launches_through(found: Campaign[PrefillLaunch], at: int) -> list[PrefillLaunch]:
    """Those with the fewest instructions first."""
    pairs = sorted(zip(found.launches, found.executed, strict=True), key=lambda pair: int(pair[1].sum()))
    return [one for one, executed in pairs if executed[at]]


def _with_lanes_for_threads(kernel: Kernel) -> Kernel:
    """The kernel whose LUT writes are addressed by the lane in the wave."""
    texts = [" ".join(one.text.split()) for one in kernel.instructions]
    write = next(at for at, text in enumerate(texts) if text.startswith("ds_write_b64"))
    address = kernel.instructions[write].operands[0].text
    (lane,) = {found[1] for text in texts if (found := re.match(r"v_and_b32_e32 (v\d+), 63, v0$", text))}
    shifts = [at for at, text in enumerate(texts[:write]) if text == f"v_lshlrev_b32_e32 {address}, 3, v0"]
    text = f"v_lshlrev_b32_e32 {address}, 3, {lane}"
    instructions = list(kernel.instructions)
    instructions[shifts[-1]] = parse_instruction(text, instructions[shifts[-1]].line)
    return replace(kernel, instructions=instructions)
