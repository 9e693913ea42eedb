"""Mutants of the decode scorer under the launches of ``decode_inputs``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from kernel.backends.flydsl import toolchain
from kernel.gfx950 import InterpreterError, Kernel, check_hazards, parse_program
from tests.gfx950.mutation import decode_equivalents, equivalents
from tests.gfx950.mutation.decode_inputs import launches
from tests.gfx950.mutation.decode_launches import DecodeLaunch
from tests.gfx950.mutation.decode_work import check_work
from tests.gfx950.mutation.launches import WrongScoresError
from tests.gfx950.mutation.mutants import Mutant, mutants, mutated
from tests.gfx950.mutation.score import PROVED, REVIEWED, SURVIVED, Verdict
from tests.gfx950.mutation.work import WrongWorkError

_EVERY = ("barrier", "weakened", "dropped", "compare", "branch")
"""Operators, or what they delete, of which the whole set takes every mutant."""
_OF_OTHERS = 12
"""And of each other operator."""
_SEED = 951


class DecodeCampaign:
    """Mutants of one kernel under launches that the kernel itself gets right."""

    def __init__(self, heads: int, kernel: Kernel, launches: Iterable[DecodeLaunch]) -> None:
        self.heads, self.kernel, self.launches = heads, kernel, list(launches)

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

    @cached_property
    def whole_set(self) -> list[Mutant]:
        """Mutants of instructions that the launches reach; the seeded choice of some is always the same."""
        others: dict[str, list[Mutant]] = {}
        chosen = []
        for mutant in mutants(self.kernel):
            if not self.reached(mutant.index):
                continue
            mnemonic = self.kernel.instructions[mutant.index].mnemonic
            if mnemonic in ("s_waitcnt", "s_barrier") or any(word in mutant.operator for word in _EVERY):
                chosen.append(mutant)
            else:
                others.setdefault(mutant.operator, []).append(mutant)
        random = np.random.default_rng((_SEED, self.heads))
        for operator in sorted(others):
            chosen += [others[operator][at] for at in random.permutation(len(others[operator]))[:_OF_OTHERS]]
        return chosen

    def judge(self, mutant: Mutant) -> Verdict:
        reason = equivalents.proof(self.kernel, mutant)
        if reason:
            return Verdict(mutant, PROVED, reason)
        try:
            self._run(mutated(self.kernel, mutant), mutant.index)
        except (InterpreterError, WrongScoresError, WrongWorkError) as error:
            return Verdict(mutant, type(error).__name__, str(error))
        reason = decode_equivalents.reviewed(self.kernel, mutant, self.heads)
        return Verdict(mutant, REVIEWED if reason else SURVIVED, reason)

    def _run(self, kernel: Kernel, index: int) -> None:
        """Only a launch that executes the mutated instruction can tell; the cheapest one goes first."""
        check_hazards(kernel)
        costs = [int(counts.sum()) for counts in self.executed]
        for at in sorted(range(len(costs)), key=costs.__getitem__):
            if self.executed[at][index]:
                check_work(self.launches[at], self.launches[at].run(kernel))


@cache
def campaign(heads: int) -> DecodeCampaign:
    """The decode scorer for ``heads`` index heads, compiled now, under all launches."""
    name, assembly = toolchain.decode_assembly(heads)
    return DecodeCampaign(heads, parse_program(assembly).kernels[name], launches(heads))
