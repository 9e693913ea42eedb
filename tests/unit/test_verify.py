"""What verify accepts and what it does not: rounding and legal exchanges on one side, faults on the other."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import indexer.verify
from indexer.case import Case, read_case
from indexer.explain.evidence import gather_evidence
from indexer.explain.verdict import FAULT, RIGHT, UNJUDGED
from indexer.oracle import WRONG_CELL_ERROR, OracleResult, mismatched_rows, run_oracle, score_error, select
from indexer.verify import NotFiniteRow, Verification, run_selftest, selftest_case, verify_case
from kernel.backends.base import SCORE_TOLERANCE
from kernel.backends.registry import BACKEND_NAMES, status
from tests.support.cases import CODE, CUT, paged_case, small_case
from tests.support.faulty_engine import JUDGED_TOPK, recorded, right_case, with_result
from tests.support.process import VERIFY_KEYS

EXACT = SCORE_TOLERANCE["exact"]
SIMULATED = "flydsl-sim"
USABLE = [name for name in BACKEND_NAMES if status(name).usable]


@pytest.fixture(scope="module")
def case() -> Case:
    return selftest_case()


@pytest.fixture(scope="module")
def oracle(case: Case) -> OracleResult:
    return run_oracle(case)


@pytest.mark.parametrize(
    ("path", "backend"),
    [
        pytest.param(path, name, marks=pytest.mark.nightly if name == SIMULATED else ())
        for path in (CODE, CUT)
        for name in USABLE
        if (path, name) != (CODE, SIMULATED)
    ],
    ids=lambda value: getattr(value, "stem", value),
)
def test_real_cases_are_right(path: Any, backend: str) -> None:
    """On the simulated device the command, a line of README, verifies the shorter one by day; nightly
    ``tests/gfx950/test_hip_index_scorer.py`` has the longer ones."""
    case = read_case(path)
    result = verify_case(case, path.stem, backend)
    assert result.ok
    assert (result.case, result.backend, result.rows) == (path.stem, backend, case.rows)
    assert result.max_score_error <= result.score_tolerance == 2.0**-16
    assert result.topk_mismatches == 0
    assert result.seconds > 0


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.nightly if name == SIMULATED else ()) for name in USABLE]
)
def test_selftest_is_right(backend: str) -> None:
    assert run_selftest(backend).ok


@pytest.mark.parametrize("backend", USABLE)
def test_pages_are_right(backend: str) -> None:
    assert verify_case(paged_case(), "pages", backend).ok


def test_keys_are_those_of_json(case: Case) -> None:
    keys = [field.name for field in dataclasses.fields(Verification)]
    assert keys == VERIFY_KEYS
    assert json.loads(json.dumps(WRONG_CELL_ERROR)) == WRONG_CELL_ERROR


def test_wrong_expectations_are_found(case: Case, oracle: OracleResult) -> None:
    scores = oracle.scores.copy()
    scores[1, 7, 3] += np.float32(4 * EXACT * oracle.bounds[1, 7, 3])
    result = verify_case(dataclasses.replace(case, expected_scores=scores), "x", "reference")
    assert not result.ok
    assert EXACT < result.max_score_error < 5 * EXACT
    assert result.topk_mismatches == 0

    ids = oracle.block_ids.copy()
    ids[1, 7, 0], ids[1, 7, 1] = ids[1, 7, 1], ids[1, 7, 0]
    result = verify_case(dataclasses.replace(case, expected_block_ids=ids), "x", "reference")
    assert not result.ok
    assert (result.max_score_error, result.topk_mismatches) == (0.0, 1)


def test_error_is_in_units_of_the_cells_bound(oracle: OracleResult) -> None:
    assert score_error(oracle.scores, oracle.scores, oracle.bounds) == 0.0
    scores = oracle.scores.copy()
    scores[0, 3, 2] += 0.5
    want = 0.5 / oracle.bounds[0, 3, 2]
    assert score_error(scores, oracle.scores, oracle.bounds) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e29])
def test_cell_that_is_no_score_is_wrong(oracle: OracleResult, value: float) -> None:
    scores = oracle.scores.copy()
    scores[0, 3, 2] = value
    assert score_error(scores, oracle.scores, oracle.bounds) > 1
    assert np.isfinite(score_error(scores, oracle.scores, oracle.bounds))


def test_sentinels_and_invisible_cells_must_be_equal() -> None:
    oracle = run_oracle(small_case())
    assert oracle.scores[0, 0, 0] == np.float32(1e29)
    for cell, value in (((0, 0, 0), 1e30), ((0, 0, 0), 5.0), ((0, 0, 0), 1.0000001e29), ((0, 0, 1), 0.0)):
        scores = oracle.scores.copy()
        scores[cell] = value
        assert score_error(scores, oracle.scores, oracle.bounds) == WRONG_CELL_ERROR


def test_columns_that_no_row_sees_must_be_invisible(oracle: OracleResult) -> None:
    wide = np.pad(oracle.scores, ((0, 0), (0, 0), (0, 2)), constant_values=-np.inf)
    assert score_error(wide, oracle.scores, oracle.bounds) == 0.0
    assert score_error(oracle.scores, wide, oracle.bounds) == 0.0
    wide[0, 0, -1] = 0
    assert score_error(wide, oracle.scores, oracle.bounds) == WRONG_CELL_ERROR
    assert score_error(oracle.scores[:, :, :-1], oracle.scores, oracle.bounds) == WRONG_CELL_ERROR


def six_blocks(scores: list[float], bound: float | list[float], topk: int = 3) -> tuple[Case, OracleResult]:
    """One row that sees six blocks, with an oracle that says what we like."""
    case = Case(
        index_q=np.ones((1, 1, 128), dtype=np.float32),
        index_k=np.ones((6 * 128, 128), dtype=np.float32),
        cu_seqlens_q=np.array([0, 1], dtype=np.int32),
        seq_lens=np.array([6 * 128], dtype=np.int32),
        local_blocks=0,
        topk=topk,
    )
    right = np.array(scores, dtype=np.float32).reshape(1, 1, 6)
    bounds = np.broadcast_to(np.array(bound, dtype=np.float64), (1, 1, 6))
    return case, OracleResult(right, bounds, select(right, case))


def judged(case: Case, oracle: OracleResult, scores: list[float]) -> int:
    """Mismatched rows of a backend with these scores that selects exactly by them."""
    got = np.array(scores, dtype=np.float32).reshape(1, 1, 6)
    return mismatched_rows(case, got, select(got, case), oracle, tolerance=1.0)


RIGHT_SCORES = [9.0, 5.0, 4.9, 4.8, 1.0, 0.0]


@pytest.mark.parametrize(
    ("scores", "mismatches"),
    [
        (RIGHT_SCORES, 0),
        ([9.0, 4.9, 5.0, 4.8, 1.0, 0.0], 0),  # the second and third change places
        ([9.0, 4.8, 4.9, 5.0, 1.0, 0.0], 0),  # 3 is taken for 1: 0.2 apart, the cells allow 0.1 each
        ([4.9, 5.0, 4.8, 9.0, 1.0, 0.0], 1),  # 3 is taken for 0: 4.2 apart
        ([9.0, 5.0, 4.9, 1.0, 4.95, 0.0], 1),  # 4 is taken for 2
        ([5.0, 9.0, 4.9, 4.8, 1.0, 0.0], 1),
    ],
)
def test_blocks_change_places_only_within_tolerance(scores: list[float], mismatches: int) -> None:
    case, oracle = six_blocks(RIGHT_SCORES, bound=0.1000001)
    assert judged(case, oracle, scores) == mismatches


def test_coarse_block_may_pass_blocks_that_are_not_close_to_each_other() -> None:
    """Block 3 is uncertain by 3 and moves from fourth to first, which shifts exact blocks by one place."""
    case, oracle = six_blocks([4.0, 3.0, 2.0, 1.5, 1.0, 0.0], bound=[0, 0, 0, 3, 0, 0])
    assert judged(case, oracle, [4.0, 3.0, 2.0, 4.4, 1.0, 0.0]) == 0
    assert judged(case, oracle, [3.0, 4.0, 2.0, 4.4, 1.0, 0.0]) == 1


def test_ids_must_be_the_top_k_of_the_backends_own_scores() -> None:
    case, oracle = six_blocks(RIGHT_SCORES, bound=10.0)  # so wide that every exchange would be legal
    got = oracle.scores
    for ids in ([0, 2, 1], [0, 1, -1], [0, 1, 1], [0, 1, 6], [0, 1, 2**31 - 1], [-1, 0, 1], [-5, 0, 1]):
        block_ids = np.array(ids, dtype=np.int32).reshape(1, 1, 3)
        assert mismatched_rows(case, got, block_ids, oracle, 1.0) == 1
    assert mismatched_rows(case, got, oracle.block_ids, oracle, 1.0) == 0


def test_ties_must_go_to_the_lower_id() -> None:
    case, oracle = six_blocks([1.0, 2.0, 2.0, 2.0, 2.0, 0.0], bound=0.0)
    assert oracle.block_ids.tolist() == [[[1, 2, 3]]]
    ids = np.array([[[1, 2, 4]]], dtype=np.int32)
    assert mismatched_rows(case, oracle.scores, ids, oracle, 1.0) == 1


@pytest.mark.parametrize(
    "ids", [[0, 1, 3], [0, 1, -1], [0, 1, 6], [0, 1, 2**31 - 1], [0, 1, -(2**31)], [1, 1, 1]]
)
def test_expected_ids_are_looked_at_whatever_they_hold(ids: list[int]) -> None:
    case, oracle = six_blocks(RIGHT_SCORES, bound=0.01)
    wrong = dataclasses.replace(case, expected_block_ids=np.array([[ids]], dtype=np.int32))
    assert mismatched_rows(wrong, oracle.scores, oracle.block_ids, oracle, 1.0) == 1


@pytest.mark.parametrize(
    "ids",
    [[0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 5, 4], [5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, -1]],
)
def test_expected_ids_must_be_a_selection_even_of_equal_blocks(ids: list[int]) -> None:
    """Six equal scores: any exchange is close enough, a repeated id or another order is wrong."""
    case, oracle = six_blocks([1.0] * 6, bound=10.0, topk=6)
    right = dataclasses.replace(case, expected_block_ids=oracle.block_ids)
    assert mismatched_rows(right, oracle.scores, oracle.block_ids, oracle, 1.0) == 0
    wrong = dataclasses.replace(case, expected_block_ids=np.array([[ids]], dtype=np.int32))
    assert mismatched_rows(wrong, oracle.scores, oracle.block_ids, oracle, 1.0) == 1


@pytest.mark.parametrize(
    ("padding", "mismatches"), [([-1, -1], 0), ([-7, -7], 1), ([-1, -7], 1), ([5, -1], 1)]
)
def test_expected_ids_are_padded_with_minus_one(padding: list[int], mismatches: int) -> None:
    case, oracle = six_blocks(RIGHT_SCORES, bound=10.0, topk=8)
    ids = np.array([[[0, 1, 2, 3, 4, 5, *padding]]], dtype=np.int32)
    expecting = dataclasses.replace(case, expected_block_ids=ids)
    assert mismatched_rows(expecting, oracle.scores, oracle.block_ids, oracle, 1.0) == mismatches


def test_ties_of_forced_blocks_must_be_in_order_in_expected_ids() -> None:
    case, oracle = six_blocks([1.0, 2.0, 3.0, 4.0, 1e29, 1e29], bound=10.0)
    case = dataclasses.replace(
        case, local_blocks=2, expected_block_ids=np.array([[[5, 4, 3]]], dtype=np.int32)
    )
    assert mismatched_rows(case, oracle.scores, oracle.block_ids, oracle, 1.0) == 1


def test_a_tie_of_the_oracle_alone_may_be_broken_by_rounding() -> None:
    case, oracle = six_blocks([1.0, 2.0, 2.0, 0.0, 0.0, 0.0], bound=0.1, topk=2)
    case = dataclasses.replace(case, expected_block_ids=oracle.block_ids)
    got = np.array([[[1.0, 2.0, 2.05, 0.0, 0.0, 0.0]]], dtype=np.float32)
    assert select(got, case).tolist() == [[[2, 1]]]
    assert mismatched_rows(case, got, select(got, case), oracle, 1.0) == 0


def test_expected_ids_must_be_those_of_the_expected_scores() -> None:
    case, oracle = six_blocks(RIGHT_SCORES, bound=10.0)
    case = dataclasses.replace(
        case, expected_scores=oracle.scores, expected_block_ids=np.array([[[0, 2, 1]]], dtype=np.int32)
    )
    assert mismatched_rows(case, oracle.scores, oracle.block_ids, oracle, 1.0) == 1


def test_swapped_layout_is_found(case: Case, oracle: OracleResult) -> None:
    """Ids in token-major order under a head-major shape."""
    swapped = np.ascontiguousarray(oracle.block_ids.transpose(1, 0, 2)).reshape(oracle.block_ids.shape)
    assert mismatched_rows(case, oracle.scores, swapped, oracle, EXACT) > case.rows // 4


def test_missing_causal_mask_is_found(case: Case, oracle: OracleResult) -> None:
    """Scores of the last query's view for every query of a request."""
    end = int(case.cu_seqlens_q[1])
    scores = oracle.scores.copy()
    scores[:, :end] = scores[:, end - 1 : end]
    assert score_error(scores, oracle.scores, oracle.bounds) > EXACT


# Rows whose queries are not finite are left out and named; all others of the call are judged.

ROWS = (
    NotFiniteRow(request=0, head=1, token=1, position=299, dim=17, value="nan"),
    NotFiniteRow(request=1, head=0, token=3, position=2598, dim=5, value="inf"),
)


@pytest.fixture(scope="module")
def case_of_queries() -> Case:
    """An engine's result for queries two of which are not finite."""
    case_of_queries = right_case()
    queries = case_of_queries.index_q.copy()
    queries[1, 1, 17:19] = np.nan
    queries[3, 0, 5] = np.inf
    return dataclasses.replace(case_of_queries, index_q=queries)


@pytest.mark.parametrize("max_whole_cells", [1 << 25, 1])
def test_the_others_are_judged(
    case_of_queries: Case, max_whole_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer.verify, "MAX_WHOLE_CELLS", max_whole_cells)
    result = verify_case(case_of_queries, "case", "cpu")
    assert result.not_finite == ROWS
    assert (result.rows, result.unjudged_rows) == (case_of_queries.rows - 2, 2)
    assert result.backend_ok
    assert not result.ok, "two rows were not shown to be right"
    assert result.engine is not None
    assert not result.engine.ok
    assert (result.engine.rows, result.engine.right_rows) == (
        case_of_queries.rows - 2,
        case_of_queries.rows - 2,
    )
    assert (result.engine.fault_rows, result.engine.unjudged_rows) == (0, 2)


def test_what_an_engine_made_of_those_rows_is_not_judged_and_a_fault_elsewhere_is(
    case_of_queries: Case,
) -> None:
    scores, ids = recorded(case_of_queries)
    for row in ROWS:
        scores[row.head, row.token] = np.nan
        ids[row.head, row.token] = 99
    result = verify_case(with_result(case_of_queries, scores, ids), "case", "cpu")
    assert result.engine is not None
    assert result.engine.total_findings == 0
    assert result.engine.unmeasured_cells == {}
    ids[1, 3, JUDGED_TOPK - 1] = 99
    result = verify_case(with_result(case_of_queries, scores, ids), "case", "cpu", max_findings=1)
    assert result.engine is not None
    assert result.engine.fault_rows == 1
    assert [(f.head, f.token) for f in result.engine.findings] == [(1, 3)]
    assert result.not_finite == ROWS[:1], "as many as findings"
    assert result.unjudged_rows == 2


def test_expected_outputs_of_those_rows_are_not_compared() -> None:
    case_of_queries = read_case(CUT)
    queries = case_of_queries.index_q.copy()
    token = int(case_of_queries.num_blocks_per_query().argmax())
    queries[token, 2] = np.nan
    assert case_of_queries.expected_scores is not None
    scores = case_of_queries.expected_scores.copy()
    scores[2, token] = np.nan
    spoilt = dataclasses.replace(case_of_queries, index_q=queries, expected_scores=scores)
    result = verify_case(spoilt, "cut", "cpu")
    assert result.backend_ok
    assert (result.rows, result.unjudged_rows) == (case_of_queries.rows - 1, 1)
    scores[1, token] = np.nan
    assert not verify_case(dataclasses.replace(spoilt, expected_scores=scores), "cut", "cpu").backend_ok


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.float16, np.float32])
def test_every_type_of_query_is_looked_at(dtype: Any) -> None:
    case_of_queries = small_case()
    queries = case_of_queries.index_q.astype(np.float32)
    queries[0, 0, 127] = np.nan
    result = verify_case(dataclasses.replace(case_of_queries, index_q=queries.astype(dtype)), "case", "cpu")
    assert [(row.token, row.head, row.dim, row.value) for row in result.not_finite] == [(0, 0, 127, "nan")]


def test_a_call_of_such_queries_only_judges_nothing() -> None:
    case_of_queries = small_case()
    queries = np.full_like(case_of_queries.index_q, np.nan)
    result = verify_case(dataclasses.replace(case_of_queries, index_q=queries), "case", "cpu")
    assert (result.rows, result.unjudged_rows, result.ok) == (0, case_of_queries.rows, False)


def test_causes_are_held_against_judged_rows_only(case_of_queries: Case) -> None:
    grades = np.full((case_of_queries.num_heads, case_of_queries.total_q), UNJUDGED, dtype=np.int8)
    grades[:, 2] = FAULT
    grades[0, 4] = RIGHT
    evidence = gather_evidence(case_of_queries, grades, FAULT, 2.0**-16)
    rows = zip(evidence.head.tolist(), evidence.token.tolist(), evidence.faulty.tolist())
    assert set(rows) == {(0, 2, True), (1, 2, True), (0, 4, False)}
