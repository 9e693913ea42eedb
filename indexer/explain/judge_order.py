"""Whether an engine's ids stand in the order that they are promised in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.explain.differences import FAULT, Bools, Differences, Rule, differences
from indexer.oracle import OracleResult

Ids = NDArray[np.int32]


def out_of_order(
    ids: Ids, order: str, oracle: OracleResult, allowed: NDArray[np.float64], rows: Bools
) -> Differences:
    """The first two neighbours of each row that are in no order that rounding could give.

    Args:
        ids: ``[H, tokens, k]``.
        order: ``score``, ``block`` or ``any``.
        oracle: the right scores.
        allowed: ``[H, tokens, S]`` how far a score may be off.
        rows: ``[H, tokens]`` that hold a selection.
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
    with np.errstate(invalid="ignore"):  # ids of blocks that a row does not see; those rows are left out
        rises = scores[:, :, 1:] - scores[:, :, :-1] > slack[:, :, 1:] + slack[:, :, :-1]
    return neighbours(ids, "descending", both & rises, FAULT)


def neighbours(ids: Ids, rule: Rule, at: Bools, grade: int) -> Differences:
    """The first pair of neighbours of each row that is marked in ``at`` ``[H, tokens, k - 1]``.

    The pair does not tell which of the two is out of place: the cell is the later one's, held against the
    earlier one.
    """
    found = np.argwhere(at.any(axis=2))
    head, token = found[:, 0], found[:, 1]
    first = at[head, token].argmax(axis=1) if len(found) else np.zeros(0, dtype=np.int64)
    cells = np.column_stack([found, ids[head, token, first + 1]])
    return differences("order", rule, cells, grade, place=first + 1, against=ids[head, token, first])
