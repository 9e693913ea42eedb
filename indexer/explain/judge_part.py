"""One part of an engine's result against the oracle: which rows differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case, EngineRecord
from indexer.case.part import Part
from indexer.explain.engine_verdict import Finding, Kind, Verdict
from indexer.oracle import OracleResult
from kernel.batch import LOCAL_SCORE

Bools = NDArray[np.bool_]
RIGHT, TIE, ROUNDING, FAULT = range(4)
"""Grades of a row, the worst of what differs in it."""
VERDICTS: tuple[Verdict, ...] = ("tie", "rounding", "fault")


@dataclass(frozen=True, eq=False)
class PartJudgement:
    """Rows of a part.

    Attributes:
        grades: ``[H, tokens]``, :data:`RIGHT` to :data:`FAULT`.
        selection_faults: ``[H, tokens]``: ids that are not the best by the engine's own scores; None unless
            both were recorded.
        max_score_error: in units of the cell's bound; None without scores.
        differences: every cell that differs: head, token of the part, block, kind, grade.
    """

    grades: NDArray[np.int8]
    selection_faults: Bools | None
    max_score_error: float | None
    differences: list[tuple[Kind, NDArray[np.int64], NDArray[np.int8]]]


def judge_part(case: Case, engine: EngineRecord, oracle: OracleResult, tolerance: float) -> PartJudgement:
    """Judge a part.

    Args:
        case: of one request.
        engine: its result.
        oracle: the right one.
        tolerance: in units of the cells' bounds.
    """
    num_blocks = case.num_blocks_per_query()
    visible = np.arange(oracle.scores.shape[2]) < num_blocks[:, None]
    forced = oracle.scores >= LOCAL_SCORE
    allowed = np.where(forced, 0.0, tolerance * oracle.bounds)
    grades = np.zeros(oracle.scores.shape[:2], dtype=np.int8)
    differences: list[tuple[Kind, NDArray[np.int64], NDArray[np.int8]]] = []

    def add(kind: Kind, cells: NDArray[np.int64], cell_grades: NDArray[np.int8]) -> None:
        if len(cells):
            differences.append((kind, cells, cell_grades))
            np.maximum.at(grades, (cells[:, 0], cells[:, 1]), cell_grades)

    error = selection_faults = None
    if engine.scores is not None:
        got = engine.scores[:, :, : oracle.scores.shape[2]]
        cells, cell_grades, error = _score_cells(got, oracle, visible, forced, tolerance)
        faulty = cell_grades == FAULT
        add("score", cells[faulty], cell_grades[faulty])  # rounding of a score alone is not a difference
    if engine.block_ids is not None:
        ids = engine.block_ids
        picked, invalid = _picked(ids, num_blocks, oracle.scores.shape[2], case.topk)
        rows = np.argwhere(invalid)
        cells = np.column_stack([rows, np.full(len(rows), -1)])
        add("id", cells, np.full(len(rows), FAULT, dtype=np.int8))
        for kind, cells, cell_grades in _exchanged(picked, oracle, visible, allowed, ~invalid):
            add(kind, cells, cell_grades)
        add("order", *_out_of_order(ids, engine.order, oracle, allowed, ~invalid))
        if engine.scores is not None:
            own = np.where(visible, np.nan_to_num(got, nan=-np.inf), -np.inf)
            worst = np.where(picked, own, np.inf).min(axis=2, initial=np.inf)
            best = np.where(visible & ~picked, own, -np.inf).max(axis=2, initial=-np.inf)
            selection_faults = invalid | (best > worst)
    return PartJudgement(grades, selection_faults, error, differences)


def findings(
    part: Part, engine: EngineRecord, oracle: OracleResult, judged: PartJudgement, tolerance: float
) -> Iterator[Finding]:
    """The differences of a part, one after another."""
    case = part.case
    position = int(case.seq_lens[0]) - case.total_q
    ordered = np.sort(oracle.scores, axis=2)[:, :, ::-1]
    for kind, cells, grades in judged.differences:
        for (head, token, block), grade in zip(cells.tolist(), grades.tolist()):
            last = min(case.topk, (position + token) // 128 + 1) - 1
            kth = float(ordered[head, token, last])
            expected = got = allowed = None
            if block >= 0:
                expected = float(oracle.scores[head, token, block])
                allowed = (
                    0.0 if expected >= LOCAL_SCORE else tolerance * float(oracle.bounds[head, token, block])
                )
                got = None if engine.scores is None else float(engine.scores[head, token, block])
            ordinary = expected is not None and expected < LOCAL_SCORE and kth < LOCAL_SCORE
            yield Finding(
                request=part.request,
                head=head,
                token=part.first + token,
                position=position + token,
                block=block,
                kind=kind,
                verdict=VERDICTS[grade - 1],
                expected=expected,
                got=got,
                margin=expected - kth if ordinary and expected is not None else None,
                allowed=allowed,
            )


def _score_cells(
    got: NDArray[np.float32], oracle: OracleResult, visible: Bools, forced: Bools, tolerance: float
) -> tuple[NDArray[np.int64], NDArray[np.int8], float]:
    """Visible cells whose score differs, their grades, and the largest error of an ordinary one."""
    cells = np.argwhere((got != oracle.scores) & visible)
    place = tuple(cells.T)
    have, want, bound = (
        got[place].astype(np.float64),
        oracle.scores[place].astype(np.float64),
        oracle.bounds[place],
    )
    exact = ~np.isfinite(have) | ~np.isfinite(want) | forced[place] | (have >= LOCAL_SCORE) | (bound == 0)
    with np.errstate(invalid="ignore"):
        error = np.abs(have - want) / np.where(exact, 1.0, bound)
    grades = np.where(exact | (error > tolerance), FAULT, ROUNDING).astype(np.int8)
    return cells, grades, float(error[~exact].max(initial=0.0))


def _picked(
    ids: NDArray[np.int32], num_blocks: NDArray[np.int32], columns: int, topk: int
) -> tuple[Bools, Bools]:
    """The blocks that rows pick ``[H, tokens, columns]``, and rows whose ids are no selection."""
    is_id = ids >= 0
    in_row = is_id & (ids < num_blocks[:, None])
    picked = np.zeros((*ids.shape[:2], columns + 1), dtype=bool)
    np.put_along_axis(picked, np.where(in_row, ids, columns).astype(np.int64), True, axis=2)
    picked = picked[:, :, :-1]
    wanted = np.minimum(num_blocks, topk)
    invalid = (is_id & ~in_row).any(axis=2) | (is_id.sum(axis=2) != wanted) | (picked.sum(axis=2) != wanted)
    return picked, invalid


def _exchanged(
    picked: Bools, oracle: OracleResult, visible: Bools, allowed: NDArray[np.float64], rows: Bools
) -> Iterator[tuple[Kind, NDArray[np.int64], NDArray[np.int8]]]:
    """Blocks that only one of the two selections holds, in valid rows."""
    right = np.zeros((*picked.shape[:2], picked.shape[2] + 1), dtype=bool)
    ids = np.where(oracle.block_ids < 0, picked.shape[2], oracle.block_ids).astype(np.int64)
    np.put_along_axis(right, ids, True, axis=2)
    right = right[:, :, :-1]
    scores = oracle.scores.astype(np.float64)
    kth = np.where(right, scores, np.inf).min(axis=2, initial=np.inf)[:, :, None]
    worst_picked = np.where(picked, scores + allowed, np.inf).min(axis=2, initial=np.inf)[:, :, None]
    best_left = np.where(visible & ~picked, scores - allowed, -np.inf).max(axis=2, initial=-np.inf)[
        :, :, None
    ]
    for kind, cells_of, faulty in (
        ("picked", picked & ~right, scores + allowed < best_left),
        ("missed", right & ~picked, scores - allowed > worst_picked),
    ):
        cells = np.argwhere(cells_of & rows[:, :, None])
        place = tuple(cells.T)
        tied = np.broadcast_to(scores == kth, scores.shape)[place]
        grades = np.where(faulty[place], FAULT, np.where(tied, TIE, ROUNDING)).astype(np.int8)
        yield ("picked" if kind == "picked" else "missed"), cells, grades


def _out_of_order(
    ids: NDArray[np.int32], order: str, oracle: OracleResult, allowed: NDArray[np.float64], rows: Bools
) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """Rows whose ids are not in the order stated, at the first block that is out of place."""
    if order == "any" or ids.shape[2] < 2:
        return np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=np.int8)
    before, after = ids[:, :, :-1], ids[:, :, 1:]
    wrong = (before < 0) & (after >= 0)
    both = (before >= 0) & (after >= 0)
    columns = oracle.scores.shape[2]
    place_before, place_after = before.clip(0, columns - 1), after.clip(0, columns - 1)
    if order == "block":
        wrong |= both & (after <= before)
    else:
        scores = oracle.scores.astype(np.float64)

        def at(values: NDArray[np.float64], place: NDArray[np.int32]) -> NDArray[np.float64]:
            return np.take_along_axis(values, place.astype(np.int64), axis=2)

        slack = at(allowed, place_before) + at(allowed, place_after)
        with np.errstate(invalid="ignore"):  # ids of blocks that a row does not see; those rows are left out
            wrong |= both & (at(scores, place_after) - at(scores, place_before) > slack)
    wrong &= rows[:, :, None]
    found = np.argwhere(wrong.any(axis=2))
    first = wrong[tuple(found.T)].argmax(axis=1)
    blocks = place_after[found[:, 0], found[:, 1], first]
    return np.column_stack([found, blocks]), np.full(len(found), FAULT, dtype=np.int8)
