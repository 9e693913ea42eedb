"""Rows that hold no selection: each entry that keeps them from it has a place, an id, and a rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from indexer.case import Case, EngineRecord
from indexer.explain.engine import check_written
from indexer.explain.verdict import Finding
from indexer.oracle import WRONG_CELL_ERROR
from indexer.verify import verify_case
from kernel.backends.base import SCORE_TOLERANCE
from kernel.backends.reference import ReferenceBackend
from tests.support.faulty_engine import (
    JUDGED_TOPK,
    Engine,
    engine_case,
    judged,
    recorded,
    right_case,
    with_result,
)

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
            put(TOKEN, JUDGED_TOPK - 1, -1),
            TOKEN,
            JUDGED_TOPK - 1,
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
    ids[0, 4] = random.permutation(21)[:JUDGED_TOPK]
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


# Cells in which one side is no number show in the figures, and never make an error look smaller.

SCORES_HEAD, SCORES_TOKEN = 1, 3
"""A row of request 1 that sees 21 blocks."""
ORDINARY, INIT, LOCAL = 7, 0, 20


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
    scores[SCORES_HEAD, SCORES_TOKEN, block] = value
    verdict = judged(with_result(case, scores, None))
    assert not verdict.ok
    assert verdict.unmeasured_cells == {name: 1}
    assert verdict.max_score_error == WRONG_CELL_ERROR
    assert verdict.max_measured_error == 0.0
    (finding,) = verdict.findings
    assert (finding.kind, finding.head, finding.token, finding.block) == (
        "score",
        SCORES_HEAD,
        SCORES_TOKEN,
        block,
    )
    assert words in finding.rule
    assert finding.got is not None
    np.testing.assert_equal(np.float32(finding.got), np.float32(value))


def test_what_has_an_error_is_still_measured(case: Case) -> None:
    scores, _ = recorded(case)
    scores[SCORES_HEAD, SCORES_TOKEN, ORDINARY] += 1.0
    verdict = judged(with_result(case, scores, None))
    measured = verdict.max_score_error
    assert measured is not None
    assert SCORE_TOLERANCE["exact"] < measured < 1
    assert (verdict.unmeasured_cells, verdict.max_measured_error) == ({}, measured)
    scores[SCORES_HEAD, SCORES_TOKEN, ORDINARY + 1] = np.nan
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
    assert scores[SCORES_HEAD, SCORES_TOKEN, ORDINARY] == 0
    scores[SCORES_HEAD, SCORES_TOKEN, ORDINARY] = 1e-20
    verdict = judged(with_result(zeros, scores, None))
    assert verdict.unmeasured_cells == {"not exactly 0": 1}
    assert verdict.max_score_error == WRONG_CELL_ERROR


def test_cells_that_no_row_sees_are_not_looked_at(case: Case) -> None:
    scores, ids = recorded(case)
    scores[:, 0, 3:] = np.nan  # of request 0, which has three blocks
    verdict = judged(with_result(case, scores, ids))
    assert verdict.ok
    assert (verdict.max_score_error, verdict.unmeasured_cells) == (0.0, {})


# A selection is judged by the engine's own scores exactly, and by the right ones within rounding.

SELECTION_HEAD, SELECTION_TOKEN = 1, 3
"""A row of request 1 that sees 21 blocks."""
ANY_ERROR = 1.0
"""A tolerance by which all scores are alike: only the engine's own decide."""


def ranked(case: Case) -> list[int]:
    """The row's blocks, best first."""
    scores, _ = recorded(case)
    return [int(block) for block in np.argsort(-scores[SELECTION_HEAD, SELECTION_TOKEN, :21], kind="stable")]


def only(findings: tuple[Finding, ...]) -> Finding:
    (finding,) = findings
    assert (finding.request, finding.head, finding.token, finding.position) == (
        1,
        SELECTION_HEAD,
        SELECTION_TOKEN,
        2598,
    )
    return finding


def test_the_next_best_is_a_fault_however_close_it_is(case: Case) -> None:
    """The engine's scores are within rounding of the right ones, and so is the block that it picks."""
    assert case.block_table is not None
    table = case.block_table.copy()
    table[1, 1:20] = table[1, 1]  # blocks that are all alike: the oracle's choice of them is a tie
    case = Engine(dataclasses.replace(case, block_table=table, engine=None)).run()
    scores, ids = recorded(case)
    left_out = int(
        np.flatnonzero(
            scores[SELECTION_HEAD, SELECTION_TOKEN, :20] == scores[SELECTION_HEAD, SELECTION_TOKEN, 10]
        )[-1]
    )
    assert left_out not in ids[SELECTION_HEAD, SELECTION_TOKEN]
    scores[SELECTION_HEAD, SELECTION_TOKEN, left_out] = np.nextafter(
        scores[SELECTION_HEAD, SELECTION_TOKEN, left_out], np.float32(np.inf)
    )
    verification = verify_case(with_result(case, scores, ids), "case", "cpu")
    verdict = verification.engine
    assert verdict is not None
    assert not verification.ok
    assert not verdict.ok
    assert (verdict.fault_rows, verdict.selection_fault_rows) == (1, 1)
    assert verdict.max_score_error is not None
    assert verdict.max_score_error < verdict.score_tolerance
    finding = only(verdict.findings)
    picked = int(ids[SELECTION_HEAD, SELECTION_TOKEN, JUDGED_TOPK - 1])
    assert (finding.kind, finding.verdict, finding.block) == ("selection", "fault", picked)
    assert (finding.place, finding.id, finding.against) == (JUDGED_TOPK - 1, picked, left_out)
    expected, got = (
        scores[SELECTION_HEAD, SELECTION_TOKEN, left_out],
        scores[SELECTION_HEAD, SELECTION_TOKEN, picked],
    )
    assert (finding.expected, finding.got) == (expected, got)
    assert finding.margin == float(got) - float(expected) < 0
    assert f"block {left_out}" in finding.rule
    assert [(cause.family, cause.explained) for cause in verdict.causes] == [("selection", 1)]
    assert judged(with_result(case, None, ids)).ok, "ids alone are right"


def test_the_best_left_out_and_the_worst_picked_are_named(case: Case) -> None:
    order = ranked(case)
    scores, ids = recorded(case)
    ids[SELECTION_HEAD, SELECTION_TOKEN] = [*order[: JUDGED_TOPK - 2], order[10], order[12]]
    verdict = judged(with_result(case, scores, ids), ANY_ERROR)
    own = next(finding for finding in verdict.findings if finding.kind == "selection")
    assert (own.block, own.place, own.against) == (order[12], JUDGED_TOPK - 1, order[JUDGED_TOPK - 2])
    assert verdict.fault_rows == 1


def test_a_score_that_is_nan_is_the_worst(case: Case) -> None:
    order = ranked(case)
    scores, ids = recorded(case)
    scores[SELECTION_HEAD, SELECTION_TOKEN, order[JUDGED_TOPK - 1]] = np.nan
    verdict = judged(with_result(case, scores, ids))
    own = next(finding for finding in verdict.findings if finding.kind == "selection")
    assert (own.block, own.against) == (order[JUDGED_TOPK - 1], order[JUDGED_TOPK])


def test_of_equal_scores_of_its_own_the_lower_id_goes_first_and_the_other_is_legal(case: Case) -> None:
    scores, ids = recorded(case)
    for head, token in np.ndindex(2, 5):
        row = np.argsort(-scores[head, token], kind="stable")
        last, next_best = int(row[JUDGED_TOPK - 1]), int(row[JUDGED_TOPK])
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
    ids[head, token, JUDGED_TOPK - 1] = next_best
    verdict = judged(with_result(case, scores, ids), ANY_ERROR)
    assert {(finding.kind, finding.verdict) for finding in verdict.findings} == {
        ("picked", "rounding"),
        ("missed", "rounding"),
    }


def test_its_own_order_is_exact_and_equal_scores_are_legal(case: Case) -> None:
    scores, ids = recorded(case)
    third, fourth = int(ids[SELECTION_HEAD, SELECTION_TOKEN, 3]), int(ids[SELECTION_HEAD, SELECTION_TOKEN, 4])
    ids[SELECTION_HEAD, SELECTION_TOKEN, [3, 4]] = fourth, third
    verdict = judged(with_result(case, scores, ids), ANY_ERROR)
    finding = only(verdict.findings)
    assert (finding.kind, finding.verdict, finding.place) == ("order", "fault", 4)
    assert (finding.block, finding.against) == (third, fourth)
    assert verdict.selection_fault_rows == 0, "the set is the best"
    assert not verdict.ok
    assert judged(with_result(case, None, ids), ANY_ERROR).ok, "without scores that is rounding"
    assert judged(with_result(case, scores, ids, "any"), ANY_ERROR).ok
    scores[SELECTION_HEAD, SELECTION_TOKEN, third] = scores[SELECTION_HEAD, SELECTION_TOKEN, fourth]
    ids[SELECTION_HEAD, SELECTION_TOKEN, [3, 4]] = max(third, fourth), min(third, fourth)
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
    ids[SELECTION_HEAD, SELECTION_TOKEN, JUDGED_TOPK - 1] = order[JUDGED_TOPK]
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
    second = int(ids[SELECTION_HEAD, SELECTION_TOKEN, 3])
    scores[SELECTION_HEAD, SELECTION_TOKEN, second] *= 1.5
    ids[SELECTION_HEAD, SELECTION_TOKEN, [2, 3]] = ids[SELECTION_HEAD, SELECTION_TOKEN, [3, 2]]
    assert ids[SELECTION_HEAD, SELECTION_TOKEN, 2] == second
    verdict = judged(with_result(case, scores, ids))
    assert (only(verdict.findings).kind, verdict.selection_fault_rows) == ("score", 0)
    kinds = [finding.kind for finding in judged(with_result(case, scores, ids, "block")).findings]
    assert kinds.count("order") == case.rows, "an order by block is another matter"


# Keys of a step against the bytes that an engine wrote for them.

Pages = NDArray[np.uint8]


def written_case(change: Callable[[Pages], Pages]) -> Case:
    """A case whose last keys were inserted by the oracle, its pages then changed."""
    case = engine_case()
    assert case.pages is not None
    assert case.block_table is not None
    random = np.random.default_rng(3)
    keys = random.normal(size=(case.total_q, 128)).astype(ml_dtypes.bfloat16)
    keys[5] *= 3000  # saturates, and a group of zeros
    keys[6, :16] = 0
    slots = []
    for request in range(case.batch):
        seq_len, queries = int(case.seq_lens[request]), int(case.query_lens[request])
        for position in range(seq_len - queries, seq_len):
            slots.append(int(case.block_table[request, position // 128]) * 128 + position % 128)
    pages = torch.from_numpy(case.pages.copy())
    ReferenceBackend().insert(torch.from_numpy(keys.astype(np.float32)), pages, torch.tensor(slots))
    written = change(pages.numpy().copy())
    return dataclasses.replace(case, pages=written, engine=EngineRecord(new_keys=keys))


def interleave(pages: Pages) -> Pages:
    codes, scales = pages[:, :8192].reshape(-1, 128, 64), pages[:, 8192:].reshape(-1, 128, 8)
    return np.concatenate([codes, scales], axis=2).reshape(pages.shape)


def swap(pages: Pages) -> Pages:
    pages[:, :8192] = pages[:, :8192] >> 4 | pages[:, :8192] << 4
    return pages


def group_major(pages: Pages) -> Pages:
    pages[:, 8192:] = pages[:, 8192:].reshape(-1, 128, 8).swapaxes(1, 2).reshape(-1, 1024)
    return pages


def negate(pages: Pages) -> Pages:
    pages[:, :8192] ^= 0x88
    return pages


def test_right_keys_are_right() -> None:
    case = written_case(lambda pages: pages)
    found = check_written(case)
    assert found is not None
    assert (found.tokens, found.wrong, found.worst_position, found.cause) == (case.total_q, 0, -1, None)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (interleave, "scales are written interleaved with codes"),
        (swap, "nibbles are written swapped"),
        (group_major, "scales are written group-major"),
        (negate, "keys are written with the other sign"),
        (np.zeros_like, "keys are not written"),
    ],
)
def test_a_wrong_writer_is_named(change: Callable[[Pages], Pages], name: str) -> None:
    found = check_written(written_case(change))
    assert found is not None
    assert found.wrong > 0.9 * found.tokens
    assert (found.worst_request, found.worst_position) == (0, 1670)
    assert found.cause is not None
    assert found.cause.name == name


def test_one_wrong_token_is_found_and_has_no_cause() -> None:
    def damage(pages: Pages) -> Pages:
        page = int(table[2, 1099 // 128])
        pages[page, 1099 % 128 * 64 + 7] ^= 1
        return pages

    table = np.asarray(engine_case().block_table)
    found = check_written(written_case(damage))
    assert found is not None
    assert (found.wrong, found.worst_request, found.worst_position, found.cause) == (1, 2, 1099, None)


def test_without_keys_or_pages_there_is_nothing_to_compare() -> None:
    assert check_written(engine_case()) is None
