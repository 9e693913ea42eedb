"""Judges one part of an engine's result against the oracle: which rows differ, and by how much.

Three rules: a row's ids must be a valid selection, scores and selection must match the oracle within
rounding, and the selection must follow the engine's own scores exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from indexer.case import Case, EngineRecord
from indexer.explain.verdict import (
    FAULT,
    NONE,
    RIGHT,
    ROUNDING,
    TIE,
    UNJUDGED,
    Bools,
    Differences,
    Doubles,
    Floats,
    Grades,
    Ids,
    Ints,
    Rule,
    differences,
    picked_blocks,
    places_of,
)
from indexer.oracle import WRONG_CELL_ERROR, OracleResult
from kernel.batch import LOCAL_SCORE

# ---- Rows that hold a valid selection ----


@dataclass(frozen=True, eq=False)
class Picked:
    """What rows select.

    Attributes:
        blocks: ``[H, tokens, S]`` blocks that a row sees and selects.
        invalid: ``[H, tokens]`` rows whose ids are no valid selection.
        wrong: the entries that make them invalid, and each -1 before an id.
    """

    blocks: Bools
    invalid: Bools
    wrong: list[Differences]


def read_selection(ids: Ids, num_blocks: Ids, columns: int, order: str) -> Picked:
    """Check rows of ids.

    Args:
        ids: ``[H, tokens, k]``, -1 is no block.
        num_blocks: ``[tokens]`` blocks that a row sees: it must select k of them, or all if there are fewer.
        columns: S.
        order: the promised order of the ids; with ``any``, -1 may stand between them.
    """
    is_id = ids != NONE
    in_row = (ids >= 0) & (ids < num_blocks[:, None])
    blocks = picked_blocks(np.where(in_row, ids, np.int32(NONE)), columns)
    wanted = np.minimum(num_blocks, ids.shape[2])
    repeated = _repeated(ids, in_row, in_row.sum(axis=2) > blocks.sum(axis=2))
    too_few = is_id.sum(axis=2) < wanted
    followed = np.flip(np.logical_or.accumulate(np.flip(is_id, axis=2), axis=2), axis=2)
    gap = (~is_id & followed).any(axis=2) & ~too_few & (order != "any")
    first_none = np.zeros_like(is_id)
    np.put_along_axis(first_none, (~is_id).argmax(axis=2)[:, :, None], True, axis=2)
    entries: tuple[tuple[Rule, Bools], ...] = (
        ("below -1", ids < NONE),
        ("not of the row", is_id & ~in_row & (ids >= 0)),
        ("repeated", repeated),
        ("too few", first_none & too_few[:, :, None]),
        ("gap", first_none & gap[:, :, None]),
    )
    return Picked(
        blocks=blocks,
        invalid=(is_id & ~in_row).any(axis=2) | repeated.any(axis=2) | too_few,
        wrong=[_entries(ids, rule, at) for rule, at in entries],
    )


def _repeated(ids: Ids, in_row: Bools, rows: Bools) -> Bools:
    """Entries of the marked rows whose block stands at an earlier place of the row."""
    repeated = np.zeros(ids.shape, dtype=bool)
    some = ids[rows]
    order = np.argsort(some, axis=1, kind="stable")
    ascending = np.take_along_axis(some, order, axis=1)
    again = np.zeros(some.shape, dtype=bool)
    np.put_along_axis(again, order[:, 1:], ascending[:, 1:] == ascending[:, :-1], axis=1)
    repeated[rows] = again
    return repeated & in_row


def _entries(ids: Ids, rule: Rule, at: Bools) -> Differences:
    places = np.argwhere(at)
    block: Ints = np.full(len(places), NONE, dtype=np.int64)
    if rule == "repeated":
        block = ids[tuple(places.T)].astype(np.int64)
    cells = np.column_stack([places[:, :2], block])
    return differences("id", rule, cells, FAULT, place=places[:, 2])


# ---- The order of ids ----


def out_of_order(ids: Ids, order: str, oracle: OracleResult, allowed: Doubles, rows: Bools) -> Differences:
    """The first pair of neighbours of each row whose order rounding cannot explain.

    Args:
        ids: ``[H, tokens, k]``.
        order: ``score``, ``block`` or ``any``.
        oracle: the right scores.
        allowed: ``[H, tokens, S]`` largest error of a score.
        rows: ``[H, tokens]`` rows to check, all valid.
    """
    before, after = ids[:, :, :-1], ids[:, :, 1:]
    both = (before >= 0) & (after >= 0) & rows[:, :, None]
    if order == "block":
        return neighbours(ids, "ascending", both & (after < before), FAULT)
    if order == "any":
        return neighbours(ids, "descending", np.zeros_like(both), FAULT)
    columns = oracle.scores.shape[2]
    clipped = ids.clip(0, columns - 1).astype(np.int64)
    scores = np.take_along_axis(oracle.scores.astype(np.float64), clipped, axis=2)
    slack = np.take_along_axis(allowed, clipped, axis=2)
    with np.errstate(invalid="ignore"):  # ids that the row does not see, in rows that are not checked
        rises = scores[:, :, 1:] - scores[:, :, :-1] > slack[:, :, 1:] + slack[:, :, :-1]
    return neighbours(ids, "descending", both & rises, FAULT)


def neighbours(ids: Ids, rule: Rule, at: Bools, grade: int) -> Differences:
    """The first pair of neighbours of each row that is marked in ``at`` ``[H, tokens, k - 1]``.

    Either of the two may be out of place; the cell is the later one's, ``against`` the earlier one.
    """
    found = np.argwhere(at.any(axis=2))
    head, token = found[:, 0], found[:, 1]
    first = at[head, token].argmax(axis=1) if len(found) else np.zeros(0, dtype=np.int64)
    cells = np.column_stack([found, ids[head, token, first + 1]])
    return differences("order", rule, cells, grade, place=first + 1, against=ids[head, token, first])


# ---- Scores, cell by cell ----

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
"""Why a cell has no measurable error, by the code of :func:`unmeasured`."""


@dataclass(frozen=True, eq=False)
class ScoreJudgement:
    """Scores of a part.

    Attributes:
        wrong: faulty cells; the rounding of a score alone is not a difference.
        max_measured_error: largest measurable error, in units of the cell's bound.
        unmeasured: number of differing cells without a measurable error, by :data:`UNMEASURED`.
    """

    wrong: Differences
    max_measured_error: float
    unmeasured: dict[str, int]


def judge_scores(got: Floats, oracle: OracleResult, visible: Bools, tolerance: float) -> ScoreJudgement:
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


def unmeasured(have: Doubles, want: Doubles, bound: Doubles) -> Grades:
    """Index into :data:`UNMEASURED` of differing cells, from the engine's score, the right one and its bound.

    Only two finite numbers have an error in units of the bound: a forced block's score is a marker, and a
    bound of 0 allows 0 only.
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


# ---- The selection: by the right scores within rounding, by the engine's own exactly ----


def exchanged(
    ids: Ids, picked: Bools, oracle: OracleResult, visible: Bools, allowed: Doubles, rows: Bools
) -> list[Differences]:
    """Blocks that only one of the two selections holds.

    Args:
        ids: ``[H, tokens, k]``.
        picked: ``[H, tokens, S]`` the blocks among them.
        oracle: the right selection.
        visible: ``[tokens, S]``.
        allowed: ``[H, tokens, S]`` largest error of a score.
        rows: ``[H, tokens]`` rows to compare.
    """
    right = picked_blocks(oracle.block_ids, picked.shape[2])
    scores = oracle.scores.astype(np.float64)
    left = visible & ~picked
    kth = np.where(right, scores, np.inf).min(axis=2, initial=np.inf)[:, :, None]
    worst_picked = np.where(picked, scores + allowed, np.inf).min(axis=2, initial=np.inf)[:, :, None]
    best_left = np.where(left, scores - allowed, -np.inf).max(axis=2, initial=-np.inf)[:, :, None]
    only_picked, only_right = picked & ~right, right & ~picked
    sides: tuple[tuple[Literal["picked", "missed"], Bools, Bools, float, Bools], ...] = (
        ("picked", only_picked, only_right, 1.0, scores + allowed < best_left),
        ("missed", only_right, only_picked, -1.0, scores - allowed > worst_picked),
    )
    found = []
    for kind, own, others, sign, faulty in sides:
        cells = np.argwhere(own & rows[:, :, None])
        place = tuple(cells.T)
        equal = others & (scores == kth)
        row = cells[:, 0], cells[:, 1]
        tied = (scores == kth)[place] & equal.any(axis=2)[row]
        grades = np.where(faulty[place], FAULT, np.where(tied, TIE, ROUNDING)).astype(np.int8)
        farthest = np.where(others, sign * scores, -np.inf).argmax(axis=2)
        against = np.where(grades == TIE, equal.argmax(axis=2)[row], farthest[row])
        found.append(differences(kind, kind, cells, grades, place=places_of(ids, cells), against=against))
    return found


@dataclass(frozen=True, eq=False)
class OwnJudgement:
    """A selection against the engine's own scores.

    Attributes:
        not_best: ``[H, tokens]`` rows that leave out a block with a better score than one they select.
        misordered: ``[H, tokens]`` rows with a block after one of a worse score, where the promised order is
            that of the scores.
        wrong: a fault of each such row.
        ties: rows that prefer the higher id of equal scores.
    """

    not_best: Bools
    misordered: Bools
    wrong: list[Differences]
    ties: list[Differences]

    @property
    def faults(self) -> Bools:
        """Rows that the engine's own scores contradict."""
        return self.not_best | self.misordered


def judge_by_own_scores(
    ids: Ids, picked: Bools, own: Floats, visible: Bools, rows: Bools, by_score: bool
) -> OwnJudgement:
    """Judge rows by the engine's own scores; exactly, for it had no others.

    Args:
        ids: ``[H, tokens, k]``.
        picked: ``[H, tokens, S]`` the blocks among them.
        own: ``[H, tokens, S]``, NaN as ``-inf``.
        visible: ``[tokens, S]``.
        rows: ``[H, tokens]`` rows to judge, all valid.
        by_score: whether the promised order is that of the scores.
    """
    left = np.where(visible & ~picked, own, -np.inf)
    best = left.argmax(axis=2)  # the lowest id of equal ones
    best_left = np.take_along_axis(left, best[:, :, None], axis=2)[:, :, 0]
    held = np.where(picked, own, np.inf)
    worst = own.shape[2] - 1 - np.flip(held, axis=2).argmin(axis=2)  # the highest id of equal ones
    worst_held = np.take_along_axis(held, worst[:, :, None], axis=2)[:, :, 0]
    leaves_some = rows & (visible & ~picked).any(axis=2) & picked.any(axis=2)
    not_best = leaves_some & (best_left > worst_held)
    misordered = np.zeros_like(not_best)
    ties = leaves_some & (best_left == worst_held) & (best < worst)
    wrong = [_pairs(ids, "own best", FAULT, not_best, worst, best)]
    legal = [_pairs(ids, "own tie", TIE, ties, worst, best)]
    if by_score and ids.shape[2] > 1:
        clipped = ids.clip(0, own.shape[2] - 1).astype(np.int64)
        scores = np.take_along_axis(own, clipped, axis=2)
        both = (ids[:, :, :-1] >= 0) & (ids[:, :, 1:] >= 0) & rows[:, :, None]
        both &= ~not_best[:, :, None]  # a better block is missing there: its order says no more
        rises = both & (scores[:, :, 1:] > scores[:, :, :-1])
        equal = both & (scores[:, :, 1:] == scores[:, :, :-1]) & (ids[:, :, 1:] < ids[:, :, :-1])
        misordered |= rises.any(axis=2)
        wrong.append(neighbours(ids, "own descending", rises, FAULT))
        legal.append(neighbours(ids, "own tied order", equal & ~misordered[:, :, None], TIE))
    return OwnJudgement(not_best, misordered, wrong, legal)


def _pairs(ids: Ids, rule: Rule, grade: int, rows: Bools, worst: Ints, best: Ints) -> Differences:
    """The worst block that a row selects, against the best that it leaves out."""
    cells = np.column_stack([np.argwhere(rows), worst[rows]])
    place = places_of(ids, cells)
    return differences("selection", rule, cells, grade, place=place, against=best[rows])


@dataclass(frozen=True, eq=False)
class PartJudgement:
    """Rows of a part.

    Attributes:
        grades: ``[H, tokens]``, ``UNJUDGED`` to ``FAULT``.
        selection_faults: ``[H, tokens]`` rows whose ids are invalid or not the best by the engine's own
            scores; None unless both were recorded.
        scores: None if they were not recorded.
        differences: all of them.
    """

    grades: Grades
    selection_faults: Bools | None
    scores: ScoreJudgement | None
    differences: list[Differences]


def judge_part(
    case: Case, engine: EngineRecord, oracle: OracleResult, tolerance: float, judged: Bools
) -> PartJudgement:
    """Judge a part.

    Args:
        case: one request.
        engine: the engine's result.
        oracle: the right result.
        tolerance: in units of a cell's bound.
        judged: ``[H, tokens]`` rows to judge; the others stay ``UNJUDGED``.
    """
    num_blocks, columns = case.num_blocks_per_query(), oracle.scores.shape[2]
    visible = np.arange(columns) < num_blocks[:, None]
    forced = oracle.scores >= LOCAL_SCORE
    found: list[Differences] = []
    scores = selection_faults = None
    if engine.scores is not None:
        got = engine.scores[:, :, :columns]
        scores = judge_scores(got, oracle, visible & judged[:, :, None], tolerance)
        found.append(scores.wrong)
    if engine.block_ids is not None:
        ids = engine.block_ids
        picked = read_selection(ids, num_blocks, columns, engine.order)
        rows = judged & ~picked.invalid
        allowed = np.where(forced, 0.0, tolerance * oracle.bounds)
        found += [wrong.within(judged) for wrong in picked.wrong]
        found += exchanged(ids, picked.blocks, oracle, visible, allowed, rows)
        legal: list[Differences] = []
        # Ids that follow the engine's own scores are in another order only where a score is at fault.
        if engine.scores is None or engine.order == "block":
            found.append(out_of_order(ids, engine.order, oracle, allowed, rows))
        if engine.scores is not None:
            own = _by_own_scores(ids, engine.order, picked.blocks, got, oracle, visible, rows)
            found += own.wrong
            legal = own.ties
            selection_faults = judged & (picked.invalid | own.not_best)
        # A tie by the engine's own scores is reported only in rows without another difference.
        exact = _graded(judged, found) == RIGHT
        found += [ties.within(exact) for ties in legal]
    found = [one for one in found if len(one.cells)]
    return PartJudgement(_graded(judged, found), selection_faults, scores, found)


def _by_own_scores(
    ids: Ids, order: str, picked: Bools, got: Floats, oracle: OracleResult, visible: Bools, rows: Bools
) -> OwnJudgement:
    """Judge the selection by the recorded scores, or by those with the contract's blocks forced.

    An engine may force blocks in its selection only: then its scores are wrong, and its selection is not.
    """
    own = np.where(visible & ~np.isnan(got), got, np.float32(-np.inf))
    by_score = order == "score"
    judged = judge_by_own_scores(ids, picked, own, visible, rows, by_score)
    forced = (oracle.scores >= LOCAL_SCORE) & (own < LOCAL_SCORE)
    again = judged.faults & forced.any(axis=2)
    if not again.any():
        return judged
    own = np.where(forced, oracle.scores, own)
    forcing = judge_by_own_scores(ids, picked, own, visible, again, by_score)
    forgiven = again & ~forcing.faults
    ties = [one.within(~forgiven) for one in judged.ties] + [one.within(forgiven) for one in forcing.ties]
    wrong = [one.within(~forgiven) for one in judged.wrong]
    return OwnJudgement(judged.not_best & ~forgiven, judged.misordered & ~forgiven, wrong, ties)


def _graded(judged: Bools, found: Iterable[Differences]) -> Grades:
    """The worst grade of each row."""
    grades = np.where(judged, RIGHT, UNJUDGED).astype(np.int8)
    for one in found:
        np.maximum.at(grades, (one.cells[:, 0], one.cells[:, 1]), one.grades)
    return grades
