"""The replay on trips whose clocks can be worked out by hand."""

from __future__ import annotations

import pytest

from kernel.gfx950.report import timeline
from kernel.gfx950.report.timeline import Prediction, Replay, predict, replay_steps, utilisation_beside
from tests.gfx950.assembly_kernel import kernel_of

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
