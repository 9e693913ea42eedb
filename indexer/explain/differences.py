"""Places of a part where an engine's result differs, as arrays: a part may have millions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from indexer.explain.engine_verdict import Kind, Verdict

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Grades = NDArray[np.int8]
UNJUDGED, RIGHT, TIE, ROUNDING, FAULT = range(-1, 4)
"""Grades of a row, the worst of what differs in it."""
VERDICTS: dict[int, Verdict] = {TIE: "tie", ROUNDING: "rounding", FAULT: "fault"}
NONE = -1
"""No block, no place."""

Rule = Literal[
    "below -1",
    "not of the row",
    "repeated",
    "too few",
    "gap",
    "own best",
    "own tie",
    "ascending",
    "descending",
    "own descending",
    "own tied order",
    "picked",
    "missed",
    "score",
]


@dataclass(frozen=True, eq=False)
class Differences:
    """Places that differ by one rule.

    Attributes:
        kind: what differs.
        rule: that is broken.
        cells: ``[n, 3]``: head, token of the part, block or :data:`NONE`.
        grades: ``[n]``, :data:`TIE` to :data:`FAULT`.
        place: ``[n]`` position in the row's ids or :data:`NONE`.
        against: ``[n]`` the block it is held against or :data:`NONE`.
    """

    kind: Kind
    rule: Rule
    cells: Ints
    grades: Grades
    place: Ints
    against: Ints


def differences(
    kind: Kind,
    rule: Rule,
    cells: Ints,
    grades: Grades | int,
    *,
    place: Ints | None = None,
    against: Ints | None = None,
) -> Differences:
    """Places of one rule; one grade may stand for all."""
    count = len(cells)
    nothing = np.broadcast_to(np.int64(NONE), (count,))
    return Differences(
        kind,
        rule,
        cells.astype(np.int64, copy=False).reshape(count, 3),
        np.broadcast_to(np.asarray(grades, dtype=np.int8), (count,)),
        nothing if place is None else place.astype(np.int64, copy=False),
        nothing if against is None else against.astype(np.int64, copy=False),
    )


def places_of(ids: NDArray[np.int32], cells: Ints) -> Ints:
    """Where the rows' ids hold the cells' blocks: ``[n]``, the first place."""
    found = ids[cells[:, 0], cells[:, 1]] == cells[:, 2, None]
    return np.where(found.any(axis=1), found.argmax(axis=1), NONE).astype(np.int64)
