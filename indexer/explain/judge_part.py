"""One part of an engine's result against the oracle: which rows differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case, EngineRecord
from indexer.explain.differences import RIGHT, UNJUDGED, Bools, Differences, Grades, differences
from indexer.explain.judge_ids import Picked, picked_blocks
from indexer.explain.judge_order import out_of_order
from indexer.explain.judge_scores import ScoreJudgement, judge_scores
from indexer.explain.judge_selection import OwnJudgement, exchanged, judge_by_own_scores
from indexer.oracle import OracleResult
from kernel.batch import LOCAL_SCORE


@dataclass(frozen=True, eq=False)
class PartJudgement:
    """Rows of a part.

    Attributes:
        grades: ``[H, tokens]``, ``UNJUDGED`` to ``FAULT``.
        selection_faults: ``[H, tokens]``: ids that are no selection, or not the best by the engine's own
            scores; None unless both were recorded.
        scores: of the scores; None without them.
        differences: every place that differs.
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
        case: of one request.
        engine: its result.
        oracle: the right one.
        tolerance: in units of the cells' bounds.
        judged: ``[H, tokens]`` rows to look at; the others are of the grade ``UNJUDGED``.
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
        picked = picked_blocks(ids, num_blocks, columns, engine.order)
        rows = judged & ~picked.invalid
        allowed = np.where(forced, 0.0, tolerance * oracle.bounds)
        found += [_within(wrong, judged) for wrong in picked.wrong]
        found += exchanged(ids, picked.blocks, oracle, visible, allowed, rows)
        legal: list[Differences] = []
        # Ids that follow the engine's own scores are in another order only where a score is at fault.
        if engine.scores is None or engine.order == "block":
            found.append(out_of_order(ids, engine.order, oracle, allowed, rows))
        if engine.scores is not None:
            own = _by_own_scores(engine, picked, got, oracle, visible, rows)
            found += own.wrong
            legal = own.ties
            selection_faults = judged & (picked.invalid | own.not_best)
        # A tie by the engine's own scores is told where nothing else is: by the oracle it was told above.
        exact = _graded(judged, found) == RIGHT
        found += [_within(ties, exact) for ties in legal]
    found = [one for one in found if len(one.cells)]
    return PartJudgement(_graded(judged, found), selection_faults, scores, found)


def _by_own_scores(
    engine: EngineRecord,
    picked: Picked,
    got: NDArray[np.float32],
    oracle: OracleResult,
    visible: Bools,
    rows: Bools,
) -> OwnJudgement:
    """Judge the selection by the scores recorded, or by those with the contract's forced blocks put in.

    An engine may force blocks in its selection only: its scores are wrong then, and its selection is not.
    """
    if engine.block_ids is None:
        raise AssertionError("only asked for with ids")
    own = np.where(visible & ~np.isnan(got), got, np.float32(-np.inf))
    by_score = engine.order == "score"
    judged = judge_by_own_scores(engine.block_ids, picked.blocks, own, visible, rows, by_score)
    forced = (oracle.scores >= LOCAL_SCORE) & (own < LOCAL_SCORE)
    again = judged.faults & forced.any(axis=2)
    if not again.any():
        return judged
    own = np.where(forced, oracle.scores, own)
    forcing = judge_by_own_scores(engine.block_ids, picked.blocks, own, visible, again, by_score)
    forgiven = again & ~forcing.faults
    ties = [_within(one, ~forgiven) for one in judged.ties] + [_within(one, forgiven) for one in forcing.ties]
    wrong = [_within(one, ~forgiven) for one in judged.wrong]
    return OwnJudgement(judged.not_best & ~forgiven, judged.misordered & ~forgiven, wrong, ties)


def _within(places: Differences, rows: Bools) -> Differences:
    """Those of the rows given."""
    kept = rows[places.cells[:, 0], places.cells[:, 1]]
    return differences(
        places.kind,
        places.rule,
        places.cells[kept],
        places.grades[kept],
        place=places.place[kept],
        against=places.against[kept],
    )


def _graded(judged: Bools, found: Iterable[Differences]) -> Grades:
    """The worst grade of each row."""
    grades = np.where(judged, RIGHT, UNJUDGED).astype(np.int8)
    for one in found:
        np.maximum.at(grades, (one.cells[:, 0], one.cells[:, 1]), one.grades)
    return grades
