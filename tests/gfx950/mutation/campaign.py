"""Runs mutants against the launches and says what caught each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from kernel.backends.flydsl import toolchain
from kernel.gfx950 import InterpreterError, Kernel, check_hazards, parse_program
from tests.gfx950.mutation.equivalents import proof, reviewed
from tests.gfx950.mutation.inputs import launches
from tests.gfx950.mutation.launches import Launch, WrongScoresError
from tests.gfx950.mutation.mutants import NOP_SHORTENED, Mutant, mutated
from tests.gfx950.mutation.work import WrongWorkError, check_work

PROVED, REVIEWED, SURVIVED = "proved equivalent", "reviewed as equivalent", "survived"


@dataclass(frozen=True)
class Verdict:
    """``outcome`` is the class of the error that caught the mutant, or one of the three above."""

    mutant: Mutant
    outcome: str
    detail: str


class Campaign:
    """Mutants of one kernel under launches that the kernel itself gets right."""

    def __init__(self, heads: int, kernel: Kernel, launches: Iterable[Launch]) -> None:
        self.heads = heads
        self.kernel = kernel
        self.launches = list(launches)

    @cached_property
    def executed(self) -> list[npt.NDArray[np.int64]]:
        """How often each launch executes each instruction. Raises what the kernel itself does wrong."""
        reports = [launch.run(self.kernel) for launch in self.launches]
        for launch, report in zip(self.launches, reports, strict=True):
            check_work(launch, report)
        return [report.executed for report in reports]

    def reached(self, index: int) -> bool:
        """Whether any launch executes an instruction."""
        return any(counts[index] for counts in self.executed)

    def judge(self, mutant: Mutant) -> Verdict:
        reason = proof(self.kernel, mutant)
        if reason:
            return Verdict(mutant, PROVED, reason)
        try:
            self._run(mutated(self.kernel, mutant), mutant)
        except (InterpreterError, WrongScoresError, WrongWorkError) as error:
            return Verdict(mutant, type(error).__name__, str(error))
        reason = reviewed(self.kernel, mutant, self.heads)
        return Verdict(mutant, REVIEWED if reason else SURVIVED, reason)

    def _run(self, kernel: Kernel, mutant: Mutant) -> None:
        """Only a launch that executes the mutated instruction can tell; the cheapest one goes first."""
        if mutant.operator == NOP_SHORTENED:  # changes no value
            check_hazards(kernel)
            return
        costs = [int(counts.sum()) for counts in self.executed]
        for at in sorted(range(len(costs)), key=costs.__getitem__):
            if self.executed[at][mutant.index]:
                check_work(self.launches[at], self.launches[at].run(kernel))
        check_hazards(kernel)


@cache
def campaign(heads: int) -> Campaign:
    """The prefill scorer for ``heads`` index heads, compiled now, under all launches."""
    name, assembly = toolchain.assembly(heads)
    return Campaign(heads, parse_program(assembly).kernels[name], launches(heads))


def score(heads: int, verdicts: Iterable[Verdict]) -> str:
    """One line: how many mutants, caught by what."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    total, survived = counts.total(), counts[SURVIVED]
    equivalent = counts[PROVED] + counts[REVIEWED]
    by = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    caught = total - survived - equivalent
    return f"H={heads}: {caught} caught + {equivalent} equivalent of {total} mutants ({by})"


def survivors(campaign: Campaign, verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Where each survivor is and what it changes."""
    for verdict in verdicts:
        if verdict.outcome == SURVIVED:
            old = campaign.kernel.instructions[verdict.mutant.index]
            yield f"{verdict.mutant.operator}, line {old.line}: {old.text.strip()} -> {verdict.mutant.text}"
