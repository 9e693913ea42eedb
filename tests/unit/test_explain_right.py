"""An engine's right result is called right, and so is one that differs only by ties or rounding."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from indexer.case import Case, EngineRecord, read_case
from indexer.explain import EngineVerdict
from indexer.verify import verify_case
from tests.support.faulty_engine import Engine, engine_case
from tests.support.real_cases import CODE, CUT


def verdict_of(case: Case) -> EngineVerdict:
    verification = verify_case(case, "case", "cpu")
    assert verification.engine is not None
    assert verification.topk_mismatches == 0
    assert verification.ok == verification.engine.ok
    return verification.engine


@pytest.mark.parametrize("record", ["scores ids", "scores", "ids"])
@pytest.mark.parametrize("options", [{}, {"init_blocks": 1, "local_blocks": 2}, {"topk": 64}])
def test_a_right_result_is_right(record: str, options: dict[str, Any]) -> None:
    case = Engine(engine_case(**options)).run(record)
    verdict = verdict_of(case)
    assert verdict.ok
    assert (verdict.right_rows, verdict.fault_rows) == (case.rows, 0)
    assert verdict.causes == ()
    assert verdict.total_findings == 0


@pytest.mark.parametrize("path", [CODE, CUT])
def test_right_results_of_real_activations_are_right(path: Any) -> None:
    """The expected outputs come from an independent implementation: here they are an engine's."""
    case = read_case(path)
    record = EngineRecord(scores=case.expected_scores, block_ids=case.expected_block_ids, order="score")
    verdict = verdict_of(dataclasses.replace(case, engine=record))
    assert verdict.ok
    assert verdict.max_score_error is not None
    assert verdict.max_score_error <= verdict.score_tolerance


def test_cells_that_no_row_sees_may_hold_anything() -> None:
    case = Engine(engine_case()).run()
    assert case.engine is not None
    assert case.engine.scores is not None
    nb = case.num_blocks_per_query()
    future = np.arange(case.num_score_blocks) >= nb[:, None]
    scores = np.where(future, np.float32(np.nan), case.engine.scores)
    assert verdict_of(dataclasses.replace(case, engine=dataclasses.replace(case.engine, scores=scores))).ok


def tied_case() -> Case:
    """Every block of a request is the same page: all scores but the last block's are equal."""
    case = engine_case([(128 * 12, 5)], heads=1)
    assert case.block_table is not None
    table = case.block_table.copy()
    table[0, :12] = table[0, 0]
    return dataclasses.replace(case, block_table=table)


@pytest.mark.parametrize("record", ["scores ids", "ids"])
def test_legal_ties_are_right(record: str) -> None:
    case = Engine(tied_case()).run(record)
    assert case.engine is not None
    assert case.engine.block_ids is not None
    ids = case.engine.block_ids.copy()
    assert (ids[0, 0] == [0, 1, 2, 3]).all()
    ids[:] = [9, 2, 7, 0]
    verdict = verdict_of(dataclasses.replace(case, engine=dataclasses.replace(case.engine, block_ids=ids)))
    assert verdict.ok
    assert (verdict.tie_rows, verdict.rounding_rows, verdict.fault_rows) == (case.rows, 0, 0)
    assert verdict.causes == ()
    assert {finding.verdict for finding in verdict.findings} == {"tie"}
    assert {finding.margin for finding in verdict.findings} == {0.0}
    assert {(f.kind, f.block) for f in verdict.findings if f.token == 0} == {
        ("picked", 9),
        ("picked", 7),
        ("missed", 1),
        ("missed", 3),
    }


def test_rounding_is_right_and_more_is_not() -> None:
    """Scores moved by a part of what is allowed, the selection made again from them."""
    case = Engine(engine_case()).run()
    assert case.engine is not None
    assert case.engine.scores is not None
    random = np.random.default_rng(0)
    norms = np.linalg.norm(case.index_q.astype(np.float64), axis=2).T[:, :, None]
    for size, ok in ((2.0**-18, True), (2.0**-9, False)):
        noise = random.choice([-1, 1], case.engine.scores.shape) * norms * size
        scores = (case.engine.scores + noise).astype(np.float32)
        ids = np.argsort(-scores, axis=2, kind="stable")[:, :, : case.topk]
        nb = case.num_blocks_per_query()[:, None]
        ids = np.where(np.arange(case.topk) < nb, ids, -1).astype(np.int32)
        record = dataclasses.replace(case.engine, scores=scores, block_ids=ids)
        verdict = verdict_of(dataclasses.replace(case, engine=record))
        assert verdict.ok is ok
        assert verdict.max_score_error is not None
        assert verdict.max_score_error > 0


@pytest.mark.parametrize("order", ["any", "block", "score"])
def test_the_order_stated_is_the_order_asked_for(order: Any) -> None:
    case = Engine(engine_case()).run("ids")
    assert case.engine is not None
    assert case.engine.block_ids is not None
    last = np.iinfo(np.int32).max
    ascending = np.sort(np.where(case.engine.block_ids < 0, last, case.engine.block_ids), axis=2)
    ascending = np.where(ascending == last, -1, ascending).astype(np.int32)
    record = dataclasses.replace(case.engine, block_ids=ascending, order=order)
    verdict = verdict_of(dataclasses.replace(case, engine=record))
    assert verdict.ok is (order != "score")
    if order == "score":
        assert {finding.kind for finding in verdict.findings} == {"order"}
        assert [cause.name for cause in verdict.causes] == ["ids are sorted by block, not by score"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda ids: ids.__setitem__((0, 50, 0), 99), "id"),
        (lambda ids: ids.__setitem__((0, 50, 0), ids[0, 50, 1]), "id"),
        (lambda ids: ids.__setitem__((0, 50, 3), -1), "id"),
    ],
)
def test_ids_that_are_no_selection_are_faults(change: Any, kind: str) -> None:
    case = Engine(engine_case([(2600, 60)])).run("ids")
    assert case.engine is not None
    assert case.engine.block_ids is not None
    ids = case.engine.block_ids.copy()
    change(ids)
    verdict = verdict_of(dataclasses.replace(case, engine=dataclasses.replace(case.engine, block_ids=ids)))
    assert not verdict.ok
    assert verdict.fault_rows == 1
    (finding,) = verdict.findings
    assert (finding.kind, finding.head, finding.token, finding.position) == (kind, 0, 50, 2590)


def test_findings_say_where_what_and_by_how_much() -> None:
    """One block of one row exchanged for the row's worst: by the right scores two findings, with margins of
    their own sign, and one by the engine's own."""
    case = Engine(engine_case()).run()
    assert case.engine is not None
    assert case.engine.block_ids is not None
    assert case.engine.scores is not None
    head, token = 1, 55  # of request 2
    row = case.engine.scores[head, token, : 1100 // 128 + 1]
    ids = case.engine.block_ids.copy()
    best, worst = int(ids[head, token, 0]), int(row.argmin())
    ids[head, token] = [*ids[head, token, 1:], worst]
    kth = float(np.sort(row)[-case.topk])
    verdict = verdict_of(dataclasses.replace(case, engine=dataclasses.replace(case.engine, block_ids=ids)))
    assert (verdict.fault_rows, verdict.selection_fault_rows) == (1, 1)
    assert (verdict.fault_rows_by_request, verdict.fault_rows_by_head) == ({2: 1}, {1: 1})
    found = {finding.kind: finding for finding in verdict.findings}
    assert [finding.kind for finding in verdict.findings] == ["selection", "picked", "missed"]
    own = found["selection"]
    assert (own.block, own.against, own.place, own.id) == (worst, best, case.topk - 1, worst)
    assert (own.got, own.expected, own.allowed) == (row[worst], row[best], 0.0)
    assert own.margin == float(row[worst]) - float(row[best])
    for kind, block, other in (("missed", best, worst), ("picked", worst, best)):
        finding = found[kind]  # type: ignore[index]
        assert finding.against == other
        assert f"block {other}" in finding.rule
        assert (finding.request, finding.head, finding.token, finding.block) == (2, head, token, block)
        assert finding.position == 1100 - 9 + (token - 50)
        assert finding.verdict == "fault"
        assert finding.expected == pytest.approx(float(row[block]), rel=1e-6)
        assert finding.got == float(row[block])
        assert finding.margin == pytest.approx(float(row[block]) - kth, rel=1e-5)


def test_a_case_without_a_result_has_no_verdict() -> None:
    assert verify_case(engine_case(), "case", "cpu").engine is None


def test_new_keys_alone_are_judged() -> None:
    case = engine_case()
    record = EngineRecord(new_keys=np.ones((case.total_q, 128), dtype=ml_dtypes.bfloat16))
    verdict = verdict_of(dataclasses.replace(case, engine=record))
    assert verdict.written is not None
    assert verdict.written.wrong == case.total_q
    assert not verdict.ok
