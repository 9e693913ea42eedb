"""PREDICTION, not measurement: the waves of two workgroups on one CU, replayed in order over one path.

Each workgroup has a wave on each of the four SIMDs, and all eight waves repeat the same trip; the second
workgroup starts later, by each of five fractions of a trip. Assumed, since a CPU cannot measure any of it:

- A wave issues in order, one instruction per 4 clocks. A SIMD issues one vector instruction (VALU or MFMA)
  per 4 clocks, and likewise one scalar, one LDS, one memory instruction; of two waves that are ready the one
  that has waited longer goes first. A taken branch costs its wave 16 clocks more.
- An MFMA holds the matrix pipe 32 clocks, and its result can be read or overwritten 16 clocks after that, the
  wait states the compiler must leave. Any other vector result can be used by the next instruction. VALU
  instructions of either wave issue while the matrix pipe works, each in a slot that no MFMA can have.
- LDS serves the CU at 128 bytes a clock in the order of issue, plus 2 clocks for each extra pass that bank
  conflicts took in an interpreted run; data arrives 96 clocks after its turn.
- A load from memory takes 1,500 clocks, a scalar load 400, whatever the bandwidth; a store counts as a load.
- ``s_nop n`` takes its wave n + 1 issue slots. A barrier lets its waves go 32 clocks after the last arrives.
- Left out: what a DMA writes into LDS, instruction fetch, register-bank conflicts, address translation,
  limits of the queues, clocks that power management takes away, and that in a real launch the two workgroups
  are seldom on the same path: a block's diagonal usually meets fully visible blocks of the other workgroup,
  which would fill its gaps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernel.gfx950.parse import Kernel
from kernel.gfx950.report.replay import Replay, Step, replay_steps

PHASES = 5
"""Starts of the second workgroup that are tried, evenly over both trips' matrix clocks on a SIMD."""


@dataclass(frozen=True)
class Prediction:
    """What the replays of a trip gave, means over ``PHASES``; clocks are predicted ones.

    Attributes:
        utilisation: share of the time that the matrix pipes were busy. lowest, highest: of the phases.
        clocks: of one trip of a wave, beside a second wave on its SIMD.
        stalls: clocks of a trip that a wave waited, by what for, most first; where the other wave has the
            pipe that it waits for, nothing is lost.
    """

    utilisation: float
    lowest: float
    highest: float
    clocks: float
    stalls: dict[str, float]


def predict(kernel: Kernel, path: Sequence[int], extra_passes: Mapping[int, float]) -> Prediction:
    """Replay a trip beside itself.

    Args:
        kernel: whose instructions ``path`` indexes.
        path: one trip, which follows itself.
        extra_passes: mean extra LDS passes of an access, by assembly line.

    Raises:
        UnknownRateError: an instruction whose rate is not known.
    """
    steps = replay_steps(kernel, path, extra_passes)
    replays = _replays((steps, steps), range(PHASES), warm_up=2, trips=5)
    shares = [replay.utilisation() for replay in replays]
    stalls: dict[str, float] = {}
    for replay in replays:
        for reason, clocks in replay.stall_clocks().items():
            stalls[reason] = stalls.get(reason, 0.0) + clocks / PHASES
    return Prediction(
        statistics.fmean(shares),
        min(shares),
        max(shares),
        statistics.fmean(statistics.fmean(replay.periods()) for replay in replays),
        dict(sorted(stalls.items(), key=lambda item: -item[1])),
    )


def utilisation_beside(
    kernel: Kernel, path: Sequence[int], other: Sequence[int], extra_passes: Mapping[int, float]
) -> float:
    """Mean utilisation where one workgroup repeats ``path`` and the other one ``other``.

    Args:
        kernel, path, extra_passes: as for :func:`predict`.
        other: another trip of the kernel.
    """
    paths = (replay_steps(kernel, path, extra_passes), replay_steps(kernel, other, extra_passes))
    replays = _replays(paths, range(0, PHASES, 2), warm_up=1, trips=3)
    return statistics.fmean(replay.utilisation() for replay in replays)


def _replays(
    paths: tuple[list[Step], list[Step]], phases: range, *, warm_up: int, trips: int
) -> list[Replay]:
    matrix_clocks = sum(step.pipe_clocks for path in paths for step in path if step.kind == "mfma")
    replays = [Replay(paths, matrix_clocks * phase / PHASES, warm_up, trips) for phase in phases]
    for replay in replays:
        replay.run()
    return replays
