"""Which fault explains an engine's result: better than all others, or not named."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from indexer.explain.causes import hypotheses, stale_pages
from indexer.explain.engine_verdict import Cause
from indexer.explain.evidence import Evidence, Ints
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.match import Bools, Match, disagreements, match
from indexer.explain.prediction import by_contract
from indexer.explain.screen import few_faulty, narrowed

NAMED_SHARE = 0.9
"""Share of faulty rows that a cause must give exactly, and of right rows that it must leave right."""
NAMED_BITS = 8
"""What a named cause must get right beside chance, see :func:`indexer.explain.match.disagreements`."""
FITTED_BITS = 12
"""The same for one that was fitted to the result."""
CANDIDATE_SHARE = 0.25
"""Share of faulty rows from which a cause is worth showing."""
MAX_CANDIDATES = 4
TIME_LIMIT = 120.0
"""Seconds after which no further fault is tried; one that is being tried is finished."""


@dataclass(frozen=True)
class Naming:
    """What explains a result.

    Attributes:
        causes: the fault that explains best, or those that explain as well and cannot be told from it.
        candidates: others that explain a part, best first.
        untried: names of faults for which there was no time.
        most: largest share of the sample's faulty rows that one fault explains.
    """

    causes: tuple[Cause, ...]
    candidates: tuple[Cause, ...]
    untried: tuple[str, ...]
    most: float = 0.0


@dataclass(frozen=True, eq=False)
class Tried:
    """A hypothesis and how it fares."""

    hypothesis: Hypothesis
    match: Match
    cause: Cause
    bits: int

    @property
    def rank(self) -> tuple[int, int, int]:
        """Rows given, then how little was fitted, then cells given."""
        return self.cause.explained + self.cause.kept, -self.cause.fitted, self.match.cells

    @property
    def names(self) -> bool:
        """Whether this is enough to name it."""
        cause = self.cause
        # Which part of the call is looked at was fitted, too.
        enough = self.bits >= (FITTED_BITS if cause.fitted or cause.only else NAMED_BITS)
        many = cause.explained >= NAMED_SHARE * cause.faulty and cause.kept >= NAMED_SHARE * cause.right
        return enough and many


def name_causes(
    evidence: Evidence,
    seconds: float = TIME_LIMIT,
    clock: Callable[[], float] = time.monotonic,
    only: str | None = None,
) -> Naming:
    """Try every fault: on a few rows, on all rows in some columns, and then as a whole.

    A fault explains a row where it gives what the engine has and the contract does not.

    Args:
        evidence: the sample.
        seconds: after which no further fault is tried.
        clock: seconds.
        only: the part of the call that the sample is of, in words.
    """
    end = clock() + seconds
    right = by_contract(evidence)
    wrong = evidence.faulty & ~match(right, evidence).rows
    if not wrong.any():
        return Naming((), (), ())
    bits = disagreements(evidence, right)
    narrow = narrowed(evidence, right)
    few = few_faulty(evidence, right, wrong)
    untried: list[str] = []

    def in_time(found: list[Hypothesis]) -> Iterator[Hypothesis]:
        for hypothesis in found:
            if clock() < end:
                yield hypothesis
            else:
                untried.append(hypothesis.name)

    left = [
        hypothesis
        for hypothesis in in_time(_speaking_of(hypotheses(evidence, narrow), only))
        if match(hypothesis.predict(few), few).rows.any()
    ]
    if narrow is not evidence:  # what a fault gives in some columns is the most that it gives in all
        most = [_try(hypothesis, narrow, wrong, bits, only) for hypothesis in in_time(left)]
        most = [one for one in most if one.cause.explained >= CANDIDATE_SHARE * one.cause.faulty]
        left = [one.hypothesis for one in sorted(most, key=lambda one: one.rank, reverse=True)]
    tried = [_try(hypothesis, evidence, wrong, bits, only) for hypothesis in in_time(left)]
    tried = [one for one in tried if one.cause.explained]
    tried.sort(key=lambda one: one.rank, reverse=True)
    named = [one for one in tried[:1] if one.names]
    if named:
        named += [one for one in tried[1:] if one.rank == named[0].rank and one.names]
    shown = {one.hypothesis.name for one in named}
    others = [
        one.cause
        for one in tried
        if one.hypothesis.name not in shown and one.cause.explained >= CANDIDATE_SHARE * one.cause.faulty
    ]
    causes = tuple(one.cause for one in named)
    most_given = max((one.cause.explained / one.cause.faulty for one in tried), default=0.0)
    return Naming(causes, tuple(others[:MAX_CANDIDATES]), tuple(untried), most_given)


def _speaking_of(found: list[Hypothesis], only: str | None) -> list[Hypothesis]:
    """Those that a part of a call can have: what a page holds is the same for all that read it."""
    if only is None:
        return found
    return [one for one in found if one.family != stale_pages.FAMILY and not one.leaves_open]


def _try(hypothesis: Hypothesis, evidence: Evidence, wrong: Bools, bits: Ints, only: str | None) -> Tried:
    found = match(hypothesis.predict(evidence), evidence)
    given = found.rows
    if not hypothesis.leaves_open and evidence.blocks is None:
        # A row read only from what is not in the file agrees with anything: that is no evidence.
        given = given & found.told
    fitted = hypothesis.fitted
    if found.unknown and evidence.blocks is None:
        fitted = max(fitted, 2)  # what the file does not tell contradicts nothing
    explained = given & wrong
    cause = Cause(
        name=hypothesis.name,
        family=hypothesis.family,
        says=hypothesis.says,
        explained=int(explained.sum()),
        faulty=int(evidence.faulty.sum()),
        kept=int((given & ~evidence.faulty).sum()),
        right=int((~evidence.faulty).sum()),
        fitted=fitted,
        only=only,
    )
    return Tried(hypothesis, found, cause, int(bits[explained].sum()))
