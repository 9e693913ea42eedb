"""Which fault explains an engine's result: better than all others, or not named."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.explain.causes import hypotheses
from indexer.explain.engine_verdict import Cause
from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.match import Match, match
from indexer.explain.replica import predict

NAMED_SHARE = 0.9
"""Share of faulty rows that a cause must give exactly, and of right rows that it must leave right."""
CANDIDATE_SHARE = 0.25
"""Share of faulty rows from which a cause is worth showing."""
MAX_CANDIDATES = 4
SCREENED_ROWS = 6


@dataclass(frozen=True, eq=False)
class Tried:
    """A hypothesis and how it fares."""

    hypothesis: Hypothesis
    match: Match
    cause: Cause

    @property
    def rank(self) -> tuple[int, int, int]:
        """Rows given, then how little was fitted, then cells given."""
        return self.cause.explained + self.cause.kept, -self.cause.fitted, self.match.cells


def name_causes(evidence: Evidence) -> tuple[tuple[Cause, ...], tuple[Cause, ...]]:
    """Try every fault.

    Returns:
        The cause that explains best, or those that explain as well and cannot be told from it; and others
        that explain a part, best first.
    """
    contract = match(predict(evidence), evidence)
    if contract.rows[evidence.faulty].all():
        return (_order(evidence),), ()
    few = _few_faulty(evidence)
    tried = [
        _try(hypothesis, evidence)
        for hypothesis in hypotheses(evidence)
        if match(hypothesis.predict(few), few).rows.any()
    ]
    tried.sort(key=lambda one: one.rank, reverse=True)
    named = [one for one in tried[:1] if _names(one.cause)]
    if named:
        named += [one for one in tried[1:] if one.rank == named[0].rank and _names(one.cause)]
        named = _one_a_family(named)
    shown = {one.hypothesis.name for one in named}
    others = [
        one.cause
        for one in tried
        if one.hypothesis.name not in shown and one.cause.explained >= CANDIDATE_SHARE * one.cause.faulty
    ]
    return tuple(one.cause for one in named), tuple(others[:MAX_CANDIDATES])


def _few_faulty(evidence: Evidence) -> Evidence:
    """A few faulty rows of the shortest requests: a fault that gives none of them is not tried on more."""
    rows = np.flatnonzero(evidence.faulty)
    order = np.argsort(evidence.seq_len[rows], kind="stable")
    return evidence.subset(np.sort(rows[order][:SCREENED_ROWS]))


def _try(hypothesis: Hypothesis, evidence: Evidence) -> Tried:
    found = match(hypothesis.predict(evidence), evidence)
    # A row read only from what is not in the file agrees with anything: it is no evidence for such a read.
    given = found.rows if hypothesis.leaves_open else found.rows & found.told
    fitted = hypothesis.fitted
    if found.unknown:
        fitted = max(fitted, 2)  # what the file does not tell contradicts nothing
    cause = Cause(
        name=hypothesis.name,
        family=hypothesis.family,
        says=hypothesis.says,
        explained=int((given & evidence.faulty).sum()),
        faulty=int(evidence.faulty.sum()),
        kept=int((given & ~evidence.faulty).sum()),
        right=int((~evidence.faulty).sum()),
        fitted=fitted,
    )
    return Tried(hypothesis, found, cause)


def _names(cause: Cause) -> bool:
    return cause.explained >= NAMED_SHARE * cause.faulty and cause.kept >= NAMED_SHARE * cause.right


def _one_a_family(tried: list[Tried]) -> list[Tried]:
    """Faults of one family that these rows do not tell apart are one answer."""
    families = {one.hypothesis.family: one for one in reversed(tried)}
    return list(reversed(families.values()))


def _order(evidence: Evidence) -> Cause:
    faulty, right = int(evidence.faulty.sum()), int((~evidence.faulty).sum())
    return Cause(
        name="ids are not in the order stated",
        family="order of ids",
        says="The rows hold the right blocks; only their order is not that of engine_order.",
        explained=faulty,
        faulty=faulty,
        kept=right,
        right=right,
        fitted=0,
    )
