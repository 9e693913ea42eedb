"""An engine's selection against the right scores, within rounding, and against its own, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.explain.differences import (
    FAULT,
    ROUNDING,
    TIE,
    Bools,
    Differences,
    Ints,
    Rule,
    differences,
    places_of,
)
from indexer.explain.judge_order import neighbours
from indexer.oracle import OracleResult

Ids = NDArray[np.int32]
Scores = NDArray[np.float32]


def exchanged(
    ids: Ids, picked: Bools, oracle: OracleResult, visible: Bools, allowed: NDArray[np.float64], rows: Bools
) -> list[Differences]:
    """Blocks that only one of the two selections holds.

    Args:
        ids: ``[H, tokens, k]``.
        picked: ``[H, tokens, S]`` the blocks among them.
        oracle: the right one.
        visible: ``[tokens, S]``.
        allowed: ``[H, tokens, S]`` how far a score may be off.
        rows: ``[H, tokens]`` to compare.
    """
    right = np.zeros((*picked.shape[:2], picked.shape[2] + 1), dtype=bool)
    places = np.where(oracle.block_ids < 0, picked.shape[2], oracle.block_ids).astype(np.int64)
    np.put_along_axis(right, places, True, axis=2)
    right = right[:, :, :-1]
    scores = oracle.scores.astype(np.float64)
    left = visible & ~picked
    kth = np.where(right, scores, np.inf).min(axis=2, initial=np.inf)[:, :, None]
    worst_picked = np.where(picked, scores + allowed, np.inf).min(axis=2, initial=np.inf)[:, :, None]
    best_left = np.where(left, scores - allowed, -np.inf).max(axis=2, initial=-np.inf)[:, :, None]
    found = []
    for kind in ("picked", "missed"):
        if kind == "picked":
            cells_of, faulty = picked & ~right, scores + allowed < best_left
            others, sign = right & ~picked, 1.0
        else:
            cells_of, faulty = right & ~picked, scores - allowed > worst_picked
            others, sign = picked & ~right, -1.0
        cells = np.argwhere(cells_of & rows[:, :, None])
        place = tuple(cells.T)
        equal = others & (scores == kth)
        row = cells[:, 0], cells[:, 1]
        tied = (scores == kth)[place] & equal.any(axis=2)[row]
        grades = np.where(faulty[place], FAULT, np.where(tied, TIE, ROUNDING)).astype(np.int8)
        farthest = np.where(others, sign * scores, -np.inf).argmax(axis=2)
        against = np.where(grades == TIE, equal.argmax(axis=2)[row], farthest[row])
        if kind == "picked":
            at = places_of(ids, cells)
            found.append(differences("picked", "picked", cells, grades, place=at, against=against))
        else:
            found.append(differences("missed", "missed", cells, grades, against=against))
    return found


@dataclass(frozen=True, eq=False)
class OwnJudgement:
    """A selection by the scores that it was made from.

    Attributes:
        not_best: ``[H, tokens]`` rows that leave out a block of a better score than one they pick.
        misordered: ``[H, tokens]`` rows that hold a block after one of a worse score, though they promise
            the order of scores.
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
    ids: Ids, picked: Bools, own: Scores, visible: Bools, rows: Bools, by_score: bool
) -> OwnJudgement:
    """Judge rows by the engine's own scores; exactly, for it had no others.

    Args:
        ids: ``[H, tokens, k]``.
        picked: ``[H, tokens, S]`` the blocks among them.
        own: ``[H, tokens, S]``, NaN as ``-inf``.
        visible: ``[tokens, S]``.
        rows: ``[H, tokens]`` that hold a selection.
        by_score: whether the ids are promised in the order of the scores.
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
    """The worst block that a row picks and the best that it leaves."""
    cells = np.column_stack([np.argwhere(rows), worst[rows]])
    place = places_of(ids, cells)
    return differences("selection", rule, cells, grade, place=place, against=best[rows])
