"""Checks a backend's answer to a case against the oracle and against what the case expects.

    case -> finite queries -> parts -> backend -> oracle -> errors and mismatched rows

An engine's recorded result, where the case has one, is judged by the same oracle.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import ml_dtypes
import numpy as np

from indexer.case import Case
from indexer.case.case import Part, parts
from indexer.explain import MAX_FINDINGS, EngineJudge, EngineVerdict
from indexer.explain.verdict import Bools, Floats, Ids
from indexer.oracle import WRONG_CELL_ERROR, in_pages, run_oracle, score_error, wrong_rows
from indexer.replay import load_case
from kernel.backends.base import SCORE_TOLERANCE, Precision

# ---- Rows whose queries are not finite: they have no right answer, other rows of their call do ----

CHUNK_TOKENS = 1 << 14
"""Queries that are widened at a time."""


@dataclass(frozen=True)
class NotFiniteRow:
    """A row that is not judged.

    Attributes:
        request: of the batch.
        head: index head.
        token: query token, in the whole call.
        position: of the token in its request.
        dim: the first of the query's 128 values that is not finite.
        value: that value: ``nan``, ``inf`` or ``-inf``.
    """

    request: int
    head: int
    token: int
    position: int
    dim: int
    value: str


def finite_rows(case: Case) -> Bools:
    """``[H, total_q]``: whether a row's query is finite."""
    finite = np.empty((case.total_q, case.num_heads), dtype=bool)
    for first in range(0, case.total_q, CHUNK_TOKENS):
        chunk = case.index_q[first : first + CHUNK_TOKENS].astype(np.float32)
        finite[first : first + CHUNK_TOKENS] = np.isfinite(chunk).all(axis=2)
    return np.asarray(finite.T)


def with_finite_queries(case: Case, finite: Bools) -> Case:
    """The same call with zeros for the queries of the other rows; itself if there are none."""
    if finite.all():
        return case
    queries = case.index_q.copy()
    queries[~finite.T] = 0
    return replace(case, index_q=queries)


def not_finite_rows(case: Case, finite: Bools) -> Iterator[NotFiniteRow]:
    """The rows that are not finite, by token and head."""
    positions = case.positions()
    for token, head in np.argwhere(~finite.T).tolist():
        request = int(case.requests_of(token))
        query = case.index_q[token, head].astype(np.float32)
        dim = int(np.flatnonzero(~np.isfinite(query))[0])
        yield NotFiniteRow(request, head, token, int(positions[token]), dim, str(float(query[dim])))


# ---- Verification ----

MAX_WHOLE_CELLS = 1 << 25
"""Scores of a call that is run as a whole: 128 MiB."""
MAX_PART_CELLS = 1 << 22
"""Scores of a part that is judged at a time; the oracle and the comparisons take some 100 bytes for each."""


@dataclass(frozen=True)
class Verification:
    """The comparison of one backend's answer to one case.

    Attributes:
        case: name of the case.
        backend: the backend that ran.
        ok: scores within the tolerance, no mismatched row, none left out, and no fault in an engine's result.
        rows: rows compared, one per query token and head.
        max_score_error: largest ``|score - right score|`` of a cell in units of the cell's
            ``sum_i |q_i k_i|``; :data:`WRONG_CELL_ERROR` if a sentinel or an invisible cell is
            not as it must be.
        score_tolerance: largest error allowed, same units.
        topk_mismatches: rows whose block ids are not the right selection.
        seconds: time of the backend: insert, score and select, cold.
        unjudged_rows: rows left out, by the backend too: their queries are not finite.
        not_finite: those rows, as many as findings are kept.
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
    unjudged_rows: int = 0
    not_finite: tuple[NotFiniteRow, ...] = ()
    engine: EngineVerdict | None = None

    @property
    def backend_ok(self) -> bool:
        """Whether the backend is right in the rows compared, whatever an engine's result of the case is."""
        return self.max_score_error <= self.score_tolerance and self.topk_mismatches == 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer:
    """A backend's answer to a case.

    Attributes:
        scores: ``[H, total_q, S]`` float32.
        block_ids: ``[H, total_q, k]`` int32, in order of score.
        num_blocks: ``[total_q]`` int32.
        backend: its name.
        precision: its precision.
    """

    scores: Floats
    block_ids: Ids
    num_blocks: Ids
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
    """Run a case on a backend and compare; judge an engine's result of it, where one was recorded.

    Rows whose queries are not finite are left out, and named: no answer to them is right. The backend scores
    zeros in their place.

    A call whose scores are larger than :data:`MAX_WHOLE_CELLS` is run in parts, which have the same rows.

    Raises:
        InvalidArgumentError: no such backend, or keys that are not finite.
        BackendUnavailableError: the backend cannot run here.
    """
    if case.rows * case.num_score_blocks <= MAX_WHOLE_CELLS:
        finite = with_finite_queries(case, finite_rows(case))
        began = time.perf_counter()
        answer = _answer(finite, backend, precision)
        return judge(case, name, answer, time.perf_counter() - began, max_findings)
    judged = _Judgement(case, SCORE_TOLERANCE[precision], max_findings)
    for part in parts(judged.case, MAX_PART_CELLS):
        began = time.perf_counter()
        answer = _answer(part.case, backend, precision)
        judged.seconds += time.perf_counter() - began
        judged.backend = answer.backend
        judged.add(part, answer.scores, answer.block_ids, answer.num_blocks)
    return judged.verification(name)


def judge(
    case: Case, name: str, answer: Answer, seconds: float, max_findings: int = MAX_FINDINGS
) -> Verification:
    """Compare an answer, wherever it was computed, with the oracle and with what the case expects.

    Args:
        case: the call.
        name: name of the case.
        answer: to a call with the case's own options; rows whose queries are not finite are left out.
        seconds: time that it took.
        max_findings: differences of an engine's result that are kept.
    """
    judged = _Judgement(case, SCORE_TOLERANCE[answer.precision], max_findings)
    judged.backend, judged.seconds = answer.backend, seconds
    for part in parts(judged.case, MAX_PART_CELLS):
        tokens = slice(part.first, part.first + part.case.total_q)
        judged.add(part, answer.scores[:, tokens], answer.block_ids[:, tokens], answer.num_blocks[tokens])
    if answer.scores.shape[2] < case.num_score_blocks:
        judged.error, judged.mismatches = WRONG_CELL_ERROR, judged.rows
    return judged.verification(name)


class _Judgement:
    """A backend's answer and an engine's result, judged part by part."""

    def __init__(self, case: Case, tolerance: float, max_findings: int) -> None:
        self._finite = finite_rows(case)
        self._not_finite = tuple(islice(not_finite_rows(case, self._finite), max_findings))
        self.case = with_finite_queries(in_pages(case), self._finite)
        self.rows = int(self._finite.sum())
        self._tolerance = tolerance
        self._engine = None
        if case.engine is not None:
            self._engine = EngineJudge(self.case, tolerance, max_findings, self._finite)
        self.backend, self.seconds = "", 0.0
        self.error, self.mismatches = 0.0, 0

    def add(self, part: Part, scores: Floats, block_ids: Ids, num_blocks: Ids) -> None:
        """Compare the answer to one part with the oracle's."""
        case = part.case
        oracle = run_oracle(case)
        rows = self._finite[:, part.first : part.first + case.total_q]
        for right in (oracle.scores, case.expected_scores):
            if right is not None:
                self.error = max(self.error, score_error(scores[rows], right[rows], oracle.bounds[rows]))
        sees_others = not np.array_equal(num_blocks, case.num_blocks_per_query())
        if scores.shape[2] < case.num_score_blocks or sees_others:
            self.mismatches += int(rows.sum())  # a row that sees other blocks is another row
        else:
            wrong = wrong_rows(case, scores, block_ids, oracle, self._tolerance)
            self.mismatches += int((wrong & rows).sum())
        if self._engine is not None:
            self._engine.add(part, oracle)

    def verification(self, name: str) -> Verification:
        engine = None if self._engine is None else self._engine.verdict()
        right = self.error <= self._tolerance and self.mismatches == 0
        unjudged = self._finite.size - self.rows
        return Verification(
            case=name,
            backend=self.backend,
            ok=right and not unjudged and (engine is None or engine.ok),
            rows=self.rows,
            max_score_error=self.error,
            score_tolerance=self._tolerance,
            topk_mismatches=self.mismatches,
            seconds=self.seconds,
            unjudged_rows=unjudged,
            not_finite=self._not_finite,
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


# ---- Self-test ----

REQUESTS = ((2500, 24), (0, 0), (300, 20), (129, 3), (1, 1))
"""(keys, queries): more blocks than a row selects, an empty request, rows that straddle a block, one key."""


def selftest_case(num_heads: int = 4, seed: int = 0) -> Case:
    """A small case that tells within a second whether a backend computes right on this machine.

    Ragged prefill and decode rows on normal keys with a few strong channels; nothing is forced, since a
    forced last block would hide a fault in the causal mask.
    """
    generator = np.random.default_rng(seed)
    channels = np.exp(generator.normal(0, 0.7, 128))
    seq_lens, query_lens = np.array(REQUESTS, dtype=np.int32).T
    keys = generator.normal(size=(seq_lens.sum(), 128)) * channels
    queries = generator.normal(size=(query_lens.sum(), num_heads, 128))
    return Case(
        index_q=queries.astype(ml_dtypes.bfloat16),
        index_k=keys.astype(ml_dtypes.bfloat16),
        cu_seqlens_q=np.cumsum([0, *query_lens], dtype=np.int32),
        seq_lens=np.ascontiguousarray(seq_lens),
        local_blocks=0,
        topk=16,
        source=f"self-test, seed {seed}",
    )


def run_selftest(backend: str = "auto", precision: Precision = "exact") -> Verification:
    """Verify a backend on the self-test case.

    Raises:
        BackendUnavailableError: the backend cannot run here.
    """
    return verify_case(selftest_case(), "selftest", backend, precision=precision)
