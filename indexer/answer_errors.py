"""How far a backend's answer is from the right one: errors of scores, and rows of other blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from indexer.oracle import WRONG_CELL_ERROR, OracleResult, select
from kernel.batch import LOCAL_SCORE


def score_error(
    scores: NDArray[np.float32], right: NDArray[np.float32], bounds: NDArray[np.float64]
) -> float:
    """Largest error of scores ``[..., S]`` in units of ``bounds``.

    Columns past the narrower array's must be ``-inf``: no row sees them.
    """
    width = bounds.shape[-1]
    for array in (scores, right):
        if array.shape[-1] < width or not np.isneginf(array[..., width:]).all():
            return WRONG_CELL_ERROR
    got, want = scores[..., :width], right[..., :width]
    differs = got != want  # NaN differs from everything
    if not differs.any():
        return 0.0
    got, want, bounds = got[differs], want[differs], bounds[differs]
    exact = ~np.isfinite(got) | ~np.isfinite(want) | (want >= LOCAL_SCORE) | (bounds == 0)
    if exact.any():
        return WRONG_CELL_ERROR
    return float((np.abs(got.astype(np.float64) - want.astype(np.float64)) / bounds).max())


def mismatched_rows(
    case: Case,
    scores: NDArray[np.float32],
    block_ids: NDArray[np.int32],
    oracle: OracleResult,
    tolerance: float,
) -> int:
    """How many :func:`wrong_rows` there are."""
    return int(wrong_rows(case, scores, block_ids, oracle, tolerance).sum())


def wrong_rows(
    case: Case,
    scores: NDArray[np.float32],
    block_ids: NDArray[np.int32],
    oracle: OracleResult,
    tolerance: float,
) -> NDArray[np.bool_]:
    """``[H, total_q]``: rows whose ids are not the right selection.

    The ids must be the exact top-k of the backend's own scores. They must also be the oracle's, and the
    expected ones where the case has them, but for blocks that change places because their scores are so close
    that the tolerance of the two cells covers the difference. Blocks of equal score, for the backend and for
    the oracle, may not: ties go to the lower id. Expected ids must themselves be a selection of the row, and
    the exact top-k of the expected scores where the case has both.
    """
    wrong: NDArray[np.bool_] = (block_ids != select(scores, case)).any(axis=2)
    rankings = [oracle.block_ids]
    if case.expected_block_ids is not None:
        rankings.append(case.expected_block_ids)
        wrong |= ~_is_selection(case.expected_block_ids, case)
        if case.expected_scores is not None:
            wrong |= (case.expected_block_ids != select(case.expected_scores, case)).any(axis=2)
    for ranking in rankings:
        suspect = (block_ids != ranking).any(axis=2) & ~wrong
        for head, token in np.argwhere(suspect):
            cell = (head, token)
            wrong[cell] = not _close_exchange(
                block_ids[cell],
                ranking[cell],
                own_scores=scores[cell],
                right_scores=oracle.scores[cell],
                allowed=tolerance * oracle.bounds[cell],
            )
    return wrong


def _is_selection(block_ids: NDArray[np.int32], case: Case) -> NDArray[np.bool_]:
    """Which rows of ``[H, total_q, k]`` ids hold distinct blocks of the row, as many as it can select, and -1
    after them: ``[H, total_q]``."""
    num_blocks = case.num_blocks_per_query()[:, None]
    selects = np.arange(case.topk) < num_blocks
    in_place = np.where(selects, (block_ids >= 0) & (block_ids < num_blocks), block_ids == -1)
    ascending = np.sort(block_ids, axis=2)
    repeated = (ascending[:, :, 1:] == ascending[:, :, :-1]) & (ascending[:, :, 1:] >= 0)
    selections: NDArray[np.bool_] = in_place.all(axis=2) & ~repeated.any(axis=2)
    return selections


def _close_exchange(
    got: NDArray[np.int32],
    want: NDArray[np.int32],
    *,
    own_scores: NDArray[np.float32],
    right_scores: NDArray[np.float32],
    allowed: NDArray[np.float64],
) -> bool:
    """Whether any two blocks that the selections ``got`` and ``want`` rank differently are within tolerance
    and not tied. ``own_scores`` are those that ``got`` was selected by."""
    blocks = np.union1d(got[got >= 0], want[want >= 0])
    got_rank, want_rank = _ranks(got, blocks), _ranks(want, blocks)
    exchanged = (got_rank[:, None] < got_rank) & (want_rank[:, None] > want_rank)
    values = right_scores[blocks].astype(np.float64)
    close = np.abs(values[:, None] - values) <= allowed[blocks][:, None] + allowed[blocks]
    own = own_scores[blocks]
    close &= (values[:, None] != values) | (own[:, None] != own)
    # A block that only one of the two holds is exchanged with every block that only the other holds.
    return bool((close | ~exchanged).all())


def _ranks(ids: NDArray[np.int32], blocks: NDArray[np.int32]) -> NDArray[np.int64]:
    found = blocks[:, None] == ids
    return np.where(found.any(axis=1), found.argmax(axis=1), ids.size)
