"""The fault that needs no hypothesis: right scores, and ids that are not the best by them."""

from __future__ import annotations

from indexer.explain.differences import Bools
from indexer.explain.engine_verdict import Cause
from indexer.explain.evidence import Evidence

FAMILY = "selection"
NAMED_SHARE = 0.9
"""Share of faulty rows that must be so."""


def selection_cause(
    evidence: Evidence, selection_faults: Bools, score_faults: Bools, named: tuple[Cause, ...]
) -> tuple[Cause, ...]:
    """The cause, if nothing better was named.

    Args:
        evidence: a sample of rows.
        selection_faults: ``[H, total_q]`` rows whose ids the engine's own scores contradict.
        score_faults: ``[H, total_q]`` rows that have a wrong score.
        named: causes that explain the scores or the ids. Those of ids in a wrong order take equal scores,
            and close ones, in any order: they do not see an id that is one place too far.
    """
    if any(cause.family != "order of ids" for cause in named):
        return named
    contradicted = selection_faults[evidence.head, evidence.token]
    scores_right = ~score_faults[evidence.head, evidence.token]
    explained = int((scores_right & contradicted & evidence.faulty).sum())
    faulty = int(evidence.faulty.sum())
    if not explained or explained < NAMED_SHARE * faulty:
        return named
    right = int((~evidence.faulty).sum())
    cause = Cause(
        name="the ids are not the best by the engine's own scores",
        family=FAMILY,
        says="The scores are right, and the selection does not follow them: look at the top-k step, at what "
        "it reads, and at what is done to its ids afterwards.",
        explained=explained,
        faulty=faulty,
        kept=right,
        right=right,
        fitted=0,
    )
    return (cause,)
