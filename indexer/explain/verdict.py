"""The verdict on an engine's result: findings, causes and the counts of all rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
Grades = NDArray[np.int8]
Ids = NDArray[np.int32]
Ints = NDArray[np.int64]
Known = TypeVar("Known")

Kind = Literal["id", "selection", "order", "picked", "missed", "score"]
"""``id``: an entry of a row that breaks a rule of ids. ``selection``: a block that comes after one left out
by the engine's own scores. ``order``: ids not in the order stated. ``picked``: a block that should not be, by
the right scores. ``missed``: one that should. ``score``: a cell's score."""
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order in which a row's findings are listed."""
Verdict = Literal["tie", "rounding", "fault"]
"""``tie``: equal scores that changed places. ``rounding``: within what sums in fp32 may differ. ``fault``:
neither."""


@dataclass(frozen=True)
class Finding:
    """One place where an engine's result breaks a rule, or differs from the oracle.

    Attributes:
        request: of the batch.
        head: index head.
        token: query token, in the whole call.
        position: of the token in its request.
        block: logical block; -1 for an id that is no block of the row.
        kind: what differs.
        verdict: whether that is legal.
        expected: the right score of ``block``; for ``selection`` and ties by the engine's own scores, the
            engine's score of ``against``. None for an id that is no block of the row.
        got: the engine's score of ``block``, None if it was not recorded.
        margin: the right score less that of the row's k-th best block; for ``selection`` and ties by the
            engine's own scores, ``got`` less ``expected``. None without one.
        allowed: how far a score may be off, same unit; 0 by the engine's own scores.
        place: position in the row's ids, from 0; None for a score or a block that is not among them.
        id: what stands at ``place``; None without one.
        against: the block that it is held against: the best one left out, the worst one picked, or the
            neighbour that it is out of order with; for ``id`` the best of the right blocks that the row
            lacks. None without one.
        rule: the rule that is broken, or why it is legal, with its numbers.
    """

    request: int
    head: int
    token: int
    position: int
    block: int
    kind: Kind
    verdict: Verdict
    expected: float | None
    got: float | None
    margin: float | None
    allowed: float | None
    place: int | None
    id: int | None
    against: int | None
    rule: str


@dataclass(frozen=True)
class Cause:
    """A fault that was computed, and its result compared with the engine's.

    Attributes:
        name: the fault in a few words, the same in every report.
        family: the kind of fault.
        says: what the engine would have to do for it, and where to look.
        explained: faulty sampled rows that the fault gives exactly.
        faulty: faulty sampled rows.
        kept: right sampled rows that the fault leaves right.
        right: right sampled rows.
        fitted: 0 if nothing was fitted to the engine's result; more, the more could be.
        only: the part of the call that is at fault ("in head 2", "from position 4,096 on"), of which the
            sample is; None if it is all of it.
    """

    name: str
    family: str
    says: str
    explained: int
    faulty: int
    kept: int
    right: int
    fitted: int
    only: str | None = None


@dataclass(frozen=True)
class WrittenKeys:
    """Keys of this step, against the bytes that the engine's pages hold for them.

    Attributes:
        tokens: compared.
        wrong: of them, whose bytes are not the contract's.
        worst_request: where the first wrong one is, -1 if there is none.
        worst_position: its position there.
        cause: what explains them, None if nothing does or nothing is wrong.
    """

    tokens: int
    wrong: int
    worst_request: int
    worst_position: int
    cause: Cause | None


@dataclass(frozen=True)
class EngineVerdict:
    """The verdict on an engine's result.

    Attributes:
        ok: no row is faulty, none was left unjudged, and no key was written wrong.
        rows: judged; 0 if the engine recorded neither scores nor ids.
        unjudged_rows: rows whose query is not finite: nothing is right or wrong there.
        right_rows: equal to the oracle's selection and scores within rounding.
        tie_rows: differ by exchanged equal scores only.
        rounding_rows: differ by rounding only.
        fault_rows: differ by more.
        selection_fault_rows: faulty rows whose ids are not the best by the engine's own scores, or no
            selection at all; None if only one of the two was recorded.
        max_score_error: of a visible cell, in units of its ``sum_i |q_i k_i|``, ``WRONG_CELL_ERROR`` where
            ``unmeasured_cells`` has any; None without scores.
        max_measured_error: the largest of the cells in which both have a number; None without scores.
        unmeasured_cells: visible cells that are not equal and of which no error can be stated, by what they
            are: NaN, an infinity or a forced block's score on one side only, or where only one value is
            right. Each is a fault. None without scores.
        score_tolerance: largest error allowed, same unit.
        fault_rows_by_request: request to faulty rows, those with any.
        fault_rows_by_head: head to faulty rows, those with any.
        differences: how many there are, by kind and then by verdict, those with any.
        total_findings: how many there are.
        findings: the first of them by token and head, faults before all else, up to a limit.
        causes: the fault that explains the difference best, or several that cannot be told apart.
        candidates: others that explain a part, best first.
        untried: names of faults for which there was no time.
        written: of ``new_keys``; None without.
    """

    ok: bool
    rows: int
    unjudged_rows: int
    right_rows: int
    tie_rows: int
    rounding_rows: int
    fault_rows: int
    selection_fault_rows: int | None
    max_score_error: float | None
    max_measured_error: float | None
    unmeasured_cells: dict[str, int] | None
    score_tolerance: float
    fault_rows_by_request: dict[int, int]
    fault_rows_by_head: dict[int, int]
    differences: dict[Kind, dict[Verdict, int]]
    total_findings: int
    findings: tuple[Finding, ...]
    causes: tuple[Cause, ...]
    candidates: tuple[Cause, ...]
    untried: tuple[str, ...]
    written: WrittenKeys | None


# ---- Places where an engine's result differs, as arrays: a part may have millions ----

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

    def within(self, rows: Bools) -> Differences:
        """Those in the rows marked in ``[H, tokens]``."""
        kept = rows[self.cells[:, 0], self.cells[:, 1]]
        return replace(
            self,
            cells=self.cells[kept],
            grades=self.grades[kept],
            place=self.place[kept],
            against=self.against[kept],
        )


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


def known(value: Known | None) -> Known:
    """A value that the caller knows is there."""
    if value is None:
        raise AssertionError("a value that must be there is missing")
    return value


def picked_blocks(ids: Ids, columns: int) -> Bools:
    """``[..., columns]`` blocks that ids ``[..., k]`` hold; ids outside are left out."""
    held = np.zeros((*ids.shape[:-1], columns + 1), dtype=bool)
    inside = (ids >= 0) & (ids < columns)
    np.put_along_axis(held, np.where(inside, ids, columns).astype(np.int64), True, axis=-1)
    return held[..., :-1]


def places_of(ids: Ids, cells: Ints) -> Ints:
    """``[n]`` places in their rows' ids of the cells' blocks, the first of each; NONE if it has none."""
    found = ids[cells[:, 0], cells[:, 1]] == cells[:, 2, None]
    return np.where(found.any(axis=1), found.argmax(axis=1), NONE).astype(np.int64)
