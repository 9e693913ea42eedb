"""Whether a prediction gives what the engine gave, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import Evidence, Floats, Ints
from indexer.explain.prediction import IdOrder, Ids, Prediction
from indexer.explain.replica import right_queries
from kernel.backends.reference.formats import E4M3_MAX
from kernel.batch import LOCAL_SCORE

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Match:
    """Rows that a prediction gives, and how much of it the file could not tell.

    Attributes:
        rows: ``[R]``.
        cells: visible cells and ids that agree, to break ties of rows.
        unknown: cells of faulty rows that the file does not tell.
        told: ``[R]`` whether the file tells any cell that a row reads, or lacks none.
    """

    rows: Bools
    cells: int
    unknown: int
    told: Bools


def match(prediction: Prediction, evidence: Evidence) -> Match:
    """Hold a prediction against the engine's result."""
    scores = prediction.scores.scores
    visible = np.arange(scores.shape[1]) < evidence.num_blocks[:, None]
    rows = np.ones(len(scores), dtype=bool)
    cells = 0
    unknown = np.isnan(scores) & visible
    if evidence.scores is not None:
        got = evidence.scores[:, : scores.shape[1]]
        agrees = score_agrees(prediction, evidence) | ~visible
        rows &= agrees.all(axis=1)
        # Cells that no row sees may hold anything, but where they hold what a fault gives they speak for it.
        cells += int((agrees & visible & ~unknown).sum()) + int(((got == scores) & ~visible).sum())
    if evidence.block_ids is not None:
        chosen = ids_agree(prediction, evidence)
        rows &= chosen
        cells += int(chosen.sum())
    # A sentinel stands whatever the page holds: it tells nothing of what was read.
    read = visible & ~unknown & (scores < LOCAL_SCORE)
    told = np.asarray(read.any(axis=1) | ~unknown.any(axis=1))
    return Match(rows, cells, int(unknown[evidence.faulty].sum()), told)


def score_agrees(prediction: Prediction, evidence: Evidence) -> Bools:
    """``[R, S]`` cells whose recorded score is the predicted one, or one that is not known and some page's
    content could give."""
    if evidence.scores is None:
        raise AssertionError("only asked for with scores")
    scores = prediction.scores.scores
    got = evidence.scores[:, : scores.shape[1]]
    with np.errstate(invalid="ignore"):
        near = np.abs(got.astype(np.float64) - scores) <= prediction.scores.slack
    open_cells = np.isnan(scores)
    if open_cells.any():
        open_cells &= possible_scores(evidence)
    if evidence.blocks is not None:
        computed = np.zeros(scores.shape[1], dtype=bool)
        computed[evidence.blocks] = True
        open_cells |= np.isnan(scores) & ~computed
    return np.asarray(near | (got == scores) | (np.isnan(got) & np.isneginf(scores)) | open_cells)


def possible_scores(evidence: Evidence) -> Bools:
    """``[R, S]`` recorded scores that a page of some content gives: no key exceeds 448, and none is NaN, so
    that ``|score| <= 448 * sum_i |q_i|``, and fp32 rounding."""
    if evidence.scores is None:
        raise AssertionError("only asked for with scores")
    got = evidence.scores[:, : evidence.num_score_blocks].astype(np.float64)
    most = E4M3_MAX * np.abs(right_queries(evidence).astype(np.float64)).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(got) <= most[:, None] * (1 + evidence.tolerance))


def ids_agree(prediction: Prediction, evidence: Evidence) -> Bools:
    """``[R]`` rows whose ids are a top-k of the prediction, equal and close scores in any order, and in the
    order stated."""
    if evidence.block_ids is None:
        raise AssertionError("only asked for with ids")
    written = evidence.block_ids
    ids = written if prediction.read_ids is None else prediction.read_ids(evidence, written)
    scores, slack = prediction.ranked.scores, prediction.ranked.slack
    num_blocks = np.minimum(prediction.ranked.num_blocks, scores.shape[1])
    is_id = ids >= 0
    in_row = is_id & (ids < num_blocks[:, None])
    picked = picked_blocks(np.where(in_row, ids, -1), scores.shape[1])
    wanted = np.minimum(num_blocks, prediction.topk or evidence.case.topk)
    valid = (is_id == in_row).all(axis=1) & (picked.sum(axis=1) == wanted) & (is_id.sum(axis=1) == wanted)
    known = ~np.isnan(scores)
    visible = np.arange(scores.shape[1]) < num_blocks[:, None]
    with np.errstate(invalid="ignore"):
        low, high = scores - slack, scores + slack
    worst = np.where(picked & known, high, np.inf).min(axis=1, initial=np.inf)
    best = np.where(visible & ~picked & known, low, -np.inf).max(axis=1, initial=-np.inf)
    fits = best <= worst
    order = prediction.order or evidence.order
    if order != "any":
        fits &= _in_order(ids, written, order, low, high)
    return np.asarray(valid & fits)


def picked_blocks(ids: Ids, columns: int) -> Bools:
    """``[R, columns]`` blocks that ids ``[R, k]`` hold; ids outside are left out."""
    held = np.zeros((len(ids), columns + 1), dtype=bool)
    inside = (ids >= 0) & (ids < columns)
    np.put_along_axis(held, np.where(inside, ids, columns).astype(np.int64), True, axis=1)
    return held[:, :-1]


def _in_order(ids: Ids, written: Ids, order: IdOrder, low: Floats, high: Floats) -> Bools:
    """``[R]`` rows whose ids ascend or descend as ``order`` says, ``-1`` behind them."""
    is_id = ids >= 0
    padded = (is_id[:, 1:] <= is_id[:, :-1]).all(axis=1)
    if order in ("block", "last block"):
        ascends = _ascends(ids, order) | _ascends(written, order)  # by what they stand for, or as numbers
        return np.asarray(padded & ascends)
    place = ids.clip(0, low.shape[1] - 1).astype(np.int64)
    floor = np.where(is_id, np.take_along_axis(low, place, axis=1), -np.inf)
    ceiling = np.where(is_id, np.take_along_axis(high, place, axis=1), np.inf)
    if order == "lowest score":
        floor, ceiling = np.where(is_id, -ceiling, -np.inf), np.where(is_id, -floor, np.inf)
    before = np.minimum.accumulate(np.where(np.isnan(ceiling), np.inf, ceiling), axis=1)[:, :-1]
    after = np.where(np.isnan(floor), -np.inf, floor)[:, 1:]
    return np.asarray(padded & (after <= before).all(axis=1))


def _ascends(ids: Ids, order: IdOrder) -> Bools:
    both = (ids[:, 1:] >= 0) & (ids[:, :-1] >= 0)
    step = np.diff(ids.astype(np.int64), axis=1)
    if order == "last block":
        step = -step
    return np.asarray(((step > 0) | ~both).all(axis=1))


def disagreements(evidence: Evidence, right: Prediction) -> Ints:
    """``[R]`` how many independent things a row has otherwise than the contract, as bits that chance would
    need: 8 for a score; for ids ``2 m - 1`` of ``m`` wrong blocks, or one less than the ids out of place.

    One wrong block is worth one bit only: that a row's k-th and next block change places is what noise does
    first, and what many a fault does.
    """
    bits = np.zeros(len(evidence.request), dtype=np.int64)
    scores = right.scores.scores
    if evidence.scores is not None:
        visible = np.arange(scores.shape[1]) < evidence.num_blocks[:, None]
        bits += 8 * (visible & ~score_agrees(right, evidence)).sum(axis=1)
    if evidence.block_ids is not None:
        best = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=1, kind="stable")
        k = evidence.block_ids.shape[1]
        wanted = np.full(evidence.block_ids.shape, -1, dtype=np.int32)
        count = min(k, best.shape[1])
        seen = np.arange(count) < evidence.num_blocks[:, None]
        wanted[:, :count] = np.where(seen, best[:, :count], -1)
        if evidence.order == "block":
            last = np.iinfo(np.int32).max
            wanted = np.sort(np.where(wanted < 0, last, wanted), axis=1)
            wanted[wanted == last] = -1
        held = (evidence.block_ids[:, :, None] == wanted[:, None, :]).any(axis=2).sum(axis=1)
        displaced = np.zeros(len(bits), dtype=np.int64)
        if evidence.order != "any":
            displaced = (evidence.block_ids != wanted).sum(axis=1)
        bits += np.maximum(np.maximum(2 * (k - held) - 1, displaced - 1), 0)
    return bits
