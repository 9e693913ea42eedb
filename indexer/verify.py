"""Whether a backend computes a case right: against the oracle, and against what the case expects."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from indexer.oracle import OracleResult, run_oracle, select
from indexer.replay import load_case
from kernel.backends.base import SCORE_TOLERANCE, Precision
from kernel.batch import LOCAL_SCORE

WRONG_CELL_ERROR = sys.float_info.max
"""Error of a cell that must be equal and is not (sentinel, ``-inf``, NaN): finite, as JSON needs it."""


@dataclass(frozen=True)
class Verification:
    """What one backend made of one case.

    Attributes:
        case: name of the case.
        backend: the backend that ran.
        ok: scores within the tolerance and no mismatched row.
        rows: rows compared, one per query token and head.
        max_score_error: largest ``|score - right score|`` of a cell in units of the cell's
            ``sum_i |q_i k_i|``; :data:`WRONG_CELL_ERROR` if a sentinel or an invisible cell is
            not as it must be.
        score_tolerance: largest error allowed, same units.
        topk_mismatches: rows whose block ids are not the right selection.
        seconds: time of the backend: insert, score and select, cold.
    """

    case: str
    backend: str
    ok: bool
    rows: int
    max_score_error: float
    score_tolerance: float
    topk_mismatches: int
    seconds: float


def verify_case(
    case: Case, name: str, backend: str = "auto", *, precision: Precision = "exact"
) -> Verification:
    """Run a case on a backend and compare.

    Raises:
        InvalidArgumentError: no such backend, or keys or queries that are not finite.
        BackendUnavailableError: the backend cannot run here.
    """
    began = time.perf_counter()
    result = load_case(case, backend, precision=precision).score()
    if result.scores is None:
        raise AssertionError("scores were asked for")
    scores, block_ids = result.scores.cpu().numpy(), result.block_ids.cpu().numpy()
    seconds = time.perf_counter() - began
    tolerance = SCORE_TOLERANCE[precision]
    oracle = run_oracle(case)
    error = score_error(scores, oracle.scores, oracle.bounds)
    if case.expected_scores is not None:
        error = max(error, score_error(scores, case.expected_scores, oracle.bounds))
    mismatches = mismatched_rows(case, scores, block_ids, oracle, tolerance)
    return Verification(
        case=name,
        backend=result.backend,
        ok=error <= tolerance and mismatches == 0,
        rows=case.rows,
        max_score_error=error,
        score_tolerance=tolerance,
        topk_mismatches=mismatches,
        seconds=seconds,
    )


def score_error(
    scores: NDArray[np.float32], right: NDArray[np.float32], bounds: NDArray[np.float64]
) -> float:
    """Largest error of ``[H, total_q, S]`` scores in units of ``bounds``.

    Columns past the narrower array's must be ``-inf``: no row sees them.
    """
    width = bounds.shape[2]
    for array in (scores, right):
        if array.shape[2] < width or not np.isneginf(array[:, :, width:]).all():
            return WRONG_CELL_ERROR
    got, want = scores[:, :, :width], right[:, :, :width]
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
    """Rows whose ids are not the right selection.

    The ids must be the exact top-k of the backend's own scores. They must also be the oracle's, and the
    expected ones where the case has them, but for blocks that change places because their scores are so close
    that the tolerance of the two cells covers the difference. Blocks of equal score, for the backend and for
    the oracle, may not: ties go to the lower id. Expected ids must themselves be a selection of the row, and
    the exact top-k of the expected scores where the case has both.
    """
    wrong = (block_ids != select(scores, case)).any(axis=2)
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
    return int(wrong.sum())


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
