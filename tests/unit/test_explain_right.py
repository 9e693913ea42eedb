"""An engine's right result is called right, and so is one that differs only by ties or rounding."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from client.engine_report import print_engine
from client.report.page import engine_section
from indexer.case import Case, EngineRecord, read_case
from indexer.explain import EngineVerdict
from indexer.explain.engine import name_causes
from indexer.explain.evidence import (
    Evidence,
    Prediction,
    by_scores,
    gather_evidence,
    prediction_by_contract,
    score,
)
from indexer.explain.match import Hypothesis, match
from indexer.verify import verify_case
from kernel.backends.base import SCORE_TOLERANCE
from tests.support.cases import CODE, CUT
from tests.support.faulty_engine import Engine, engine_case
from tests.support.planted import ALL, BOTH, FAULTS, ONLY_IDS, ONLY_SCORES, explained, only, planted


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


# No cause is named for what no known fault gives, and none takes what another one does.

Change = Callable[[NDArray[np.float32], NDArray[np.int32], np.random.Generator], None]
LENGTHS = [(1700, 30), (1500, 20)]


def changed(change: Change, record: str = BOTH, **options: Any) -> Case:
    """A right engine's result, changed in place."""
    case = Engine(engine_case(LENGTHS, **options)).run()
    assert case.engine is not None
    assert case.engine.scores is not None
    assert case.engine.block_ids is not None
    scores, ids = case.engine.scores.copy(), case.engine.block_ids.copy()
    change(scores, ids, np.random.default_rng(1))
    engine = dataclasses.replace(case.engine, scores=scores, block_ids=ids)
    return only(dataclasses.replace(case, engine=engine), record)


def reselect(scores: NDArray[np.float32], ids: NDArray[np.int32]) -> None:
    ids[:] = np.argsort(-scores, axis=2, kind="stable")[:, :, : ids.shape[2]]


def noise(share: float, size: float) -> Change:
    """Noise on a share of the scores, and the selection that it gives."""

    def change(scores: NDArray[np.float32], ids: NDArray[np.int32], random: np.random.Generator) -> None:
        hit = (random.random(scores.shape) < share) & (np.abs(scores) < 1e28)
        scores[hit] += random.normal(size=int(hit.sum())) * size
        reselect(scores, ids)

    return change


def random_ids(rows: slice) -> Change:
    def change(scores: NDArray[np.float32], ids: NDArray[np.int32], random: np.random.Generator) -> None:
        for head, token in np.ndindex(ids[:, rows].shape[:2]):
            blocks = int((scores[head, rows][token] > -np.inf).sum())
            ids[head, rows][token] = random.permutation(blocks)[: ids.shape[2]]

    return change


def one_wrong_block(scores: NDArray[np.float32], ids: NDArray[np.int32], random: np.random.Generator) -> None:
    """The last place goes to a block of the middle of the ranking."""
    ranking = np.argsort(-scores, axis=2, kind="stable")
    ids[:, ::7, -1] = ranking[:, ::7, 7]


def sentinels_anywhere(value: float) -> Change:
    """Cells of one block with a value that no page gives."""

    def change(scores: NDArray[np.float32], ids: NDArray[np.int32], random: np.random.Generator) -> None:
        scores[:, :30, 5] = value

    return change


CHANGES: dict[str, Change] = {
    "small noise": noise(1.0, 0.05),
    "large noise": noise(1.0, 50.0),
    "noise in a few cells": noise(0.02, 5.0),
    "a random selection": random_ids(slice(None)),
    "a random selection of one token": random_ids(slice(4, 5)),
    "one wrong block": one_wrong_block,
}


@pytest.mark.parametrize(
    ("what", "record"),
    [(what, record) for what in CHANGES for record in ALL if record != ONLY_SCORES or "noise" in what],
)
def test_noise_and_random_selections_have_no_cause(what: str, record: str) -> None:
    verdict = explained(changed(CHANGES[what], record, local_blocks=1))
    # That ids are not the best by the scores beside them is seen, not guessed.
    guessed = [cause.name for cause in verdict.causes if "by the engine's own scores" not in cause.name]
    assert guessed == []


@pytest.mark.parametrize("value", [1e30, 1e29, np.nan, np.inf, -np.inf, 1e8])
def test_no_page_holds_what_no_page_can_give(value: float) -> None:
    """``|score| <= 448 sum|q|`` whatever the page holds, here below 1e5."""
    verdict = explained(changed(sentinels_anywhere(value), ONLY_SCORES))
    assert verdict.fault_rows == 60
    named = [cause.name for cause in (*verdict.causes, *verdict.candidates)]
    assert "pages held something else" not in named


def test_a_page_of_possible_scores_is_still_named() -> None:
    def change(scores: NDArray[np.float32], ids: NDArray[np.int32], random: np.random.Generator) -> None:
        scores[:, :30, 5] = random.normal(size=(2, 30)) * 100

    verdict = explained(changed(change, ONLY_SCORES))
    assert [cause.name for cause in verdict.causes] == ["pages held something else"]


def test_a_page_is_not_named_for_rows_that_none_gives() -> None:
    """In a third of the rows the same block has a sentinel."""

    def change(scores: NDArray[np.float32], ids: NDArray[np.int32], random: np.random.Generator) -> None:
        scores[:, :30, 5] = random.normal(size=(2, 30)) * 100
        scores[:, 20:30, 5] = 1e30

    assert explained(changed(change, ONLY_SCORES)).causes == ()


def test_a_few_wrong_cells_are_no_pages() -> None:
    """All other rows that see those pages have their scores right."""

    def change(scores: NDArray[np.float32], ids: NDArray[np.int32], random: np.random.Generator) -> None:
        scores[0, 3, 5] += 7
        scores[0, 9, 7] += 7
        scores[1, 12, 2] += 7

    verdict = explained(changed(change, ONLY_SCORES))
    assert (verdict.fault_rows, verdict.causes) == (3, ())


def all_faulty(case: Case) -> Evidence:
    """As if a judge had called every row faulty."""
    grades = np.full((case.num_heads, case.total_q), 3, dtype=np.int8)
    return gather_evidence(case, grades, 3, SCORE_TOLERANCE["exact"])


def test_a_fault_without_effect_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a judge calls faulty but the contract gives are no fault's."""
    naming = name_causes(all_faulty(Engine(FAULTS["NothingForced"].made()).run()))
    assert (naming.causes, naming.candidates) == ((), ())
    no_effect = Hypothesis("nothing is wrong", "none", "", prediction_by_contract)
    monkeypatch.setattr("indexer.explain.engine.hypotheses", lambda _evidence, _narrow: [no_effect])
    naming = name_causes(all_faulty(planted("NothingForced")))
    assert (naming.causes, naming.candidates) == ((), ())


def test_rows_without_effect_are_not_counted() -> None:
    """Head 0 is scored with its own queries: the fault explains rows of head 1, however all are graded."""
    evidence = all_faulty(planted("HeadZero"))
    naming = name_causes(evidence)
    (found,) = (c for c in naming.candidates if c.name == FAULTS["HeadZero"].name)
    assert (found.explained, found.faulty) == ((evidence.head == 1).sum(), len(evidence.head))
    assert found.explained < found.faulty


def test_one_exchanged_block_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row exchanges its last block for the next by chance: a fault that happens to give that is shown,
    not named."""

    def change(scores: NDArray[np.float32], ids: NDArray[np.int32], random: np.random.Generator) -> None:
        ids[0, 3, -1] = np.argsort(-scores[0, 3], kind="stable")[ids.shape[2]]

    def lowers_that_block(evidence: Evidence) -> Prediction:
        right = score(evidence)
        scores = right.scores.copy()
        for row in np.flatnonzero((evidence.head == 0) & (evidence.token == 3)):
            scores[row, np.argsort(-scores[row], kind="stable")[evidence.case.topk - 1]] = -1e9
        return by_scores(replace(right, scores=scores))

    chance = Hypothesis("by chance", "none", "", lowers_that_block)
    monkeypatch.setattr("indexer.explain.engine.hypotheses", lambda _evidence, _narrow: [chance])
    verdict = explained(changed(change, ONLY_IDS))
    assert verdict.fault_rows == 1
    assert verdict.causes == ()
    assert [(c.name, c.explained, c.faulty) for c in verdict.candidates] == [("by chance", 1, 1)]


def test_ids_in_another_order_are_not_given() -> None:
    """The set alone is not the row where the order is stated."""
    case = Engine(engine_case(LENGTHS)).run(ONLY_IDS)
    assert case.engine is not None
    assert case.engine.block_ids is not None
    grades = np.full((case.num_heads, case.total_q), 3, dtype=np.int8)
    for order, turned, given in (("score", False, True), ("score", True, False), ("any", True, True)):
        ids = case.engine.block_ids[:, :, ::-1] if turned else case.engine.block_ids
        engine = dataclasses.replace(case.engine, block_ids=ids.copy(), order=order)  # type: ignore[arg-type]
        evidence = gather_evidence(dataclasses.replace(case, engine=engine), grades, 3, 2.0**-16)
        assert match(prediction_by_contract(evidence), evidence).rows.all() == given


def test_what_there_was_no_time_for_is_named() -> None:
    """The clock is past the limit after a few faults; those behind them are listed, none is lost."""
    evidence = all_faulty(planted("HeadZero"))

    def ticking(limit: float) -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += limit

    ticks = ticking(1.0)
    naming = name_causes(evidence, seconds=5.5, clock=lambda: next(ticks))
    assert naming.causes == ()
    assert "every head is scored with head 0's queries" in naming.untried
    ticks = ticking(0.0)
    whole = name_causes(evidence, seconds=5.5, clock=lambda: next(ticks))
    assert whole.untried == ()
    assert len(naming.untried) > 40


def test_people_are_told_what_was_not_tried() -> None:
    verdict = dataclasses.replace(explained(planted("HeadZero")), causes=(), untried=("one fault", "another"))
    console = Console(width=120, record=True, file=io.StringIO())
    print_engine(console, "case", verdict)
    told = "Not tried for want of time: one fault; another."
    assert told in console.export_text()
    assert told in engine_section(verdict)
