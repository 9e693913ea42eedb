"""Scores that stand one column beside their block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import Prediction
from indexer.explain.replica import score

FAMILY = "score columns"


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    if evidence.scores is None or evidence.num_score_blocks < 2:
        return []
    return [
        Hypothesis(
            f"score columns are shifted by one: block b stands in column b {sign} 1",
            FAMILY,
            "The ids do not follow: the scores are written, or read for the capture, one column off.",
            lambda e, shift=shift: _shifted(e, shift),  # type: ignore[misc]
        )
        for sign, shift in (("+", 1), ("-", -1))
    ]


def _shifted(evidence: Evidence, shift: int) -> Prediction:
    """What leaves at one end comes in at the other; nothing does where columns were recorded past the last
    block."""
    if evidence.scores is None:
        raise AssertionError("only made with scores")
    columns = evidence.num_score_blocks
    source = evidence
    if evidence.blocks is not None:
        wanted = np.union1d(evidence.blocks, (evidence.blocks - shift) % columns)
        source = evidence.narrowed(wanted.astype(np.int64))
    right = score(source)
    scores, slack = (np.roll(cells, shift, axis=1) for cells in (right.scores, right.slack))
    if evidence.scores.shape[1] > columns:
        scores[:, 0 if shift > 0 else -1] = -np.inf
    return Prediction(replace(right, scores=scores, slack=slack), score(evidence))
