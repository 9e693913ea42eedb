"""Runs mutants against the launches and says what caught each, or why nothing can."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kernel.gfx950 import InterpreterError, Kernel, RunReport, check_hazards
from tests.gfx950.insert_launch import WrongPagesError
from tests.gfx950.mutation import equivalents
from tests.gfx950.mutation.compares import COMPARES, decides_otherwise
from tests.gfx950.mutation.launch import Launch, WrongScoresError, WrongWorkError
from tests.gfx950.mutation.mutants import NOP_SHORTENED, Mutant, mutated
from tests.gfx950.mutation.score import HIDDEN, PROVED, REVIEWED, SURVIVED, UNUSED, Verdict
from tests.gfx950.topk_launch import WrongIdsError

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

    @cached_property
    def executed(self) -> list[Executed]:
        """Of each launch. Raises what the kernel itself does wrong."""
        return [self._executed(launch) for launch in self.launches]

    @cached_property
    def _executed_by_sweep(self) -> list[Executed]:
        return [self._executed(launch) for launch in self.sweep]

    def reached(self, index: int) -> bool:
        """Whether any launch executes an instruction."""
        return any(executed[index] for executed in self.executed)

    def judge(self, mutant: Mutant, *, thorough: bool = True) -> Verdict:
        """A verdict that is not ``thorough`` leaves out the sweep."""
        reason = equivalents.proof(self.kernel, mutant)
        if reason:
            return Verdict(mutant, PROVED, reason)
        try:
            changed = mutated(self.kernel, mutant)
            runs = self._reaching(self.launches, self.executed, mutant.index)
            if mutant.operator != NOP_SHORTENED:  # which changes no value
                self._run(changed, runs)
            check_hazards(changed)
            more = self._reaching(self.sweep, self._executed_by_sweep, mutant.index) if thorough else []
            differs = None
            if self.kernel.instructions[mutant.index].mnemonic.startswith(COMPARES):
                # where a compare decides as before, the run is the same
                differs = any(decides_otherwise(self.kernel, mutant, launch) for launch, _ in runs)
                more = [run for run in more if decides_otherwise(self.kernel, mutant, run[0])]
                differs = differs or bool(more)
            self._run(changed, more)
        except _CAUGHT as error:
            return Verdict(mutant, type(error).__name__, str(error))
        return self._explained(mutant, [launch for launch, _ in [*runs, *more]], differs)

    def _explained(self, mutant: Mutant, launches: Sequence[AnyLaunch], differs: bool | None) -> Verdict:
        reason = equivalents.reviewed(self._reviewed, self.kernel, mutant, differs)
        if reason:
            return Verdict(mutant, REVIEWED, reason)
        if equivalents.has_no_use(self.kernel, mutant, launches):
            return Verdict(mutant, UNUSED, "")
        if equivalents.is_hidden(self.kernel, mutant, launches):
            return Verdict(mutant, HIDDEN, "")
        return Verdict(mutant, SURVIVED, "")

    def _executed(self, launch: AnyLaunch) -> Executed:
        report = launch.run(self.kernel)
        self._check_work(launch, report, report.executed)
        return report.executed

    def _reaching(
        self, launches: Sequence[AnyLaunch], executed: Sequence[Executed], index: int
    ) -> list[tuple[AnyLaunch, Executed]]:
        """Only a launch that executes the mutated instruction can tell; the cheapest comes first."""
        order = sorted(range(len(executed)), key=lambda at: int(executed[at].sum()))
        return [(launches[at], executed[at]) for at in order if executed[at][index]]

    def _run(self, kernel: Kernel, runs: Iterable[tuple[AnyLaunch, Executed]]) -> None:
        for launch, executed in runs:
            self._check_work(launch, launch.run(kernel), executed)


def survivors(kernel: Kernel, verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Where each survivor is and what it changes."""
    for verdict in verdicts:
        if verdict.outcome == SURVIVED:
            line = kernel.instructions[verdict.mutant.index].line
            yield f"line {line}: {equivalents.description(kernel, verdict.mutant)}"
