"""What an engine with some fault would have recorded for a sample's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import Evidence
from indexer.explain.replica import Scored, Steps, score

Ids = NDArray[np.int32]
IdOrder = Literal["score", "lowest score", "block", "last block", "any"]
ReadIds = Callable[[Evidence, Ids], Ids]
"""Evidence and ids as the engine wrote them ``[R, k]`` to the blocks that they stand for."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a fault gives.

    Attributes:
        scores: what would be recorded as scores.
        ranked: what ids are selected by.
        topk: ids that a row has, the case's where None.
        order: of the ids in a row, the one stated where None.
        read_ids: which blocks the ids of an engine with this fault stand for, themselves where None.
    """

    scores: Scored
    ranked: Scored
    topk: int | None = None
    order: IdOrder | None = None
    read_ids: ReadIds | None = None


def by_contract(evidence: Evidence) -> Prediction:
    """What a right engine gives."""
    return by_scores(score(evidence))


def by_scores(scored: Scored) -> Prediction:
    """Ids that are selected by the scores that are recorded."""
    return Prediction(scored, scored)


def by_steps(steps: Callable[[Evidence], Steps]) -> Callable[[Evidence], Prediction]:
    """A prediction from the steps that a fault changes."""
    return lambda evidence: by_scores(score(evidence, steps(evidence)))
