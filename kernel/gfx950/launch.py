"""Runs a kernel over a grid, workgroup by workgroup, its waves in turn to each barrier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kernel.float_environment import default_float_environment
from kernel.gfx950.errors import (
    BarrierError,
    InstructionLimitError,
    InterpreterError,
    OutOfBoundsError,
    UnsupportedInstructionError,
)
from kernel.gfx950.isa import lookup, row_of
from kernel.gfx950.isa.form import Form, Step, Stop
from kernel.gfx950.isa.table import check_encodable
from kernel.gfx950.memory import GlobalLog, Machine, Memory, Schedule
from kernel.gfx950.program import Instruction, Kernel, KernelMetadata, Program
from kernel.gfx950.wave import DEFINED, LANES, Lds, Wave

# ---- Decoding: each instruction becomes a step, the first time its kernel runs ----


Stretch = tuple[tuple[int, Step], ...]
"""Steps and their numbers; none where a wave stops."""


@dataclass(frozen=True)
class Decoded:
    """``steps`` in the kernel's order; ``granule`` is 4 where all its memory accesses are whole dwords,
    else 1; ``branches`` are the instructions that another may follow than the next."""

    steps: tuple[Step | Stop, ...]
    granule: int
    branches: frozenset[int]
    _stretches: dict[int, Stretch] = field(init=False, default_factory=dict)

    def stretch(self, first: int) -> Stretch:
        """What runs in one go from an instruction on: up to a branch, barrier or end."""
        known = self._stretches.get(first)
        if known is None:
            steps: list[tuple[int, Step]] = []
            for at in range(first, len(self.steps)):
                step = self.steps[at]
                if isinstance(step, Stop):
                    break
                steps.append((at, step))
                if at in self.branches:
                    break
            known = self._stretches[first] = tuple(steps)
        return known


def _branches(kernel: Kernel) -> frozenset[int]:
    return frozenset(at for at, one in enumerate(kernel.instructions) if row_of(one).kind == "branch")


_DECODED: WeakKeyDictionary[Kernel, Decoded] = WeakKeyDictionary()


def decode(kernel: Kernel) -> Decoded:
    """Raises UnsupportedInstructionError with the line of the first instruction that is not implemented."""
    known = _DECODED.get(kernel)
    if known is None:
        steps = tuple(_decode_one(kernel, index) for index in range(len(kernel.instructions)))
        narrow = any(row_of(instruction).lane_bytes in (1, 2) for instruction in kernel.instructions)
        known = _DECODED[kernel] = Decoded(steps, 1 if narrow else 4, _branches(kernel))
    return known


def decode_like(kernel: Kernel, known: Kernel) -> Decoded:
    """As ``decode``, for a kernel that differs from a ``known`` one in a few instructions: only these are
    decoded. Labels must be the same, and each instruction must stand where it did."""
    before = decode(known)
    pairs = zip(kernel.instructions, known.instructions, strict=True)
    steps = tuple(
        before.steps[index] if new is old else _decode_one(kernel, index)
        for index, (new, old) in enumerate(pairs)
    )
    decoded = _DECODED[kernel] = Decoded(steps, before.granule, _branches(kernel))
    return decoded


def decode_with(kernel: Kernel, steps: Mapping[int, Step]) -> Kernel:
    """The kernel, some of its instructions with steps of the caller's, for an analysis of a run."""
    known = decode(kernel)
    copy = replace(kernel)
    _DECODED[copy] = replace(known, steps=tuple(steps.get(at, step) for at, step in enumerate(known.steps)))
    return copy


def _decode_one(kernel: Kernel, index: int) -> Step | Stop:
    instruction = kernel.instructions[index]
    try:
        row = lookup(instruction.mnemonic)
        form = Form(instruction, kernel)
        step = row.build(form)
        form.close()
        check_encodable(instruction, row)
    except InterpreterError as error:
        raise error.locate(line=instruction.line, text=instruction.text, kernel=kernel.name) from None
    return step


# ---- Launch ----


@dataclass
class RunReport:
    """Counts of one launch, over all its waves.

    ``executed[i]`` is how often instruction i of the kernel was issued (a wave-instruction counts once).
    ``bank_conflicts`` maps an assembly line to (LDS accesses, extra passes), where they were counted.
    ``traces`` are the instruction indices each wave issued, in order, by (workgroup, wave), where they were
    kept.
    """

    kernel: Kernel
    executed: npt.NDArray[np.int64]
    workgroups: int
    waves: int
    bank_conflicts: dict[int, tuple[int, int]] | None = None
    traces: dict[tuple[int, int], npt.NDArray[np.int32]] = field(default_factory=dict)

    @property
    def instructions(self) -> int:
        """Wave-instructions issued."""
        return int(self.executed.sum())

    def by_class(self) -> dict[str, int]:
        """Wave-instructions by the class in the table of instructions."""
        return self._sum(lambda instruction: row_of(instruction).kind)

    def by_mnemonic(self) -> dict[str, int]:
        """Wave-instructions by mnemonic."""
        return self._sum(lambda instruction: instruction.mnemonic)

    def extra_passes(self) -> dict[int, float]:
        """Mean extra LDS passes of an access, by assembly line."""
        return {line: extra / accesses for line, (accesses, extra) in (self.bank_conflicts or {}).items()}

    def lds_traffic(self) -> dict[str, tuple[int, int]]:
        """LDS accesses and their extra passes, by mnemonic."""
        mnemonics = {i.line: i.mnemonic for i in self.kernel.instructions}
        found: dict[str, tuple[int, int]] = {}
        for line, (accesses, extra) in (self.bank_conflicts or {}).items():
            before = found.get(mnemonics[line], (0, 0))
            found[mnemonics[line]] = (before[0] + accesses, before[1] + extra)
        return found

    def _sum(self, key: Callable[[Instruction], str]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for instruction, executed in zip(self.kernel.instructions, self.executed.tolist(), strict=True):
            counts[key(instruction)] += executed
        return {name: count for name, count in counts.items() if count}


Dim3 = tuple[int, int, int]
_MOST_THREADS = 1024
_LDS_OF_A_CU = 160 * 1024


@dataclass(frozen=True)
class RunOptions:
    """``dynamic_lds_bytes`` are added to the kernel's own. ``bank_conflicts`` counts them, ``trace`` keeps
    each wave's path; ``wave_instruction_limit`` is for one wave between two barriers, ``barrier_limit`` for
    the barriers that a workgroup passes."""

    dynamic_lds_bytes: int = 0
    bank_conflicts: bool = False
    trace: bool = False
    wave_instruction_limit: int = 20_000_000
    barrier_limit: int = 1_000_000


def run(
    program: Program,
    kernel_name: str,
    *,
    grid: Dim3,
    block: Dim3,
    kernargs: bytes,
    memory: Memory,
    schedule: Schedule | None = None,
    options: RunOptions | None = None,
) -> RunReport:
    """Executes a whole launch. ``grid`` counts workgroups, ``block`` threads, each (x, y, z).

    ``kernargs`` are the bytes of the kernarg segment, at least as many as the metadata says. Memory is
    changed as the kernel changes it, up to the fault if one is raised. Raises an InterpreterError that says
    where the fault is, and ValueError for arguments that are no launch.
    """
    kernel = program.kernels.get(kernel_name)
    if kernel is None:
        raise ValueError(
            f"kernel_name = {kernel_name!r}: the program holds {', '.join(program.kernels) or 'none'}"
        )
    if kernel.metadata is None:
        raise ValueError(f"kernel {kernel_name!r} has no metadata; pass it to parse_program")
    _check_arguments(grid, block, kernargs, kernel.metadata)
    launch = _Launch(
        kernel, kernel.metadata, grid, block, memory, schedule or Schedule(), options or RunOptions()
    )
    segment = np.frombuffer(bytearray(kernargs.ljust(4, b"\0")), np.uint8)
    region = memory.register_array(segment, "kernarg segment", writable=False)
    try:
        # Overflow and NaN are results here, and what the host does to denormals is no affair of the device's.
        with default_float_environment(), np.errstate(all="ignore"):
            return launch.run(region.address)
    finally:
        memory.unregister(region)


def _check_arguments(grid: Dim3, block: Dim3, kernargs: bytes, metadata: KernelMetadata) -> None:
    if min(grid) < 1:
        raise ValueError(f"grid = {grid}: at least one workgroup in each dimension")
    if min(block) < 1 or block[0] * block[1] * block[2] > _MOST_THREADS:
        raise ValueError(f"block = {block}: 1 to {_MOST_THREADS} threads")
    if len(kernargs) < metadata.kernarg_bytes:
        raise ValueError(f"kernargs = {len(kernargs)} bytes: {metadata.name} takes {metadata.kernarg_bytes}")


class _Launch:
    def __init__(
        self,
        kernel: Kernel,
        metadata: KernelMetadata,
        grid: Dim3,
        block: Dim3,
        memory: Memory,
        schedule: Schedule,
        options: RunOptions,
    ) -> None:
        self.kernel, self.metadata, self.grid, self.block = kernel, metadata, grid, block
        self.schedule, self.options = schedule, options
        self.decoded: Decoded = decode(kernel)
        self.machine = Machine(memory, GlobalLog(self.decoded.granule), schedule)
        if options.bank_conflicts:
            self.machine.bank_conflicts = {}
        self.lds_bytes = metadata.lds_bytes + options.dynamic_lds_bytes
        if self.lds_bytes > _LDS_OF_A_CU:
            raise OutOfBoundsError(f"{self.lds_bytes} bytes of LDS: a CU has {_LDS_OF_A_CU}").locate(
                kernel=kernel.name
            )
        self.threads = block[0] * block[1] * block[2]
        self.waves = -(-self.threads // LANES)
        self.entered: Counter[tuple[int, int]] = Counter()
        """How often waves ran the instructions between two, from the first up to the other."""
        self.traces: dict[tuple[int, int], npt.NDArray[np.int32]] = {}
        self.turns = 0

    def run(self, kernarg_address: int) -> RunReport:
        count = self.grid[0] * self.grid[1] * self.grid[2]
        for linear in self.schedule.order("workgroups", count, 0):
            self.machine.workgroup = linear
            self._run_workgroup(linear, kernarg_address)
        try:
            self.machine.log.check()
        except InterpreterError as error:
            raise error.locate(kernel=self.kernel.name) from None
        executed = np.zeros(len(self.kernel.instructions), np.int64)
        for (first, end), times in self.entered.items():
            executed[first:end] += times
        return RunReport(
            self.kernel,
            executed,
            count,
            count * self.waves,
            self.machine.bank_conflicts,
            self.traces,
        )

    def _run_workgroup(self, linear: int, kernarg_address: int) -> None:
        x, rest = linear % self.grid[0], linear // self.grid[0]
        workgroup = (x, rest % self.grid[1], rest // self.grid[1])
        lds = Lds(self.lds_bytes, self.decoded.granule)
        waves = [self._start_wave(index, workgroup, kernarg_address, lds) for index in range(self.waves)]
        paths: list[list[int]] = [[] for _ in waves]
        passed = 0
        try:
            while not all(wave.done for wave in waves):
                if passed > self.options.barrier_limit:
                    raise InstructionLimitError(f"more than {self.options.barrier_limit} barriers: endless?")
                passed += 1
                self.turns += 1
                for index in self.schedule.order("waves", self.waves, self.turns):
                    if not waves[index].done:
                        self._run_to_barrier(waves[index], paths[index], workgroup)
                if len({wave.done for wave in waves}) > 1:
                    ended = [wave.index for wave in waves if wave.done]
                    raise BarrierError(f"waves {ended} have ended while the others wait at a barrier")
                self._pass_barrier(waves, lds)
        except InterpreterError as error:
            raise error.locate(kernel=self.kernel.name, workgroup=workgroup) from None
        if self.options.trace:
            self.traces |= {(linear, i): np.array(path, np.int32) for i, path in enumerate(paths)}

    def _run_to_barrier(self, wave: Wave, path: list[int], workgroup: Dim3) -> None:
        left = self.options.wave_instruction_limit
        pc = wave.pc
        try:
            while True:
                pc = first = wave.pc
                stretch = self.decoded.stretch(first)
                wave.pc = first + max(len(stretch), 1)
                self.entered[first, wave.pc] += 1
                if self.options.trace:
                    path.extend(range(first, wave.pc))
                if not stretch:
                    wave.done = self.decoded.steps[first] is Stop.END
                    return
                for pc, step in stretch:  # noqa: B007 - named where a step raises
                    step(wave)
                    if wave.taint is not None:
                        wave.settle()
                left -= len(stretch)
                if left < 0:
                    raise InstructionLimitError(
                        f"{self.options.wave_instruction_limit} instructions and no barrier: endless?"
                    )
        except InterpreterError as error:
            instruction = self.kernel.instructions[pc]
            raise error.locate(
                line=instruction.line, text=instruction.text, workgroup=workgroup, wave=wave.index
            ) from None
        except IndexError:
            raise BarrierError("the wave ran past the last instruction").locate(
                workgroup=workgroup, wave=wave.index
            ) from None

    def _pass_barrier(self, waves: list[Wave], lds: Lds) -> None:
        """An operation in flight may still happen behind the barrier: it is marked there again."""
        lds.barrier()
        for wave in waves:
            wave.epoch += 1
            for flight in wave.counters.in_flight():
                if flight.lds_granules is not None:
                    mark = (
                        lds.mark_dma if flight.dma else lds.mark_write if flight.lds_write else lds.mark_read
                    )
                    mark(wave.index, flight.lds_granules)

    def _start_wave(self, index: int, workgroup: Dim3, kernarg_address: int, lds: Lds) -> Wave:
        known = self.metadata
        wave = Wave(index, self.machine, lds, known.scratch_bytes)
        for register, value in enumerate(self._user_scalars(kernarg_address)):
            wave.scalars[register], wave.scalar_states[register] = value, DEFINED
        register = known.user_sgprs
        for enabled, number in zip(known.workgroup_id, workgroup, strict=True):
            if enabled:
                wave.scalars[register], wave.scalar_states[register] = number, DEFINED
                register += 1
        thread = np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * index)
        live = min(self.threads - LANES * index, LANES)
        wide, high = np.uint32(self.block[0]), np.uint32(self.block[1])
        packed = thread % wide
        if known.workitem_id_dimensions > 1:
            packed = packed | thread // wide % high << np.uint32(10)
        if known.workitem_id_dimensions > 2:
            packed = packed | thread // (wide * high) << np.uint32(20)
        wave.set_exec((1 << live) - 1)
        wave.move(0, packed, None, wave.lanes)
        return wave

    def _user_scalars(self, kernarg_address: int) -> Iterator[int]:
        known = self.metadata
        count = 0
        if known.kernarg_pointer:
            yield kernarg_address & 0xFFFFFFFF
            yield kernarg_address >> 32
            count = 2
        segment = self.machine.memory.find(kernarg_address, 4)
        for at in range(known.kernarg_preload_dwords):
            yield int(segment.words[known.kernarg_preload_offset_dwords + at])
        count += known.kernarg_preload_dwords
        if count != known.user_sgprs:
            raise UnsupportedInstructionError(
                f"{known.user_sgprs} user scalar registers, of which {count} are implemented"
            )
