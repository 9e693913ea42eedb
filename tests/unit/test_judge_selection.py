"""A selection is judged by the engine's own scores exactly, and by the right ones within rounding."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from indexer.case import Case
from indexer.explain.verdict import Finding
from indexer.verify import verify_case
from tests.support.faulty_engine import Engine
from tests.support.judged import TOPK, judged, recorded, right_case, with_result

HEAD, TOKEN = 1, 3
"""A row of request 1 that sees 21 blocks."""
ANY_ERROR = 1.0
"""A tolerance by which all scores are alike: only the engine's own decide."""


@pytest.fixture(scope="module")
def case() -> Case:
    return right_case()


def ranked(case: Case) -> list[int]:
    """The row's blocks, best first."""
    scores, _ = recorded(case)
    return [int(block) for block in np.argsort(-scores[HEAD, TOKEN, :21], kind="stable")]


def only(findings: tuple[Finding, ...]) -> Finding:
    (finding,) = findings
    assert (finding.request, finding.head, finding.token, finding.position) == (1, HEAD, TOKEN, 2598)
    return finding


def test_the_next_best_is_a_fault_however_close_it_is(case: Case) -> None:
    """The engine's scores are within rounding of the right ones, and so is the block that it picks."""
    assert case.block_table is not None
    table = case.block_table.copy()
    table[1, 1:20] = table[1, 1]  # blocks that are all alike: the oracle's choice of them is a tie
    case = Engine(dataclasses.replace(case, block_table=table, engine=None)).run()
    scores, ids = recorded(case)
    left_out = int(np.flatnonzero(scores[HEAD, TOKEN, :20] == scores[HEAD, TOKEN, 10])[-1])
    assert left_out not in ids[HEAD, TOKEN]
    scores[HEAD, TOKEN, left_out] = np.nextafter(scores[HEAD, TOKEN, left_out], np.float32(np.inf))
    verification = verify_case(with_result(case, scores, ids), "case", "cpu")
    verdict = verification.engine
    assert verdict is not None
    assert not verification.ok
    assert not verdict.ok
    assert (verdict.fault_rows, verdict.selection_fault_rows) == (1, 1)
    assert verdict.max_score_error is not None
    assert verdict.max_score_error < verdict.score_tolerance
    finding = only(verdict.findings)
    picked = int(ids[HEAD, TOKEN, TOPK - 1])
    assert (finding.kind, finding.verdict, finding.block) == ("selection", "fault", picked)
    assert (finding.place, finding.id, finding.against) == (TOPK - 1, picked, left_out)
    expected, got = scores[HEAD, TOKEN, left_out], scores[HEAD, TOKEN, picked]
    assert (finding.expected, finding.got) == (expected, got)
    assert finding.margin == float(got) - float(expected) < 0
    assert f"block {left_out}" in finding.rule
    assert [(cause.family, cause.explained) for cause in verdict.causes] == [("selection", 1)]
    assert judged(with_result(case, None, ids)).ok, "ids alone are right"


def test_the_best_left_out_and_the_worst_picked_are_named(case: Case) -> None:
    order = ranked(case)
    scores, ids = recorded(case)
    ids[HEAD, TOKEN] = [*order[: TOPK - 2], order[10], order[12]]
    verdict = judged(with_result(case, scores, ids), ANY_ERROR)
    own = next(finding for finding in verdict.findings if finding.kind == "selection")
    assert (own.block, own.place, own.against) == (order[12], TOPK - 1, order[TOPK - 2])
    assert verdict.fault_rows == 1


def test_a_score_that_is_nan_is_the_worst(case: Case) -> None:
    order = ranked(case)
    scores, ids = recorded(case)
    scores[HEAD, TOKEN, order[TOPK - 1]] = np.nan
    verdict = judged(with_result(case, scores, ids))
    own = next(finding for finding in verdict.findings if finding.kind == "selection")
    assert (own.block, own.against) == (order[TOPK - 1], order[TOPK])


def test_of_equal_scores_of_its_own_the_lower_id_goes_first_and_the_other_is_legal(case: Case) -> None:
    scores, ids = recorded(case)
    for head, token in np.ndindex(2, 5):
        row = np.argsort(-scores[head, token], kind="stable")
        last, next_best = int(row[TOPK - 1]), int(row[TOPK])
        if token >= 2 and last > next_best:  # the oracle picks the higher id of the two
            break
    else:
        raise AssertionError("a row like that")
    scores[head, token, next_best] = scores[head, token, last]
    verdict = judged(with_result(case, scores, ids), ANY_ERROR)
    assert verdict.ok
    assert (verdict.tie_rows, verdict.right_rows) == (1, case.rows - 1)
    (finding,) = verdict.findings
    assert (finding.kind, finding.verdict) == ("selection", "tie")
    assert (finding.head, finding.token, finding.block, finding.against) == (head, token, last, next_best)
    assert "legal" in finding.rule
    ids[head, token, TOPK - 1] = next_best
    verdict = judged(with_result(case, scores, ids), ANY_ERROR)
    assert {(finding.kind, finding.verdict) for finding in verdict.findings} == {
        ("picked", "rounding"),
        ("missed", "rounding"),
    }


def test_its_own_order_is_exact_and_equal_scores_are_legal(case: Case) -> None:
    scores, ids = recorded(case)
    third, fourth = int(ids[HEAD, TOKEN, 3]), int(ids[HEAD, TOKEN, 4])
    ids[HEAD, TOKEN, [3, 4]] = fourth, third
    verdict = judged(with_result(case, scores, ids), ANY_ERROR)
    finding = only(verdict.findings)
    assert (finding.kind, finding.verdict, finding.place) == ("order", "fault", 4)
    assert (finding.block, finding.against) == (third, fourth)
    assert verdict.selection_fault_rows == 0, "the set is the best"
    assert not verdict.ok
    assert judged(with_result(case, None, ids), ANY_ERROR).ok, "without scores that is rounding"
    assert judged(with_result(case, scores, ids, "any"), ANY_ERROR).ok
    scores[HEAD, TOKEN, third] = scores[HEAD, TOKEN, fourth]
    ids[HEAD, TOKEN, [3, 4]] = max(third, fourth), min(third, fourth)
    verdict = judged(with_result(case, scores, ids), ANY_ERROR)
    finding = only(verdict.findings)
    assert verdict.ok
    assert (finding.kind, finding.verdict, finding.block) == ("order", "tie", min(third, fourth))


def test_forcing_in_the_selection_only_is_a_fault_of_the_scores(case: Case) -> None:
    raw = dataclasses.replace(case, init_blocks=0, local_blocks=0, engine=None)
    scores, _ = recorded(Engine(raw).run())
    _, ids = recorded(case)
    verdict = judged(with_result(case, scores, ids))
    assert not verdict.ok
    assert verdict.selection_fault_rows == 0
    assert {finding.kind for finding in verdict.findings} == {"score"}
    assert verdict.unmeasured_cells == {"forced by the contract only": 2 * case.rows}
    order = ranked(case)
    ids[HEAD, TOKEN, TOPK - 1] = order[TOPK]
    assert judged(with_result(case, scores, ids)).selection_fault_rows == 1


def test_two_exchanged_forced_blocks_are_both_named(case: Case) -> None:
    _, ids = recorded(case)
    ids[:, :, [0, 1]] = ids[:, :, [1, 0]]
    verdict = judged(with_result(case, None, ids))
    assert verdict.fault_rows == case.rows
    for finding in verdict.findings:
        last = finding.position // 128
        assert (finding.kind, finding.place) == ("order", 1)
        assert {finding.block, finding.against} == {0, last}
        assert f"block {last} (1e+29) stands before block 0 (1e+30)" in finding.rule
        assert "not told apart" in finding.rule


def test_ids_that_follow_a_wrong_score_are_in_order(case: Case) -> None:
    """What is wrong is told once: by the score."""
    scores, ids = recorded(case)
    second = int(ids[HEAD, TOKEN, 3])
    scores[HEAD, TOKEN, second] *= 1.5
    ids[HEAD, TOKEN, [2, 3]] = ids[HEAD, TOKEN, [3, 2]]
    assert ids[HEAD, TOKEN, 2] == second
    verdict = judged(with_result(case, scores, ids))
    assert (only(verdict.findings).kind, verdict.selection_fault_rows) == ("score", 0)
    kinds = [finding.kind for finding in judged(with_result(case, scores, ids, "block")).findings]
    assert kinds.count("order") == case.rows, "an order by block is another matter"
