"""Counts, model clocks, resources and natural loops, on kernels that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from kernel.gfx950 import Kernel, RunReport, UnsupportedInstructionError
from kernel.gfx950.report import timeline
from kernel.gfx950.report.model import (
    UnknownRateError,
    count_classes,
    dma_bytes,
    lds_lane_bytes,
    model_clocks,
    natural_loops,
    waves_per_simd,
)
from kernel.gfx950.report.prefill import ROLES, InterpretedRun, UnknownLoopsError, find_trips
from kernel.gfx950.report.timeline import Prediction, Replay, predict, replay_steps, utilisation_beside
from kernel.plan import WorkItem
from tests.gfx950.one_wave import kernel_of

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


def test_a_matrix_instruction_of_unknown_rate_is_refused() -> None:
    text = "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:13], v[16:23], 0 cbsz:2"
    with pytest.raises(UnknownRateError, match=r"line 3: .*clocks are not known"):
        model_clocks(kernel_of(text).instructions)
    with pytest.raises(UnsupportedInstructionError, match=r"line 3: .*v_mfma_f32_32x32x64_f8f6f4"):
        kernel_of("v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], 0")


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


# ---- Roles of a kernel's loops, from traces of waves whose blocks are known ----

ROLLED = """
.LBB0_3:
    s_cbranch_vccz .LBB0_5
    v_mov_b32_e32 v0, 1
    s_barrier
    s_branch .LBB0_8
.LBB0_5:
    s_cbranch_vccz .LBB0_6
    v_mov_b32_e32 v0, 2
    s_barrier
    s_branch .LBB0_8
.LBB0_6:
    s_cbranch_vccz .LBB0_7
    v_mov_b32_e32 v0, 3
    s_barrier
    s_branch .LBB0_8
.LBB0_7:
    s_barrier
.LBB0_8:
    s_cbranch_scc1 .LBB0_3
"""
ONE_OUTER_LOOP = f"""
    s_nop 0
.LBB0_1:
    s_cbranch_scc0 .LBB0_3
    s_barrier
    s_barrier
    s_barrier
    s_barrier
    s_branch .LBB0_9
{ROLLED}
.LBB0_9:
    s_cbranch_scc1 .LBB0_1
    s_endpgm
"""
"""Groups of four blocks and the rolled loop are ways through one loop."""
LOOPS_OF_THEIR_OWN = f"""
    s_nop 0
.LBB0_1:
    s_cbranch_scc0 .LBB0_3
    s_nop 1
.LBB0_2:
    s_barrier
    s_barrier
    s_barrier
    s_barrier
    s_cbranch_scc1 .LBB0_2
{ROLLED}
    s_cbranch_scc1 .LBB0_1
    s_endpgm
"""
"""They are two loops in a third one."""
ITEMS = (
    WorkItem(0, 0, 128, 768, 0, 7, 7),  # blocks 4 and 5 whole, the diagonal in block 6
    WorkItem(0, 128, 128, 264, 0, 4, 4),  # wave 0 ends at position 379: block 2 in part, block 3 later
)
BLOCKS: Mapping[int, Sequence[str]] = {
    0: ("unmasked", "whole", "whole", "diagonal"),
    1: ("whole", "whole", "unaligned", "later"),
}


def run_of(kernel: Kernel, blocks: Mapping[int, Sequence[str]] = BLOCKS) -> InterpretedRun:
    """A run in which wave 0 of each workgroup makes these trips."""
    labels = kernel.labels
    rolled, latch = labels[".LBB0_3"], labels[".LBB0_8"]
    inside = {"whole": ".LBB0_5", "diagonal": ".LBB0_6", "unaligned": ".LBB0_7"}
    ways: dict[str, list[int]] = {}
    behind: list[int] = []
    for role, following in inside.items():
        first = labels[following] - 4
        ways[role] = [*behind, *range(first, first + 4), latch]
        behind.append(first)
    ways["later"] = [*behind, latch - 1, latch]
    outer = labels[".LBB0_1"]
    plain = labels.get(".LBB0_2")
    traces = {}
    for workgroup, roles in blocks.items():
        trace = [0, outer]
        for role in roles:
            if role != "unmasked":
                trace += ways[role]
            elif plain is None:
                trace += [*range(outer + 1, outer + 6), labels[".LBB0_9"], outer]
            else:
                trace += [plain - 1, *range(plain, plain + 5)]
        traces[workgroup, 0] = np.array([*trace, len(kernel.instructions) - 1], np.int32)
    assert rolled == ways["whole"][0]
    counts = np.zeros(len(kernel.instructions), np.int64)
    return InterpretedRun(RunReport(kernel, counts, 2, 2, None, traces), ITEMS, 4)


@pytest.mark.parametrize("body", [ONE_OUTER_LOOP, LOOPS_OF_THEIR_OWN])
def test_every_role_is_found(body: str) -> None:
    kernel = kernel_of(body)
    trips = {trip.role: trip for trip in find_trips(run_of(kernel))}
    assert tuple(trips) == ROLES
    assert [trip.blocks for trip in trips.values()] == [4, 1, 1, 1, 1]
    assert [trip.seen for trip in trips.values()] == [1, 4, 1, 1, 1]
    barriers = [
        sum(instruction.mnemonic == "s_barrier" for instruction in trip.instructions(kernel))
        for trip in trips.values()
    ]
    assert barriers == [4, 1, 1, 1, 1]
    made = [
        [i.operands[1].number for i in trips[role].instructions(kernel) if i.mnemonic == "v_mov_b32"]
        for role in ("whole", "diagonal", "unaligned", "later")
    ]
    assert made == [[1], [2], [3], []]
    assert all(trip.path[-1] == kernel.labels[".LBB0_8"] for trip in list(trips.values())[1:])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({**BLOCKS, 1: ("whole", "whole", "unaligned")}, "passed 3 blocks, not 4"),
        ({**BLOCKS, 0: ("unmasked", "whole", "whole", "whole")}, "one path is both whole and diagonal"),
        ({0: BLOCKS[0]}, "no wave took a trip of role unaligned"),
        ({**BLOCKS, 1: ("unmasked",)}, "scored 4 blocks from block 0"),
    ],
)
def test_what_does_not_fit_is_an_error(blocks: Mapping[int, Sequence[str]], message: str) -> None:
    with pytest.raises(UnknownLoopsError, match=message):
        find_trips(run_of(kernel_of(LOOPS_OF_THEIR_OWN), blocks))


# ---- The replay on trips whose clocks can be worked out by hand ----

CLOSE = 0.03
"""Relative; phases and the loop's ends leave a few clocks."""


def mfma(at: int) -> str:
    return f"v_mfma_f32_16x16x128_f8f6f4 v[{4 * at}:{4 * at + 3}], v[200:207], v[208:215], 0\n"


def predicted(body: str, extra_passes: float = 0) -> Prediction:
    kernel = kernel_of(body)
    lines = {i.line: extra_passes for i in kernel.instructions if i.mnemonic.startswith("ds_")}
    return predict(kernel, range(len(kernel.instructions)), lines)


def test_independent_mfmas_keep_the_matrix_pipe_busy() -> None:
    found = predicted("".join(mfma(at) for at in range(16)))
    assert found.utilisation > 0.99
    assert found.clocks == pytest.approx(2 * 16 * 32, rel=CLOSE)  # two waves share the pipe


def test_vector_instructions_hide_under_mfmas() -> None:
    """7 vector slots lie under an MFMA of its own wave, and 3 are needed."""
    found = predicted("".join(mfma(at) + "v_mov_b32_e32 v100, v101\n" * 3 for at in range(8)))
    assert found.utilisation > 0.98


def test_more_vector_instructions_than_slots_bound_the_loop() -> None:
    """An MFMA takes an issue slot too: 20 + 1 of 4 clocks for each of two waves."""
    found = predicted("".join(mfma(at) + "v_mov_b32_e32 v100, v101\n" * 20 for at in range(8)))
    assert found.utilisation == pytest.approx(32 / (4 * 21), rel=CLOSE)


def test_a_result_is_waited_for() -> None:
    """A wave alone: 32 + 16 clocks to the result, 4 to use it."""
    body = (mfma(0) + "v_max_f32_e32 v100, v0, v1\n") * 8
    kernel = kernel_of(body)
    steps = replay_steps(kernel, range(len(kernel.instructions)), {})
    alone = Replay((steps, steps), 0.0, 2, 5)
    alone.waves = alone.waves[:1]
    alone.run()
    assert alone.periods() == [8 * 52]
    assert alone.stall_clocks()["MFMA result"] == pytest.approx(8 * 44, rel=CLOSE)


def test_nops_take_their_own_wave_only() -> None:
    """A trip of 32 MFMA clocks and 256 of nops: two waves fill it twice."""
    found = predicted(mfma(0) + "s_nop 15\n" * 4)
    assert found.utilisation == pytest.approx(2 * 32 / 260, rel=CLOSE)


def test_lds_serves_all_simds_at_128_bytes_a_clock() -> None:
    """8 waves x 16 reads of 1,024 bytes bound a trip at 1,024 clocks; conflicts add 2 clocks a pass."""
    body = mfma(0) + "ds_read_b128 v[100:103], v110\n" * 16 + "s_waitcnt lgkmcnt(8)\n"
    assert predicted(body).clocks == pytest.approx(8 * 16 * 8, rel=CLOSE)
    assert predicted(body, extra_passes=4).clocks == pytest.approx(8 * 16 * (8 + 8), rel=CLOSE)


@pytest.mark.parametrize(
    ("access", "counter", "latency", "reason"),
    [
        ("buffer_load_dword v100, v101, s[0:3], 0 offen", "vmcnt", timeline.MEMORY_CLOCKS, "memory"),
        ("s_load_dword s4, s[0:1], 0x0", "lgkmcnt", timeline.SCALAR_LOAD_CLOCKS, "scalar load"),
    ],
)
def test_a_wait_lasts_as_long_as_the_access(access: str, counter: str, latency: int, reason: str) -> None:
    found = predicted(f"{mfma(0)}{access}\ns_waitcnt {counter}(0)\n")
    assert found.clocks == pytest.approx(4 + latency + 4, rel=CLOSE)
    assert found.stalls[reason] == pytest.approx(latency - 4, rel=CLOSE)


def test_a_wait_for_all_but_the_newest_does_not_wait_for_it() -> None:
    """vmcnt(1) waits for the load of the trip before: two trips in the time of a load."""
    found = predicted(f"{mfma(0)}buffer_load_dword v100, v101, s[0:3], 0 offen\ns_waitcnt vmcnt(1)\n")
    assert found.clocks == pytest.approx(timeline.MEMORY_CLOCKS / 2, rel=0.2)
    found = predicted(f"{mfma(0)}buffer_load_dword v100, v101, s[0:3], 0 offen\ns_waitcnt vmcnt(3)\n")
    assert found.clocks == pytest.approx(timeline.MEMORY_CLOCKS / 4, rel=0.2)


def test_a_barrier_waits_for_the_last_wave() -> None:
    found = predicted(mfma(0) + "s_nop 15\n" * 4 + "s_barrier\n")
    assert found.clocks == pytest.approx(4 + 256 + timeline.BARRIER_CLOCKS, rel=CLOSE)
    steps = replay_steps(kernel_of("s_barrier\n"), range(1), {})
    alone = Replay((steps, steps), 0.0, 2, 5)
    alone.waves[2].time = 500.0  # a straggler of the first workgroup
    alone.run()
    second_trips = [wave.marks[1] for wave in alone.waves[:4]]
    assert second_trips == [500 + 4 + timeline.BARRIER_CLOCKS + 4] * 4
    assert all(wave.marks[0] < 500 for wave in alone.waves[4:])


def test_a_trip_without_mfmas_has_no_utilisation() -> None:
    found = predicted("v_mov_b32_e32 v100, v101\n" * 10)
    assert (found.utilisation, found.lowest, found.highest) == (0, 0, 0)
    assert found.clocks == pytest.approx(80, rel=CLOSE)


def test_two_workgroups_on_different_paths() -> None:
    """Sixteen MFMAs in a row fill the gaps of a workgroup that has none."""
    kernel = kernel_of("".join(mfma(at) for at in range(16)) + "v_mov_b32_e32 v100, v101\n" * 16)
    found = utilisation_beside(kernel, range(16, 32), range(16), {})
    assert found == pytest.approx(16 * 32 / (16 * 32), rel=CLOSE)
    assert utilisation_beside(kernel, range(16, 32), range(16, 32), {}) == 0
