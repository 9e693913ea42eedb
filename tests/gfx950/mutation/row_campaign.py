"""Mutants of the top-k and insert kernels: what catches each.

A launch compares every output with the oracle's. Some mistakes only make a kernel slower: a bound too low is
still exact. So a mutant must also issue each instruction as often as the kernel does, whose own count of
comparisons is checked against what the rows are due (``test_row_work.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kernel.gfx950 import InterpreterError, Kernel, RunReport, Schedule, check_hazards
from tests.gfx950.insert_launch import WrongPagesError
from tests.gfx950.mutation.equivalents import description, proof
from tests.gfx950.mutation.lane_mutants import lane_mutants
from tests.gfx950.mutation.mutants import NOP_SHORTENED, Mutant, mutants, mutated
from tests.gfx950.mutation.row_equivalents import reason_of
from tests.gfx950.mutation.score import PROVED, REVIEWED, SURVIVED, Verdict
from tests.gfx950.topk_launch import WrongIdsError


class WrongWorkError(Exception):
    """Outputs are right, and the way to them is not the kernel's."""


class Launch(Protocol):
    """What a campaign runs; see ``TopkLaunch`` and ``InsertLaunch``."""

    @property
    def name(self) -> str: ...

    def run(self, kernel: Kernel) -> RunReport:
        """Raises what the kernel does wrong."""
        ...

    def under(self, schedule: Schedule) -> Launch: ...


class RowCampaign:
    """Mutants of one kernel under launches that the kernel itself gets right."""

    def __init__(self, kernel: Kernel, launches: Sequence[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    @cached_property
    def executed(self) -> list[npt.NDArray[np.int64]]:
        """How often each launch executes each instruction. Raises what the kernel itself does wrong."""
        return [launch.run(self.kernel).executed for launch in self.launches]

    @cached_property
    def mutants(self) -> list[Mutant]:
        """Every mutant of an instruction that some launch reaches; those across lanes first."""
        reached = np.sum(self.executed, axis=0) > 0
        found = {(one.index, one.text): one for one in [*lane_mutants(self.kernel), *mutants(self.kernel)]}
        return [one for one in found.values() if reached[one.index]]

    def judge(self, mutant: Mutant) -> Verdict:
        reason = proof(self.kernel, mutant)
        if reason:
            return Verdict(mutant, PROVED, reason)
        try:
            changed = mutated(self.kernel, mutant)
            if mutant.operator != NOP_SHORTENED:  # which changes no value
                self._run(changed, mutant.index)
            check_hazards(changed)
        except (InterpreterError, WrongIdsError, WrongPagesError, WrongWorkError) as error:
            return Verdict(mutant, type(error).__name__, str(error))
        reason = reason_of(description(self.kernel, mutant))
        return Verdict(mutant, REVIEWED if reason else SURVIVED, reason)

    def _run(self, kernel: Kernel, index: int) -> None:
        """Only a launch that executes the mutated instruction can tell; the cheapest one goes first."""
        costs = [int(counts.sum()) for counts in self.executed]
        for at in sorted(range(len(costs)), key=costs.__getitem__):
            if not self.executed[at][index]:
                continue
            executed = self.launches[at].run(kernel).executed
            if not np.array_equal(executed, self.executed[at]):
                first = kernel.instructions[int(np.argmax(executed != self.executed[at]))]
                raise WrongWorkError(f"{self.launches[at].name}: line {first.line} runs more or less often")


def survivors(campaign: RowCampaign, verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Where each survivor is and what it changes."""
    for verdict in verdicts:
        if verdict.outcome == SURVIVED:
            line = campaign.kernel.instructions[verdict.mutant.index].line
            yield f"line {line}: {description(campaign.kernel, verdict.mutant)}"
