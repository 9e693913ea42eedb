"""An engine's scores against the oracle's, cell by cell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.explain.differences import FAULT, Bools, Differences, differences
from indexer.oracle import WRONG_CELL_ERROR, OracleResult
from kernel.batch import LOCAL_SCORE

Floats = NDArray[np.float64]
MEASURED = 0
UNMEASURED = (
    "",
    "NaN",
    "infinite",
    "forced by the engine only",
    "forced by the contract only",
    "another forced score",
    "not exactly 0",
)
"""Why no error of a cell can be stated, by :func:`unmeasured`."""


@dataclass(frozen=True, eq=False)
class ScoreJudgement:
    """Cells of a part.

    Attributes:
        wrong: those that are faults: rounding of a score alone is not a difference.
        max_measured_error: of the cells that have one, in units of their bounds.
        unmeasured: how many have none though they must be equal and are not, by :data:`UNMEASURED`.
    """

    wrong: Differences
    max_measured_error: float
    unmeasured: dict[str, int]


def judge_scores(
    got: NDArray[np.float32], oracle: OracleResult, visible: Bools, tolerance: float
) -> ScoreJudgement:
    """Judge the scores ``[H, tokens, S]`` of the cells ``visible`` ``[H or 1, tokens, S]``."""
    cells = np.argwhere((got != oracle.scores) & visible)
    place = tuple(cells.T)
    have, want = got[place].astype(np.float64), oracle.scores[place].astype(np.float64)
    bound = oracle.bounds[place]
    why = unmeasured(have, want, bound)
    measured = why == MEASURED
    error = np.full(len(cells), WRONG_CELL_ERROR)
    np.divide(np.abs(have - want), bound, out=error, where=measured)
    faulty = ~measured | (error > tolerance)
    counts = np.bincount(why, minlength=len(UNMEASURED))
    return ScoreJudgement(
        wrong=differences("score", "score", cells[faulty], FAULT),
        max_measured_error=float(error[measured].max(initial=0.0)),
        unmeasured={name: int(n) for name, n in zip(UNMEASURED[1:], counts[1:].tolist()) if n},
    )


def unmeasured(have: Floats, want: Floats, bound: Floats) -> NDArray[np.int8]:
    """Which of :data:`UNMEASURED` holds for cells that differ: an engine's, the right score, its bound.

    An error in units of the bound says something of two numbers only: NaN compares with nothing, a forced
    block's score stands for no number, and a bound of 0 allows none but 0.
    """
    forced = want >= LOCAL_SCORE
    conditions = (
        np.isnan(have),
        np.isinf(have),
        ~forced & (have >= LOCAL_SCORE),
        forced & (have < LOCAL_SCORE),
        forced,
        bound == 0,
    )
    codes = [np.int8(i) for i in range(1, len(UNMEASURED))]
    return np.asarray(np.select(conditions, codes, MEASURED), dtype=np.int8)
