"""The faults that are tried, one file a family."""

from __future__ import annotations

from indexer.explain.causes import (
    ids,
    keys,
    pages,
    rows,
    scores,
)
from indexer.explain.evidence import Evidence
from indexer.explain.match import Hypothesis

FROM_THE_CALL = (
    ids,
    ids,
    rows,
    rows,
    rows,
    ids,
    rows,
    keys,
    keys,
    keys,
    keys,
    keys,
    scores,
    pages,
    pages,
    pages,
)
FROM_THE_RESULT = (
    ids,
    ids,
    rows,
    rows,
    rows,
    scores,
    scores,
    scores,
    pages,
)
"""These look at what the engine recorded to see which faults are worth trying."""


def hypotheses(evidence: Evidence, narrow: Evidence) -> list[Hypothesis]:
    """Every fault that this evidence can speak about.

    Args:
        evidence: the sample.
        narrow: the same rows, computed only in the columns that tell most.
    """
    found = [hypothesis for family in FROM_THE_CALL for hypothesis in family.hypotheses(evidence)]
    found += [one for family in FROM_THE_RESULT for one in family.hypotheses(evidence, narrow)]
    return found
