"""Whether a backend computes a case right: against the oracle, and against what the case expects."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from indexer.case.part import Part, parts
from indexer.explain import MAX_FINDINGS, EngineJudge, EngineVerdict
from indexer.oracle import OracleResult, in_pages, run_oracle, select
from indexer.replay import load_case
from kernel.backends.base import SCORE_TOLERANCE, Precision
from kernel.batch import LOCAL_SCORE

WRONG_CELL_ERROR = sys.float_info.max
"""Error of a cell that must be equal and is not (sentinel, ``-inf``, NaN): finite, as JSON needs it."""

MAX_WHOLE_CELLS = 1 << 25
"""Scores of a call that is run as a whole: 128 MiB."""
MAX_PART_CELLS = 1 << 22
"""Scores of a part that is judged at a time; the oracle and the comparisons take some 100 bytes for each."""


@dataclass(frozen=True)
class Verification:
    """What one backend made of one case.

    Attributes:
        case: name of the case.
        backend: the backend that ran.
        ok: scores within the tolerance, no mismatched row, and no fault in an engine's result.
        rows: rows compared, one per query token and head.
        max_score_error: largest ``|score - right score|`` of a cell in units of the cell's
            ``sum_i |q_i k_i|``; :data:`WRONG_CELL_ERROR` if a sentinel or an invisible cell is
            not as it must be.
        score_tolerance: largest error allowed, same units.
        topk_mismatches: rows whose block ids are not the right selection.
        seconds: time of the backend: insert, score and select, cold.
        engine: what is said about an engine's result; None for a case without.
    """

    case: str
    backend: str
    ok: bool
    rows: int
    max_score_error: float
    score_tolerance: float
    topk_mismatches: int
    seconds: float
    engine: EngineVerdict | None = None

    @property
    def backend_ok(self) -> bool:
        """Whether the backend is right, whatever an engine made of the case."""
        return self.max_score_error <= self.score_tolerance and self.topk_mismatches == 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer:
    """What a backend made of a case.

    Attributes:
        scores: ``[H, total_q, S]`` float32.
        block_ids: ``[H, total_q, k]`` int32, in order of score.
        num_blocks: ``[total_q]`` int32.
        backend: its name.
        precision: its precision.
    """

    scores: NDArray[np.float32]
    block_ids: NDArray[np.int32]
    num_blocks: NDArray[np.int32]
    backend: str
    precision: Precision


def verify_case(
    case: Case,
    name: str,
    backend: str = "auto",
    *,
    precision: Precision = "exact",
    max_findings: int = MAX_FINDINGS,
) -> Verification:
    """Run a case on a backend and compare; judge what an engine made of it, where that was recorded.

    A call whose scores are larger than :data:`MAX_WHOLE_CELLS` is run in parts, which have the same rows.

    Raises:
        InvalidArgumentError: no such backend, or keys or queries that are not finite.
        BackendUnavailableError: the backend cannot run here.
    """
    if case.rows * case.num_score_blocks <= MAX_WHOLE_CELLS:
        began = time.perf_counter()
        answer = _answer(case, backend, precision)
        return judge(case, name, answer, time.perf_counter() - began, max_findings)
    held = in_pages(case)
    judged = _Judgement(held, SCORE_TOLERANCE[precision], max_findings)
    for part in parts(held, MAX_PART_CELLS):
        began = time.perf_counter()
        answer = _answer(part.case, backend, precision)
        judged.add(part, answer, time.perf_counter() - began)
    return judged.verification(name)


def judge(
    case: Case, name: str, answer: Answer, seconds: float, max_findings: int = MAX_FINDINGS
) -> Verification:
    """Compare an answer, wherever it was computed, with the oracle and with what the case expects.

    Args:
        case: the call.
        name: name of the case.
        answer: to a call with the case's own options.
        seconds: time that it took.
        max_findings: differences of an engine's result that are kept.
    """
    held = in_pages(case)
    judged = _Judgement(held, SCORE_TOLERANCE[answer.precision], max_findings)
    judged.backend, judged.seconds = answer.backend, seconds
    for part in parts(held, MAX_PART_CELLS):
        tokens = slice(part.first, part.first + part.case.total_q)
        judged.add(
            part,
            replace(
                answer,
                scores=answer.scores[:, tokens],
                block_ids=answer.block_ids[:, tokens],
                num_blocks=answer.num_blocks[tokens],
            ),
            0.0,
        )
    if answer.scores.shape[2] < case.num_score_blocks:
        judged.error, judged.mismatches = WRONG_CELL_ERROR, case.rows
    return judged.verification(name)


class _Judgement:
    """A backend's answer and an engine's result, judged part by part."""

    def __init__(self, case: Case, tolerance: float, max_findings: int) -> None:
        self._case, self._tolerance = case, tolerance
        self._engine = None if case.engine is None else EngineJudge(case, tolerance, max_findings)
        self.backend, self.seconds = "", 0.0
        self.error, self.mismatches = 0.0, 0

    def add(self, part: Part, answer: Answer, seconds: float) -> None:
        case, scores = part.case, answer.scores
        oracle = run_oracle(case)
        self.backend = answer.backend
        self.seconds += seconds
        self.error = max(self.error, score_error(scores, oracle.scores, oracle.bounds))
        if case.expected_scores is not None:
            self.error = max(self.error, score_error(scores, case.expected_scores, oracle.bounds))
        sees_others = not np.array_equal(answer.num_blocks, case.num_blocks_per_query())
        if scores.shape[2] < case.num_score_blocks or sees_others:
            self.mismatches += case.rows  # a row that sees other blocks is another row
        else:
            self.mismatches += mismatched_rows(case, scores, answer.block_ids, oracle, self._tolerance)
        if self._engine is not None:
            self._engine.add(part, oracle)

    def verification(self, name: str) -> Verification:
        engine = None if self._engine is None else self._engine.verdict()
        right = self.error <= self._tolerance and self.mismatches == 0
        return Verification(
            case=name,
            backend=self.backend,
            ok=right and (engine is None or engine.ok),
            rows=self._case.rows,
            max_score_error=self.error,
            score_tolerance=self._tolerance,
            topk_mismatches=self.mismatches,
            seconds=self.seconds,
            engine=engine,
        )


def _answer(case: Case, backend: str, precision: Precision) -> Answer:
    result = load_case(case, backend, precision=precision).score()
    if result.scores is None:
        raise AssertionError("scores were asked for")
    return Answer(
        scores=result.scores.cpu().numpy(),
        block_ids=result.block_ids.cpu().numpy(),
        num_blocks=result.num_blocks.cpu().numpy(),
        backend=result.backend,
        precision=precision,
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
