"""Whether a prediction gives what the engine gave, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import Evidence
from indexer.explain.replica import Prediction
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Match:
    """Rows that a prediction gives, and how much of it the file could not tell.

    Attributes:
        rows: ``[R]``.
        cells: visible cells and ids that agree, to break ties of rows.
        unknown: cells of faulty rows that the file does not tell.
        told: ``[R]`` whether the file tells any cell that a row reads, or lacks none.
    """

    rows: Bools
    cells: int
    unknown: int
    told: Bools


def match(prediction: Prediction, evidence: Evidence) -> Match:
    """Hold a prediction against the engine's result."""
    right_blocks = evidence.position // BLOCK_TOKENS + 1
    scores = prediction.scores
    visible = np.arange(scores.shape[1]) < right_blocks[:, None]
    rows = np.ones(len(scores), dtype=bool)
    cells = 0
    unknown = np.isnan(scores) & visible
    if evidence.scores is not None:
        got = evidence.scores[:, : scores.shape[1]]
        with np.errstate(invalid="ignore"):
            near = np.abs(got.astype(np.float64) - scores.astype(np.float64)) <= prediction.slack[:, None]
        agrees = near | (got == scores) | (np.isnan(got) & np.isneginf(scores)) | unknown | ~visible
        rows &= agrees.all(axis=1)
        # Cells that no row sees may hold anything, but where they hold what a fault gives they speak for it.
        cells += int((agrees & visible & ~unknown).sum()) + int(((got == scores) & ~visible).sum())
    if evidence.block_ids is not None:
        chosen = _selected(prediction, evidence)
        rows &= chosen
        cells += int(chosen.sum())
    # A sentinel stands whatever the page holds: it tells nothing of what was read.
    read = visible & ~unknown & (scores < LOCAL_SCORE)
    told = np.asarray(read.any(axis=1) | ~unknown.any(axis=1))
    return Match(rows, cells, int(unknown[evidence.faulty].sum()), told)


def _selected(prediction: Prediction, evidence: Evidence) -> Bools:
    """Rows whose ids are a top-k of the prediction, equal and close scores in any order."""
    if evidence.block_ids is None:
        raise AssertionError("only asked for with ids")
    scores = prediction.scores if prediction.id_scores is None else prediction.id_scores
    num_blocks = prediction.num_blocks if prediction.id_blocks is None else prediction.id_blocks
    num_blocks = np.minimum(num_blocks, scores.shape[1])
    ids = evidence.block_ids
    is_id = ids >= 0
    in_row = is_id & (ids < num_blocks[:, None])
    held = np.zeros((len(scores), scores.shape[1] + 1), dtype=bool)
    np.put_along_axis(held, np.where(in_row, ids, scores.shape[1]).astype(np.int64), True, axis=1)
    picked: Bools = held[:, :-1]
    wanted = np.minimum(num_blocks, ids.shape[1])
    valid = (is_id == in_row).all(axis=1) & (picked.sum(axis=1) == wanted) & (is_id.sum(axis=1) == wanted)
    known = ~np.isnan(scores)
    visible = np.arange(scores.shape[1]) < num_blocks[:, None]
    worst = np.where(picked & known, scores, np.inf).min(axis=1, initial=np.inf).astype(np.float64)
    best = (
        np.where(visible & ~picked & known, scores, -np.inf).max(axis=1, initial=-np.inf).astype(np.float64)
    )
    with np.errstate(invalid="ignore"):
        fits = (best - worst <= 2 * prediction.slack) | (best <= worst)
    return np.asarray(valid & fits)
