"""Rows that hold no selection: each entry that keeps them from it has a place, an id, and a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from indexer.case import Case
from tests.support.faulty_engine import Engine, engine_case
from tests.support.judged import TOPK, judged, recorded, right_case, with_result

HEAD, TOKEN = 0, 4
"""A row of request 1: position 2,599, so it sees blocks 0 to 20, and its request has no others."""
EARLY = 0
"""A token of request 0: position 298, so it sees blocks 0 to 2 and picks three."""
Change = Callable[[NDArray[np.int32]], None]


@pytest.fixture(scope="module")
def case() -> Case:
    return right_case()


def put(token: int, place: int, value: int) -> Change:
    def change(ids: NDArray[np.int32]) -> None:
        ids[HEAD, token, place] = value

    return change


def again(ids: NDArray[np.int32]) -> None:
    ids[HEAD, TOKEN, 4] = ids[HEAD, TOKEN, 2]


@pytest.mark.parametrize(
    ("change", "token", "place", "value", "words"),
    [
        (put(TOKEN, 2, -1), TOKEN, 2, -1, "must pick 6: it picks 5, and ids follow"),
        (
            put(TOKEN, TOPK - 1, -1),
            TOKEN,
            TOPK - 1,
            -1,
            "sees 21 blocks and must pick 6: it picks 5;",
        ),
        (put(TOKEN, 3, 21), TOKEN, 3, 21, "request 1 has blocks 0 to 20 only"),
        (put(TOKEN, 3, 2**31 - 1), TOKEN, 3, 2**31 - 1, "request 1 has blocks 0 to 20 only"),
        (put(TOKEN, 3, -2), TOKEN, 3, -2, "-1 for none"),
        (put(TOKEN, 3, -(2**31)), TOKEN, 3, -(2**31), "-1 for none"),
        (put(EARLY, 3, 1), EARLY, 3, 1, "already; the row sees 3 blocks, so here -1 must stand"),
        (put(EARLY, 1, 3), EARLY, 1, 3, "request 0 has blocks 0 to 2 only"),
    ],
)
@pytest.mark.parametrize("order", ["score", "any"])
@pytest.mark.parametrize("with_scores", [True, False])
def test_the_entry_is_named(
    case: Case,
    change: Change,
    token: int,
    place: int,
    value: int,
    words: str,
    order: Any,
    with_scores: bool,
) -> None:
    scores, ids = recorded(case)
    change(ids)
    verdict = judged(with_result(case, scores if with_scores else None, ids, order))
    assert not verdict.ok
    assert verdict.fault_rows == 1
    (finding,) = verdict.findings
    request, position = (0, 298) if token == EARLY else (1, 2599)
    assert (finding.request, finding.head, finding.token) == (request, HEAD, token)
    assert (finding.position, finding.kind, finding.verdict) == (position, "id", "fault")
    assert (finding.place, finding.id) == (place, value)
    assert words in finding.rule
    missing = set(recorded(case)[1][HEAD, token].tolist()) - set(ids[HEAD, token].tolist())
    if missing - {-1}:
        assert {finding.against} == missing
        assert f"lacks {finding.against} " in finding.rule
    if with_scores:
        assert verdict.selection_fault_rows == 1


def test_a_block_is_picked_once(case: Case) -> None:
    _, ids = recorded(case)
    again(ids)
    (finding,) = judged(with_result(case, None, ids)).findings
    block = int(ids[HEAD, TOKEN, 2])
    assert (finding.place, finding.id, finding.block) == (4, block, block)
    assert "picked once: it stands at place 2 already" in finding.rule


def test_a_block_after_the_token_is_not_one_past_the_request() -> None:
    case = Engine(engine_case([(1300, 300)], heads=1, topk=4)).run()
    _, ids = recorded(case)
    ids[0, 0, 1] = 9  # of blocks 0 to 10; position 1,000 sees blocks 0 to 7
    (finding,) = judged(with_result(case, None, ids)).findings
    assert (finding.place, finding.id, finding.position) == (1, 9, 1000)
    assert "the token sees blocks 0 to 7 only" in finding.rule


def test_filling_before_ids_breaks_an_order_and_no_set(case: Case) -> None:
    _, ids = recorded(case)
    ids[HEAD, EARLY] = [*ids[HEAD, EARLY, :1], -1, *ids[HEAD, EARLY, 1:3], -1, -1]
    assert judged(with_result(case, None, ids, "any")).ok
    (finding,) = judged(with_result(case, None, ids)).findings
    assert (finding.kind, finding.place, finding.id) == ("id", 1, -1)
    assert "here ids follow" in finding.rule


def test_every_entry_is_told_and_the_others_are_judged(case: Case) -> None:
    _, ids = recorded(case)
    ids[HEAD, TOKEN] = [99, -3, ids[HEAD, TOKEN, 0], ids[HEAD, TOKEN, 0], 5000, ids[HEAD, TOKEN, 1]]
    verdict = judged(with_result(case, None, ids))
    assert [finding.place for finding in verdict.findings] == [0, 1, 3, 4]
    assert verdict.differences == {"id": {"fault": 4}}
    assert (verdict.fault_rows, verdict.right_rows) == (1, case.rows - 1)


def test_a_limit_keeps_the_first_row_by_row(case: Case) -> None:
    scores, ids = recorded(case)
    random = np.random.default_rng(0)
    ids[:, 1:] = random.integers(-2, 24, ids[:, 1:].shape)
    ids[0, 4] = random.permutation(21)[:TOPK]
    scores[:, 2:] += 1
    wrong = with_result(case, scores, ids)
    everything = judged(wrong)
    places = [(finding.token, finding.head) for finding in everything.findings]
    assert places == sorted(places)
    assert everything.total_findings == len(places)
    assert len({finding.kind for finding in everything.findings}) > 3
    for most in (0, 1, 5, 40):
        few = judged(wrong, max_findings=most)
        assert few.findings == everything.findings[:most]
        assert (few.differences, few.total_findings) == (everything.differences, len(places))
