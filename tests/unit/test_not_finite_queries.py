"""Rows whose queries are not finite are left out and named; all others of the call are judged."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import indexer.verify
from indexer.case import Case, read_case
from indexer.explain.evidence import gather_evidence
from indexer.explain.verdict import FAULT, RIGHT, UNJUDGED
from indexer.verify import NotFiniteRow, verify_case
from tests.support.judged import TOPK, recorded, right_case, with_result
from tests.support.raw_case import small_case
from tests.support.real_cases import CUT

ROWS = (
    NotFiniteRow(request=0, head=1, token=1, position=299, dim=17, value="nan"),
    NotFiniteRow(request=1, head=0, token=3, position=2598, dim=5, value="inf"),
)


@pytest.fixture(scope="module")
def case() -> Case:
    """An engine's result for queries two of which are not finite."""
    case = right_case()
    queries = case.index_q.copy()
    queries[1, 1, 17:19] = np.nan
    queries[3, 0, 5] = np.inf
    return dataclasses.replace(case, index_q=queries)


@pytest.mark.parametrize("max_whole_cells", [1 << 25, 1])
def test_the_others_are_judged(case: Case, max_whole_cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer.verify, "MAX_WHOLE_CELLS", max_whole_cells)
    result = verify_case(case, "case", "cpu")
    assert result.not_finite == ROWS
    assert (result.rows, result.unjudged_rows) == (case.rows - 2, 2)
    assert result.backend_ok
    assert not result.ok, "two rows were not shown to be right"
    assert result.engine is not None
    assert not result.engine.ok
    assert (result.engine.rows, result.engine.right_rows) == (case.rows - 2, case.rows - 2)
    assert (result.engine.fault_rows, result.engine.unjudged_rows) == (0, 2)


def test_what_an_engine_made_of_those_rows_is_not_judged_and_a_fault_elsewhere_is(case: Case) -> None:
    scores, ids = recorded(case)
    for row in ROWS:
        scores[row.head, row.token] = np.nan
        ids[row.head, row.token] = 99
    result = verify_case(with_result(case, scores, ids), "case", "cpu")
    assert result.engine is not None
    assert result.engine.total_findings == 0
    assert result.engine.unmeasured_cells == {}
    ids[1, 3, TOPK - 1] = 99
    result = verify_case(with_result(case, scores, ids), "case", "cpu", max_findings=1)
    assert result.engine is not None
    assert result.engine.fault_rows == 1
    assert [(f.head, f.token) for f in result.engine.findings] == [(1, 3)]
    assert result.not_finite == ROWS[:1], "as many as findings"
    assert result.unjudged_rows == 2


def test_expected_outputs_of_those_rows_are_not_compared() -> None:
    case = read_case(CUT)
    queries = case.index_q.copy()
    token = int(case.num_blocks_per_query().argmax())
    queries[token, 2] = np.nan
    assert case.expected_scores is not None
    scores = case.expected_scores.copy()
    scores[2, token] = np.nan
    spoilt = dataclasses.replace(case, index_q=queries, expected_scores=scores)
    result = verify_case(spoilt, "cut", "cpu")
    assert result.backend_ok
    assert (result.rows, result.unjudged_rows) == (case.rows - 1, 1)
    scores[1, token] = np.nan
    assert not verify_case(dataclasses.replace(spoilt, expected_scores=scores), "cut", "cpu").backend_ok


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.float16, np.float32])
def test_every_type_of_query_is_looked_at(dtype: Any) -> None:
    case = small_case()
    queries = case.index_q.astype(np.float32)
    queries[0, 0, 127] = np.nan
    result = verify_case(dataclasses.replace(case, index_q=queries.astype(dtype)), "case", "cpu")
    assert [(row.token, row.head, row.dim, row.value) for row in result.not_finite] == [(0, 0, 127, "nan")]


def test_a_call_of_such_queries_only_judges_nothing() -> None:
    case = small_case()
    queries = np.full_like(case.index_q, np.nan)
    result = verify_case(dataclasses.replace(case, index_q=queries), "case", "cpu")
    assert (result.rows, result.unjudged_rows, result.ok) == (0, case.rows, False)


def test_causes_are_held_against_judged_rows_only(case: Case) -> None:
    grades = np.full((case.num_heads, case.total_q), UNJUDGED, dtype=np.int8)
    grades[:, 2] = FAULT
    grades[0, 4] = RIGHT
    evidence = gather_evidence(case, grades, FAULT, 2.0**-16)
    rows = zip(evidence.head.tolist(), evidence.token.tolist(), evidence.faulty.tolist())
    assert set(rows) == {(0, 2, True), (1, 2, True), (0, 4, False)}
