"""No cause is named for what no known fault gives, and none takes what another one does."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from client.engine_report import print_engine
from client.report.page import engine_section
from indexer.case import Case
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
from kernel.backends.base import SCORE_TOLERANCE
from tests.support.faulty_engine import Engine, engine_case
from tests.support.planted.fault import ALL, BOTH, ONLY_IDS, ONLY_SCORES, explained, only, planted
from tests.support.planted.layouts import HeadZero
from tests.support.planted.positions import NothingForced

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
    naming = name_causes(all_faulty(Engine(NothingForced.made()).run()))
    assert (naming.causes, naming.candidates) == ((), ())
    no_effect = Hypothesis("nothing is wrong", "none", "", prediction_by_contract)
    monkeypatch.setattr("indexer.explain.engine.hypotheses", lambda _evidence, _narrow: [no_effect])
    naming = name_causes(all_faulty(planted(NothingForced)))
    assert (naming.causes, naming.candidates) == ((), ())


def test_rows_without_effect_are_not_counted() -> None:
    """Head 0 is scored with its own queries: the fault explains rows of head 1, however all are graded."""
    evidence = all_faulty(planted(HeadZero))
    naming = name_causes(evidence)
    (found,) = (c for c in naming.candidates if c.name == HeadZero.name)
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
    evidence = all_faulty(planted(HeadZero))

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
    verdict = dataclasses.replace(explained(planted(HeadZero)), causes=(), untried=("one fault", "another"))
    console = Console(width=120, record=True, file=io.StringIO())
    print_engine(console, "case", verdict)
    told = "Not tried for want of time: one fault; another."
    assert told in console.export_text()
    assert told in engine_section(verdict)
