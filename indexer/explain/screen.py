"""The columns in which a hypothesis is tried first: few, and those that tell most."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence, Ints
from indexer.explain.match import Bools, picked_blocks, score_agrees
from indexer.explain.prediction import Prediction, by_scores
from indexer.explain.replica import Scored

WIDE = 256
"""Blocks of a call up to which all columns are computed at once."""
DRAWN_COLUMNS = 16
"""Columns that are drawn whatever the engine has there."""
COLUMNS_A_ROW = 3
"""Of each row and kind."""
SCREENED_ROWS = 6


def narrowed(evidence: Evidence, right: Prediction) -> Evidence:
    """The same rows in a part of the columns: of each row some where the engine is wrong, some that it picks,
    and its ends; and some that are drawn, the same for the same call."""
    columns = evidence.num_score_blocks
    if columns <= WIDE:
        return evidence
    random = np.random.default_rng(columns)
    taken = [random.choice(columns, DRAWN_COLUMNS, replace=False)]
    visible = np.arange(columns) < evidence.num_blocks[:, None]
    if evidence.scores is not None:
        taken.append(_some(visible & ~score_agrees(right, evidence), random))
    if evidence.block_ids is not None:
        picked = picked_blocks(evidence.block_ids, columns)
        best = np.argsort(-np.nan_to_num(right.ranked.scores, nan=-np.inf), axis=1, kind="stable")
        wanted = picked_blocks(best[:, : evidence.case.topk].astype(np.int32), columns) & visible
        taken += [_some(cells, random) for cells in (picked & ~wanted, wanted & ~picked, picked & wanted)]
    ends = evidence.num_blocks[:, None] - np.arange(1, COLUMNS_A_ROW + 1)
    taken += [ends[ends >= 0], np.arange(COLUMNS_A_ROW)]
    return evidence.narrowed(np.unique(np.concatenate(taken)).astype(np.int64))


def _some(cells: Bools, random: np.random.Generator) -> Ints:
    """Columns of a few of each row's cells."""
    order = np.where(cells, random.random(cells.shape), 2.0)
    first = np.argpartition(order, COLUMNS_A_ROW, axis=1)[:, :COLUMNS_A_ROW]
    rows = np.arange(len(cells))[:, None]
    return np.asarray(first[cells[rows, first]], dtype=np.int64)


def few_faulty(evidence: Evidence, right: Prediction, wrong: Bools) -> Evidence:
    """A few rows of the shortest requests with what is wrong, narrowed: a fault that gives none of them is
    not tried on more."""
    rows = np.flatnonzero(wrong)
    order = np.argsort(evidence.seq_len[rows], kind="stable")
    few = np.sort(rows[order][:SCREENED_ROWS])
    scored = right.scores
    of_few = Scored(scored.scores[few], scored.num_blocks[few], scored.slack[few])
    return narrowed(evidence.subset(few), by_scores(of_few))
