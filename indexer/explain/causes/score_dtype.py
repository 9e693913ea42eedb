"""Scores in a type of 16 bits: what is compared, or only what is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from indexer.explain.evidence import Evidence, Floats
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.match import ids_agree
from indexer.explain.prediction import Prediction, by_contract
from indexer.explain.replica import Scored, score
from kernel.batch import INIT_SCORE, LOCAL_SCORE

FAMILY = "rounding of scores"
LEAST_CAP = 2.0**15
"""An engine of float16 may cap its sentinels at any finite value above its scores."""
Cast = Callable[[Floats], Floats]
Sentinels = dict[float, float]
"""What stands in the place of each."""


def hypotheses(evidence: Evidence, narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    # The right ids are a selection by rounded scores as well: equal ones may change places.
    ids_are_right = evidence.block_ids is None or bool(ids_agree(by_contract(evidence), evidence).all())
    found = []
    # Blocks that float16 makes equal, bfloat16 makes equal, too: of the two the finer one is taken.
    for fitted, (dtype, cast, step) in enumerate(
        (("float16", to_float16, "0.05 %"), ("bfloat16", to_bfloat16, "0.4 %")), start=1
    ):
        sentinels = _sentinels(narrow, cast)
        if evidence.block_ids is None:
            name = f"scores are rounded to {dtype}"
            says = (
                "Harmless for ids that were selected before the rounding; by rounded scores, blocks that "
                f"differ by less than {step} are equal and change places."
            )
        elif ids_are_right:
            name = f"scores are rounded to {dtype} after the selection"
            says = "The ids are right: harmless where only ids are used, a fault where scores are compared."
        else:
            name = f"scores are rounded to {dtype} before the selection"
            says = (
                f"Blocks whose scores differ by less than {step} are equal: the k-th one and the next may "
                "change places, and any two in the order. The selection must compare fp32."
            )
            if evidence.scores is None:
                says += (
                    " Ids alone do not tell it from noise below that, as of sums in 16 bits: record scores."
                )
        found.append(
            Hypothesis(
                name,
                FAMILY,
                says,
                lambda e, cast=cast, sentinels=sentinels, right=ids_are_right: _predicted(  # type: ignore[misc]
                    e, cast, sentinels, right
                ),
                fitted=fitted,
            )
        )
    return found


def to_bfloat16(values: Floats) -> Floats:
    """Values rounded to bfloat16, to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, rounded.astype(np.uint32).view(np.float32))


def to_float16(values: Floats) -> Floats:
    """Values rounded to float16, infinite where they exceed it."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _sentinels(evidence: Evidence, cast: Cast) -> Sentinels:
    """Written as they are, rounded, or, for float16, capped: whichever the engine has in all its rows."""
    right = score(evidence).scores
    found = {}
    for sentinel in (INIT_SCORE, LOCAL_SCORE):
        rounded = float(cast(np.array([sentinel], dtype=np.float32))[0])
        found[sentinel] = rounded
        if evidence.scores is None:
            continue
        got = np.unique(evidence.scores[:, : right.shape[1]][right == np.float32(sentinel)])
        if len(got) == 1 and (
            got[0] == np.float32(sentinel) or (np.isinf(rounded) and LEAST_CAP <= got[0] < LOCAL_SCORE)
        ):
            found[sentinel] = float(got[0])
    return found


def _predicted(evidence: Evidence, cast: Cast, sentinels: Sentinels, ids_are_right: bool) -> Prediction:
    right = score(evidence)
    scores = cast(right.scores)
    with np.errstate(invalid="ignore"):
        above = cast(right.scores + right.slack) - scores
        below = scores - cast(right.scores - right.slack)
    slack = np.nan_to_num(np.maximum(above, below), nan=0.0, posinf=0.0)
    for sentinel, value in sentinels.items():
        scores = np.where(right.scores == np.float32(sentinel), np.float32(value), scores)
    slack = np.where(right.scores >= LOCAL_SCORE, np.float32(0), slack).astype(np.float32)
    rounded: Scored = replace(right, scores=scores, slack=slack)
    return Prediction(rounded, right if ids_are_right else rounded)
