"""The right blocks of a row in an order that is not the one stated."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import IdOrder, Ids, Prediction, ReadIds
from indexer.explain.replica import score

FAMILY = "order of ids"
SAYS = "The rows hold the right blocks, but {0}; engine_order states {1}."
ORDERS: tuple[tuple[IdOrder, str, str], ...] = (
    ("block", "ids are sorted by block", "by ascending block"),
    ("score", "ids are sorted by score", "by descending score"),
    ("lowest score", "ids are sorted from the lowest score up", "by ascending score"),
    ("last block", "ids are sorted from the last block down", "by descending block"),
)


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    stated = evidence.order
    if evidence.block_ids is None or stated == "any":
        return []
    must = "by score" if stated == "score" else "by block"
    found = [
        _ordered(f"{name}, not {must}", SAYS.format(f"sorted {how}", stated), order)
        for order, name, how in ORDERS
        if order != stated
    ]
    found.append(
        _ordered("-1 stands before the ids", SAYS.format("behind the filling", stated), stated, _filled_last)
    )
    found.append(
        _ordered(
            "ids are not in the order stated", SAYS.format("in no order known here", stated), "any", fitted=3
        )
    )
    return found


def _ordered(
    name: str, says: str, order: IdOrder, read: ReadIds | None = None, fitted: int = 0
) -> Hypothesis:
    def predict(evidence: Evidence) -> Prediction:
        right = score(evidence)
        return Prediction(right, right, order=order, read_ids=read)

    return Hypothesis(name, FAMILY, says, predict, fitted)


def _filled_last(_evidence: Evidence, ids: Ids) -> Ids:
    return np.take_along_axis(ids, np.argsort(ids < 0, axis=1, kind="stable"), axis=1)
