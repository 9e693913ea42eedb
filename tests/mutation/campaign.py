"""Runs mutants against the launches and says what caught each, or why nothing can."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kernel.gfx950 import InterpreterError, Kernel, RunReport, check_hazards
from kernel.gfx950.hazards import register_use
from kernel.gfx950.isa.form import Stop
from kernel.gfx950.launch import decode, decode_with
from kernel.gfx950.wave import Wave
from tests.gfx950.compiled import shared
from tests.gfx950.row_launches import WrongIdsError, WrongPagesError
from tests.mutation import equivalents
from tests.mutation.launch import Launch, WrongScoresError, WrongWorkError
from tests.mutation.mutants import NOP_SHORTENED, Mutant, mutants, mutated
from tests.mutation.score import HIDDEN, PROVED, REVIEWED, SURVIVED, UNUSED, Verdict

# ---- How often a changed compare decides otherwise than the compare that it stands for ----

COMPARES = ("s_cmp", "v_cmp_")


def decides_otherwise(kernel: Kernel, mutant: Mutant, launch: Launch) -> int:
    """Executions of the compare, in a run of the kernel as it is, that come out otherwise as changed."""
    ours, theirs = (decode(one).steps[mutant.index] for one in (kernel, mutated(kernel, mutant)))
    if isinstance(ours, Stop) or isinstance(theirs, Stop):
        raise TypeError(f"{mutant.text}: no compare")
    written = [at for file, at in register_use(kernel.instructions[mutant.index]).writes if file == "s"]
    different = 0

    def compare(wave: Wave) -> None:
        nonlocal different
        before = [wave.scalars[at] for at in written]  # a compare may write over what it compares
        theirs(wave)
        changed = wave.scc, [wave.scalars[at] for at in written]
        for at, value in zip(written, before, strict=True):
            wave.scalars[at] = value
        ours(wave)
        different += changed != (wave.scc, [wave.scalars[at] for at in written])

    launch.run(decode_with(kernel, {mutant.index: compare}))
    return different


Executed = npt.NDArray[np.int64]
"""How often a launch executes each instruction."""
AnyLaunch = TypeVar("AnyLaunch", bound=Launch)
CheckWork = Callable[[AnyLaunch, RunReport, Executed], None]
"""Raises WrongWorkError for a run that took another way than is due; is told what the kernel executes."""
_CAUGHT = (InterpreterError, WrongScoresError, WrongIdsError, WrongPagesError, WrongWorkError)


class Campaign(Generic[AnyLaunch]):
    """Mutants of one kernel under launches that the kernel itself gets right.

    What survives the ``launches`` goes on to those of the ``sweep``, and its effect is followed in both; then
    it is looked for among the ``equivalents``.
    """

    def __init__(
        self,
        kernel: Kernel,
        launches: Sequence[AnyLaunch],
        check_work: CheckWork[AnyLaunch],
        reviewed: Sequence[equivalents.Equivalent] = (),
        sweep: Sequence[AnyLaunch] = (),
    ) -> None:
        self.kernel = kernel
        self.launches, self.sweep = launches, sweep
        self._check_work, self._reviewed = check_work, reviewed
        self._executed: dict[int, Executed] = {}

    def executed_by(self, launch: int) -> Executed:
        """How often the launch of that place executes each instruction. Raises what the kernel does wrong."""
        if launch not in self._executed:
            name = f"{self.kernel.name} executed by launch {launch}"
            self._executed[launch] = shared(name, lambda: self.run(self.launches[launch]))
        return self._executed[launch]

    @cached_property
    def executed(self) -> list[Executed]:
        """The same of each launch."""
        return [self.executed_by(at) for at in range(len(self.launches))]

    @cached_property
    def executed_by_sweep(self) -> list[Executed]:
        """Of each launch of the sweep, likewise."""
        return [self.run(launch) for launch in self.sweep]

    def reached(self, index: int) -> bool:
        """Whether any launch executes an instruction."""
        return any(executed[index] for executed in self.executed)

    def judge(self, mutant: Mutant, *, thorough: bool = True) -> Verdict:
        """A verdict that is not ``thorough`` runs the launches in their order, and leaves out the sweep."""
        reason = equivalents.proof(self.kernel, mutant)
        if reason:
            return Verdict(mutant, PROVED, reason)
        runs: list[tuple[AnyLaunch, Executed]] = []
        more: list[tuple[AnyLaunch, Executed]] = []
        differs, at = None, mutant.index
        try:
            changed = mutated(self.kernel, mutant)
            for run in _reaching(self.launches, self.executed, at) if thorough else self._in_order(at):
                runs.append(run)
                if mutant.operator != NOP_SHORTENED:  # which changes no value
                    self._run(changed, *run)
            check_hazards(changed)
            if thorough:
                more = _reaching(self.sweep, self.executed_by_sweep, at)
            if self.kernel.instructions[mutant.index].mnemonic.startswith(COMPARES):
                # where a compare decides as before, the run is the same
                differs = any(decides_otherwise(self.kernel, mutant, launch) for launch, _ in runs)
                more = [run for run in more if decides_otherwise(self.kernel, mutant, run[0])]
                differs = differs or bool(more)
            for run in more:
                self._run(changed, *run)
        except _CAUGHT as error:
            return Verdict(mutant, type(error).__name__, str(error))
        return self._explained(mutant, [launch for launch, _ in [*runs, *more]], differs)

    def run(self, launch: AnyLaunch) -> Executed:
        """The kernel as it is under a launch. Raises what it does wrong."""
        report = launch.run(self.kernel)
        self._check_work(launch, report, report.executed)
        return report.executed

    def _explained(self, mutant: Mutant, launches: Sequence[AnyLaunch], differs: bool | None) -> Verdict:
        reason = equivalents.reviewed(self._reviewed, self.kernel, mutant, differs)
        if reason:
            return Verdict(mutant, REVIEWED, reason)
        if equivalents.has_no_use(self.kernel, mutant, launches):
            return Verdict(mutant, UNUSED, "")
        if equivalents.is_hidden(self.kernel, mutant, launches):
            return Verdict(mutant, HIDDEN, "")
        return Verdict(mutant, SURVIVED, "")

    def _in_order(self, index: int) -> Iterator[tuple[AnyLaunch, Executed]]:
        for at, launch in enumerate(self.launches):
            if self.executed_by(at)[index]:
                yield launch, self.executed_by(at)

    def _run(self, kernel: Kernel, launch: AnyLaunch, executed: Executed) -> None:
        self._check_work(launch, launch.run(kernel), executed)


def _reaching(
    launches: Sequence[AnyLaunch], executed: Sequence[Executed], index: int
) -> list[tuple[AnyLaunch, Executed]]:
    """Only a launch that executes the mutated instruction can tell; the cheapest comes first."""
    order = sorted(range(len(executed)), key=lambda at: int(executed[at].sum()))
    return [(launches[at], executed[at]) for at in order if executed[at][index]]


def survivors(kernel: Kernel, verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Where each survivor is and what it changes."""
    for verdict in verdicts:
        if verdict.outcome == SURVIVED:
            line = kernel.instructions[verdict.mutant.index].line
            yield f"line {line}: {equivalents.description(kernel, verdict.mutant)}"


# Which mutants of a kernel are judged: all of waits, barriers, compares and branches, some of the others.

_SEED = 950
_EVERY = ("barrier", "weakened", "dropped", "compare", "branch", "nop", "lanes")
"""Operators, or what they delete, of which the whole set has every mutant."""


def whole_set(found: Campaign[Any], seed: int, of_others: int | None) -> list[Mutant]:
    """Mutants of instructions that the launches reach, and that are code.

    ``of_others`` of each operator that is not among ``_EVERY``, or all. The seeded choice is always the same.
    """
    others: dict[str, list[Mutant]] = {}
    chosen = []
    for mutant in mutants(found.kernel):
        if not found.reached(mutant.index):
            continue
        mnemonic = found.kernel.instructions[mutant.index].mnemonic
        if mnemonic not in ("s_waitcnt", "s_barrier") and not any(word in mutant.operator for word in _EVERY):
            others.setdefault(mutant.operator, []).append(mutant)
        elif is_code(found.kernel, mutant):
            chosen.append(mutant)
    random = np.random.default_rng((_SEED, seed))
    for operator in sorted(others):
        shuffled = (others[operator][at] for at in random.permutation(len(others[operator])))
        code = (mutant for mutant in shuffled if is_code(found.kernel, mutant))
        chosen += itertools.islice(code, of_others)
    return chosen


def is_code(kernel: Kernel, mutant: Mutant) -> bool:
    """Whether the changed instruction exists: a compiler can only be wrong in what an assembler takes."""
    try:
        mutated(kernel, mutant)
    except InterpreterError:
        return False
    return True
