"""Rows that are those of another token, all by the same distance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from indexer.explain.evidence import Evidence, Ints
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.match import match
from indexer.explain.prediction import Prediction, by_scores
from indexer.explain.replica import Steps, quantised, score

FAMILY = "head/token layout"
MAX_SHIFT = 64
"""Tokens."""
FITTED_ROWS = 3
"""Faulty rows that a distance is looked for in."""
Shifted = Callable[[Evidence, Ints], Prediction]
"""Evidence and tokens ``[R]`` of the call to what its rows would hold."""


def hypotheses(_evidence: Evidence, narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    total = narrow.case.total_q
    if total == 1:
        return []
    found = []
    kinds: list[tuple[str, str, Shifted]] = [
        ("results", "Row t holds what row t {0} must hold: the outputs start at another row.", _results),
        ("queries", "Row t is scored with the query of row t {0}, at its own position.", _queries),
    ]
    for what, says, shifted in kinds:
        shift = _shift(narrow, shifted)
        if shift:
            rows = f"{abs(shift)} row{'s' * (abs(shift) > 1)}"
            found.append(
                Hypothesis(
                    f"{what} are those of {rows} {'later' if shift > 0 else 'earlier'}",
                    FAMILY,
                    says.format(f"{'+' if shift > 0 else '-'} {abs(shift)}"),
                    lambda e, shift=shift, shifted=shifted: shifted(  # type: ignore[misc]
                        e, (e.token + shift) % e.case.total_q
                    ),
                    fitted=1,
                )
            )
    return found


def _shift(evidence: Evidence, shifted: Shifted) -> int:
    """The distance that most of a few faulty rows agree with; 0 if none does."""
    faulty = np.flatnonzero(evidence.faulty)
    rows = np.unique(faulty[np.linspace(0, len(faulty) - 1, FITTED_ROWS).round().astype(np.int64)])
    most = min(MAX_SHIFT, evidence.case.total_q - 1)
    shifts = np.array([shift for shift in range(-most, most + 1) if shift])
    many = evidence.subset(np.repeat(rows, len(shifts)))
    agrees = match(shifted(many, (many.token + np.tile(shifts, len(rows))) % evidence.case.total_q), many)
    votes = agrees.rows.reshape(len(rows), -1).sum(axis=0)
    nearest = np.lexsort((np.abs(shifts), -votes))[0]
    return int(shifts[nearest]) if votes[nearest] else 0


def _results(evidence: Evidence, token: Ints) -> Prediction:
    return by_scores(score(evidence.at(evidence.head, token)))


def _queries(evidence: Evidence, token: Ints) -> Prediction:
    queries = quantised(evidence.case.index_q[token, evidence.head].astype(np.float64))
    return by_scores(score(evidence, Steps(queries=queries)))
