"""Ids that are all off by the same number, more than one."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import Ids, Prediction
from indexer.explain.replica import score

FAMILY = "meaning of ids"
NO_BLOCK = np.int32(np.iinfo(np.int32).max)


def hypotheses(evidence: Evidence, _narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    offset = 0 if evidence.block_ids is None else _offset(evidence, evidence.block_ids)
    if abs(offset) < 2:
        return []
    return [
        Hypothesis(
            f"ids are {abs(offset)} too {'high' if offset > 0 else 'low'}",
            FAMILY,
            f"Block b is written as b {'+' if offset > 0 else '-'} {abs(offset)}: ids must start at the "
            "request's first block.",
            lambda e: _moved(e, offset),
            fitted=1,
        )
    ]


def _offset(evidence: Evidence, ids: Ids) -> int:
    """The distance of most rows' ids from those of the best blocks; 0 if they are not at one distance."""
    scores = score(evidence).scores
    best = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=1, kind="stable")
    distances = []
    for row in np.flatnonzero(evidence.faulty):
        held = np.sort(ids[row][ids[row] != -1]).astype(np.int64)
        wanted = np.sort(best[row, : min(evidence.num_blocks[row], ids.shape[1])])
        if len(held) == len(wanted) and len(held) and np.ptp(held - wanted) == 0:
            distances.append(int(held[0] - wanted[0]))
    values, counts = np.unique(np.array(distances or [0]), return_counts=True)
    return int(values[counts.argmax()])


def _moved(evidence: Evidence, offset: int) -> Prediction:
    def read(_evidence: Evidence, ids: Ids) -> Ids:
        blocks = ids.astype(np.int64) - offset
        return np.where(ids == -1, ids, np.where(blocks < 0, NO_BLOCK, blocks)).astype(np.int32)

    right = score(evidence)
    return Prediction(right, right, read_ids=read)
