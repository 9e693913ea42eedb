"""Scores times a constant: the selection is the same."""

from __future__ import annotations

import math

import numpy as np

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import Prediction
from indexer.explain.replica import Scored, score
from kernel.batch import LOCAL_SCORE
from kernel.contract import HEAD_DIM

FAMILY = "scale of scores"
LEAST_CELLS = 4
KNOWN = {
    HEAD_DIM**-0.5: "1/sqrt(128), the softmax scale",
    HEAD_DIM**-0.5 / math.log(2): "log2(e)/sqrt(128), the softmax scale for exp2",
    1 / math.log(2): "log2(e)",
    1 / HEAD_DIM: "1/128",
    HEAD_DIM**0.5: "sqrt(128)",
    1 / 448: "1/448, a query's scale",
    1 / 2688: "1/2688, the global scale of NVFP4",
    0.5: "1/2",
    2.0: "2",
}


def hypotheses(_evidence: Evidence, narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    if narrow.scores is None:
        return []
    right = score(narrow)
    got = narrow.scores[:, : right.scores.shape[1]].astype(np.float64)
    with np.errstate(invalid="ignore"):
        usable = (np.abs(right.scores) > 100 * right.slack) & (right.scores < LOCAL_SCORE)
        usable &= np.isfinite(right.scores) & (np.abs(got) < LOCAL_SCORE / 1e6) & narrow.faulty[:, None]
    want, have = right.scores[usable].astype(np.float64), got[usable]
    if len(want) < LEAST_CELLS:
        return []
    factor = float(np.median(have / want))
    inlier = np.abs(have - factor * want) <= 0.02 * np.abs(factor * want)
    if factor <= 0 or inlier.sum() < 0.5 * len(want):
        return []
    factor = float((have[inlier] * want[inlier]).sum() / np.square(want[inlier]).sum())
    if abs(factor - 1) < 1e-3:
        return []
    known = [words for value, words in KNOWN.items() if abs(factor / value - 1) < 1e-4]
    with np.errstate(invalid="ignore"):
        forced = right.scores >= LOCAL_SCORE
        with_sentinels = bool((np.abs(got / (factor * right.scores) - 1) < 1e-3)[forced].any())
    return [
        Hypothesis(
            f"scores are multiplied by {factor:.6g}" + (f" ({known[0]})" if known else ""),
            FAMILY,
            "Every score has this factor" + (", sentinels too" if with_sentinels else "") + ". The selection "
            "is the same: harmless where only ids are used, a fault where scores are compared.",
            lambda e: _scaled(e, factor, with_sentinels),
            fitted=1,
        )
    ]


def _scaled(evidence: Evidence, factor: float, with_sentinels: bool) -> Prediction:
    right = score(evidence)
    scaled = (factor * right.scores.astype(np.float64)).astype(np.float32)
    if not with_sentinels:
        scaled = np.where(right.scores >= LOCAL_SCORE, right.scores, scaled)
    slack = (factor * right.slack + 1e-6 * np.abs(np.nan_to_num(scaled, posinf=0, neginf=0))).astype("f4")
    return Prediction(Scored(scaled, right.num_blocks, slack), right)
