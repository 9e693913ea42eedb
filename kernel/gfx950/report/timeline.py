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

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kernel.gfx950.hazards import Register, register_use
from kernel.gfx950.isa import row_of
from kernel.gfx950.program import Instruction, Kernel
from kernel.gfx950.report.model import (
    LANES,
    LDS_BYTES_PER_CLOCK,
    LDS_PASS_CLOCKS,
    SIMDS,
    lds_lane_bytes,
    mfma_clocks,
)

ISSUE_CLOCKS = 4
TAKEN_BRANCH_CLOCKS = 16
MFMA_RESULT_CLOCKS = 16
LDS_LATENCY_CLOCKS = 96
MEMORY_CLOCKS = 1500
SCALAR_LOAD_CLOCKS = 400
BARRIER_CLOCKS = 32
WORKGROUPS = 2
_NO_WAIT = 1 << 30
"""What a counter never exceeds."""
_VECTOR, _SCALAR, _LDS, _MEMORY = range(4)
_ISSUERS = {
    "valu": _VECTOR, "mfma": _VECTOR, "salu": _SCALAR, "smem": _SCALAR, "branch": _SCALAR,
    "lds_read": _LDS, "lds_write": _LDS, "vmem_load": _MEMORY, "vmem_store": _MEMORY,
}  # fmt: skip


@dataclass(eq=False, slots=True)
class Step:
    """An instruction of a trip."""

    kind: str
    issuer: int
    """Which of a SIMD's issuers it needs; -1 for none."""
    results: tuple[Register, ...]
    """Registers that it touches and that some MFMA of the path writes; one for those of the same MFMAs."""
    writes: tuple[Register, ...]
    """Of an MFMA."""
    own_clocks: float
    """Until the wave's next instruction may issue."""
    pipe_clocks: float = 0
    """Of the matrix pipe or of the LDS."""
    vmcnt: int = _NO_WAIT
    lgkmcnt: int = _NO_WAIT


@dataclass(eq=False, slots=True)
class _Wave:
    steps: Sequence[Step]
    simd: int
    group: int
    time: float
    number: int = 0
    at: int = 0
    ready: dict[Register, float] = field(default_factory=dict)
    lds_done: deque[tuple[float, str]] = field(default_factory=deque)
    """Clock and kind of what ``lgkmcnt`` counts, in the order of issue."""
    memory_done: deque[tuple[float, str]] = field(default_factory=deque)
    marks: list[float] = field(default_factory=list)
    """Clock at the end of each trip."""
    stalls: list[dict[str, float]] = field(default_factory=lambda: [{}])
    """Clocks waited in each trip, by what for."""
    waiting: bool = False
    start: float = 0
    reason: str = ""

    def stall(self, reason: str, clocks: float) -> None:
        self.stalls[-1][reason] = self.stalls[-1].get(reason, 0.0) + clocks


def replay_steps(kernel: Kernel, path: Sequence[int], extra_passes: Mapping[int, float]) -> list[Step]:
    """A trip as the replay needs it; see :func:`kernel.gfx950.report.timeline.predict`."""
    instructions = [kernel.instructions[index] for index in path]
    writers: dict[Register, list[int]] = {}
    for at, instruction in enumerate(instructions):
        if row_of(instruction).kind == "mfma":
            for register in register_use(instruction).writes:
                writers.setdefault(register, []).append(at)
    first: dict[tuple[int, ...], Register] = {}
    results = {register: first.setdefault(tuple(at), register) for register, at in writers.items()}
    jumps = [following != index + 1 for index, following in zip(path, [*path[1:], path[0]])]
    return [_step(i, jump, results, extra_passes) for i, jump in zip(instructions, jumps)]


def _step(
    instruction: Instruction,
    jumps: bool,
    results: Mapping[Register, Register],
    extra_passes: Mapping[int, float],
) -> Step:
    kind = row_of(instruction).kind
    own, pipe = float(ISSUE_CLOCKS), 0.0
    vmcnt, lgkmcnt = _NO_WAIT, _NO_WAIT
    if kind == "mfma":
        pipe = mfma_clocks(instruction)
    elif kind in ("lds_read", "lds_write"):
        pipe = lds_lane_bytes(instruction) * LANES / LDS_BYTES_PER_CLOCK
        pipe += LDS_PASS_CLOCKS * extra_passes.get(instruction.line, 0.0)
    elif kind == "nop":
        own = ISSUE_CLOCKS * (int(instruction.operands[0].number) + 1)
    elif kind == "branch" and jumps:
        own += TAKEN_BRANCH_CLOCKS
    elif kind == "wait":
        vmcnt, lgkmcnt = (_count(instruction, name) for name in ("vmcnt", "lgkmcnt"))
    use = register_use(instruction)
    slow = tuple({results[register] for register in (use.reads | use.writes) & results.keys()})
    writes = tuple({results[register] for register in use.writes}) if kind == "mfma" else ()
    return Step(kind, _ISSUERS.get(kind, -1), slow, writes, own, pipe, vmcnt, lgkmcnt)


def _count(instruction: Instruction, name: str) -> int:
    value = instruction.modifiers.get(name, _NO_WAIT)
    return value if isinstance(value, int) else _NO_WAIT


class Replay:
    """One replay, which begins with nothing in flight.

    Args:
        paths: the trip that each workgroup repeats.
        offset: clocks that the second workgroup starts later.
        warm_up: trips of a wave that are not looked at.
        trips: and those that are, at least.
    """

    def __init__(
        self, paths: tuple[Sequence[Step], Sequence[Step]], offset: float, warm_up: int, trips: int
    ) -> None:
        self.warm_up, self.trips = warm_up, warm_up + trips
        self.waves = [
            _Wave(steps, simd, group, group * offset)
            for group, steps in enumerate(paths)
            for simd in range(SIMDS)
        ]
        self.turns: list[tuple[float, float, int]] = []
        """Whoever can start first has its turn; of equals the wave that has waited longest."""
        self.issuer_free = [[0.0] * len(set(_ISSUERS.values())) for _ in range(SIMDS)]
        self.matrix_free = [0.0] * SIMDS
        self.lds_free = 0.0

    def run(self) -> None:
        """Replay until every wave has made its trips; a faster one makes more."""
        waves = self.waves
        beside = [
            [other for other in waves if other.simd == wave.simd and other is not wave] for wave in waves
        ]
        self.turns = [(0.0, 0.0, 0)] * len(waves)
        for number, wave in enumerate(waves):
            wave.number = number
            self._consider(wave)
        unfinished = len(waves)
        while unfinished:
            wave = waves[min(self.turns)[2]]
            issuer = wave.steps[wave.at].issuer
            self._issue(wave)
            unfinished -= wave.at == 0 and len(wave.marks) == self.trips
            if not wave.waiting:
                self._consider(wave)
            for other in beside[wave.number]:
                if other.steps[other.at].issuer == issuer >= 0 and not other.waiting:
                    self._consider(other)

    def _consider(self, wave: _Wave) -> None:
        """When the wave's next instruction can start, and what it waits for until then."""
        step = wave.steps[wave.at]
        start, reason = wave.time, ""
        if step.kind == "wait":
            for queue, most in ((wave.memory_done, step.vmcnt), (wave.lds_done, step.lgkmcnt)):
                for done, name in itertools.islice(queue, max(len(queue) - most, 0)):
                    if done > start:
                        start, reason = done, name
        elif step.issuer >= 0:
            for register in step.results:
                ready = wave.ready.get(register, 0.0)
                if ready > start:
                    start, reason = ready, "MFMA result"
            free = self.issuer_free[wave.simd][step.issuer]
            if free > start:
                start, reason = free, "issue slot"
            if step.kind == "mfma" and self.matrix_free[wave.simd] > start:
                start, reason = self.matrix_free[wave.simd], "matrix pipe"
        wave.start, wave.reason = start, reason
        self.turns[wave.number] = (start, wave.time, wave.number)

    def _issue(self, wave: _Wave) -> None:
        step, start = wave.steps[wave.at], wave.start
        if start > wave.time:
            wave.stall(wave.reason, start - wave.time)
        wave.time = start + step.own_clocks
        if step.issuer >= 0:
            self.issuer_free[wave.simd][step.issuer] = start + ISSUE_CLOCKS
        if step.kind == "mfma":
            self.matrix_free[wave.simd] = start + step.pipe_clocks
            for register in step.writes:
                wave.ready[register] = start + step.pipe_clocks + MFMA_RESULT_CLOCKS
        elif step.issuer == _LDS:
            self.lds_free = max(self.lds_free, start) + step.pipe_clocks
            wave.lds_done.append((self.lds_free + LDS_LATENCY_CLOCKS, "LDS"))
        elif step.kind == "smem":
            wave.lds_done.append((start + SCALAR_LOAD_CLOCKS, "scalar load"))
        elif step.issuer == _MEMORY:
            wave.memory_done.append((start + MEMORY_CLOCKS, "memory"))
        elif step.kind == "wait":
            for queue, most in ((wave.memory_done, step.vmcnt), (wave.lds_done, step.lgkmcnt)):
                while len(queue) > most:
                    queue.popleft()
        wave.at += 1
        if wave.at == len(wave.steps):
            wave.at = 0
            wave.marks.append(wave.time)
            wave.stalls.append({})
        if step.kind == "barrier":
            self._arrive(wave)

    def _arrive(self, wave: _Wave) -> None:
        wave.waiting, wave.start = True, math.inf
        self.turns[wave.number] = (math.inf, wave.time, wave.number)
        group = [other for other in self.waves if other.group == wave.group]
        if not all(other.waiting for other in group):
            return
        last = max(other.time for other in group)
        for other in group:
            if last > other.time:
                other.stall("barrier", last - other.time)
            other.time, other.waiting = last + BARRIER_CLOCKS, False
            self._consider(other)

    def utilisation(self) -> float:
        """Share of the time that the matrix pipes are busy, averaged over the SIMDs."""
        shares = (
            sum(step.pipe_clocks for step in wave.steps if step.kind == "mfma") / period
            for wave, period in zip(self.waves, self.periods())
        )
        return sum(shares) / SIMDS

    def periods(self) -> list[float]:
        """Clocks of a trip of each wave, over its whole trips in the window."""
        return [
            (wave.marks[trips[-1]] - wave.marks[trips[0] - 1]) / len(trips)
            for wave, trips in zip(self.waves, self._whole_trips())
        ]

    def stall_clocks(self) -> dict[str, float]:
        """Clocks of a trip and wave, by what they were waited for."""
        totals: dict[str, float] = {}
        for wave, trips in zip(self.waves, self._whole_trips()):
            for trip in trips:
                for reason, clocks in wave.stalls[trip].items():
                    totals[reason] = totals.get(reason, 0.0) + clocks / (len(trips) * len(self.waves))
        return totals

    def _whole_trips(self) -> list[range]:
        """Of each wave the trips that begin when every wave has made its first ``warm_up`` ones."""
        warm = max(wave.marks[self.warm_up - 1] for wave in self.waves)
        first = [next(at for at, mark in enumerate(wave.marks) if mark >= warm) for wave in self.waves]
        return [range(at + 1, len(wave.marks)) for at, wave in zip(first, self.waves)]


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
