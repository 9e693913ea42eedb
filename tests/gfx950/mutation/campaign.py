"""Runs mutants against the launches and says what caught each, or why nothing can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from kernel.backends.flydsl import toolchain
from kernel.gfx950 import InterpreterError, Kernel, check_hazards, parse_program
from tests.gfx950.mutation import equivalents, inputs
from tests.gfx950.mutation.compares import COMPARES, decides_otherwise
from tests.gfx950.mutation.launches import Launch, WrongScoresError
from tests.gfx950.mutation.mutants import NOP_SHORTENED, Mutant, mutated
from tests.gfx950.mutation.score import HIDDEN, PROVED, REVIEWED, SURVIVED, UNUSED, Verdict
from tests.gfx950.mutation.work import WrongWorkError, check_work

Executed = list[npt.NDArray[np.int64]]


class Campaign:
    """Mutants of one kernel under launches that the kernel itself gets right.

    What survives the ``launches`` goes on to those of the ``sweep``, and its effect is followed in both.
    """

    def __init__(self, kernel: Kernel, launches: Sequence[Launch], sweep: Sequence[Launch]) -> None:
        self.kernel = kernel
        self.launches, self.sweep = launches, sweep

    @cached_property
    def executed(self) -> Executed:
        """How often each launch executes each instruction. Raises what the kernel itself does wrong."""
        return self._counts(self.launches)

    @cached_property
    def _executed_by_sweep(self) -> Executed:
        return self._counts(self.sweep)

    def reached(self, index: int) -> bool:
        """Whether any launch executes an instruction."""
        return any(counts[index] for counts in self.executed)

    def judge(self, mutant: Mutant, *, thorough: bool = True) -> Verdict:
        """A verdict that is not ``thorough`` leaves out the sweep."""
        reason = equivalents.proof(self.kernel, mutant)
        if reason:
            return Verdict(mutant, PROVED, reason)
        try:
            changed = mutated(self.kernel, mutant)
            launches = self._reaching(self.launches, self.executed, mutant.index)
            reaching = len(launches)
            if mutant.operator != NOP_SHORTENED:  # which changes no value
                _run(changed, launches)
            check_hazards(changed)
            if thorough:
                launches += self._reaching(self.sweep, self._executed_by_sweep, mutant.index)
            if self.kernel.instructions[mutant.index].mnemonic.startswith(COMPARES):
                # where a compare decides as before, the run is the same
                different = [one for one in launches if decides_otherwise(self.kernel, mutant, one)]
                _run(changed, different)
                reason = equivalents.reviewed(self.kernel, mutant, differs=bool(different))
                if reason:
                    return Verdict(mutant, REVIEWED, reason)
            else:
                _run(changed, launches[reaching:])
        except (InterpreterError, WrongScoresError, WrongWorkError) as error:
            return Verdict(mutant, type(error).__name__, str(error))
        return self._explained(mutant, launches)

    def _explained(self, mutant: Mutant, launches: Sequence[Launch]) -> Verdict:
        if equivalents.has_no_use(self.kernel, mutant, launches):
            return Verdict(mutant, UNUSED, "")
        if equivalents.is_hidden(self.kernel, mutant, launches):
            return Verdict(mutant, HIDDEN, "")
        return Verdict(mutant, SURVIVED, "")

    def _counts(self, launches: Iterable[Launch]) -> Executed:
        found = []
        for launch in launches:
            report = launch.run(self.kernel)
            check_work(launch, report)
            found.append(report.executed)
        return found

    def _reaching(self, launches: Sequence[Launch], executed: Executed, index: int) -> list[Launch]:
        """Only a launch that executes the mutated instruction can tell; the cheapest comes first."""
        costs = [int(counts.sum()) for counts in executed]
        order = sorted(range(len(costs)), key=costs.__getitem__)
        return [launches[at] for at in order if executed[at][index]]


def _run(kernel: Kernel, launches: Iterable[Launch]) -> None:
    for launch in launches:
        check_work(launch, launch.run(kernel))


@cache
def campaign(heads: int) -> Campaign:
    """The prefill scorer for ``heads`` index heads, compiled now, under all launches."""
    name, assembly = toolchain.assembly(heads)
    return Campaign(parse_program(assembly).kernels[name], inputs.launches(heads), inputs.sweep(heads))


def survivors(campaign: Campaign, verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Where each survivor is and what it changes."""
    for verdict in verdicts:
        if verdict.outcome == SURVIVED:
            old = campaign.kernel.instructions[verdict.mutant.index]
            yield f"{verdict.mutant.operator}, line {old.line}: {old.text.strip()} -> {verdict.mutant.text}"
