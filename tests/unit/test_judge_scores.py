"""Cells in which one side is no number show in the figures, and never make an error look smaller."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from indexer.case import Case
from indexer.oracle import WRONG_CELL_ERROR
from kernel.backends.base import SCORE_TOLERANCE
from tests.support.faulty_engine import Engine
from tests.support.judged import judged, recorded, right_case, with_result

HEAD, TOKEN = 1, 3
"""A row of request 1 that sees 21 blocks."""
ORDINARY, INIT, LOCAL = 7, 0, 20


@pytest.fixture(scope="module")
def case() -> Case:
    return right_case()


@pytest.mark.parametrize(
    ("block", "value", "name", "words"),
    [
        (ORDINARY, np.nan, "NaN", "NaN where a number must be"),
        (ORDINARY, np.inf, "infinite", "+inf where a number must be"),
        (ORDINARY, -np.inf, "infinite", "-inf where a number must be: the row sees the block"),
        (ORDINARY, 1e29, "forced by the engine only", "the block is not forced"),
        (ORDINARY, 1e30, "forced by the engine only", "the block is not forced"),
        (INIT, 5.0, "forced by the contract only", "its score must be 1e+30"),
        (LOCAL, 5.0, "forced by the contract only", "its score must be 1e+29"),
        (LOCAL, 1e30, "another forced score", "must be 1e+29"),
        (LOCAL, np.nan, "NaN", "NaN where a forced block's score must be"),
    ],
)
def test_a_number_on_one_side_only_is_counted_apart(
    case: Case, block: int, value: float, name: str, words: str
) -> None:
    scores, _ = recorded(case)
    scores[HEAD, TOKEN, block] = value
    verdict = judged(with_result(case, scores, None))
    assert not verdict.ok
    assert verdict.unmeasured_cells == {name: 1}
    assert verdict.max_score_error == WRONG_CELL_ERROR
    assert verdict.max_measured_error == 0.0
    (finding,) = verdict.findings
    assert (finding.kind, finding.head, finding.token, finding.block) == ("score", HEAD, TOKEN, block)
    assert words in finding.rule
    assert finding.got is not None
    np.testing.assert_equal(np.float32(finding.got), np.float32(value))


def test_what_has_an_error_is_still_measured(case: Case) -> None:
    scores, _ = recorded(case)
    scores[HEAD, TOKEN, ORDINARY] += 1.0
    verdict = judged(with_result(case, scores, None))
    measured = verdict.max_score_error
    assert measured is not None
    assert SCORE_TOLERANCE["exact"] < measured < 1
    assert (verdict.unmeasured_cells, verdict.max_measured_error) == ({}, measured)
    scores[HEAD, TOKEN, ORDINARY + 1] = np.nan
    verdict = judged(with_result(case, scores, None))
    assert verdict.max_score_error == WRONG_CELL_ERROR
    assert verdict.max_measured_error == measured


def test_a_block_of_zeros_scores_exactly_zero(case: Case) -> None:
    assert case.pages is not None
    assert case.block_table is not None
    pages = case.pages.copy()
    pages[case.block_table[1, ORDINARY]] = 0
    zeros = Engine(dataclasses.replace(case, pages=pages, engine=None)).run()
    assert judged(zeros).ok
    scores, _ = recorded(zeros)
    assert scores[HEAD, TOKEN, ORDINARY] == 0
    scores[HEAD, TOKEN, ORDINARY] = 1e-20
    verdict = judged(with_result(zeros, scores, None))
    assert verdict.unmeasured_cells == {"not exactly 0": 1}
    assert verdict.max_score_error == WRONG_CELL_ERROR


def test_cells_that_no_row_sees_are_not_looked_at(case: Case) -> None:
    scores, ids = recorded(case)
    scores[:, 0, 3:] = np.nan  # of request 0, which has three blocks
    verdict = judged(with_result(case, scores, ids))
    assert verdict.ok
    assert (verdict.max_score_error, verdict.unmeasured_cells) == (0.0, {})
