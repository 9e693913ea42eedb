"""Faults of a part of a call: what may be said of one, and what may not."""

from __future__ import annotations

import io

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from client.engine_report import print_engine
from client.report.page import engine_section
from indexer.explain.findings import parts_at_fault
from indexer.explain.verdict import FAULT, RIGHT
from tests.support.faulty_engine import engine_case
from tests.support.planted.fault import ALL, explained, planted
from tests.support.planted.parts import InOneHead
from tests.unit.test_explain_no_cause import changed, reselect

LENGTHS = [(1700, 30), (900, 1), (1500, 20)]


def graded(rows: list[tuple[int, int]]) -> NDArray[np.int8]:
    """Grades of two heads and 51 tokens, faulty at ``(head, token)``."""
    grades = np.full((2, 51), RIGHT, dtype=np.int8)
    for head, token in rows:
        grades[head, token] = FAULT
    return grades


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([(1, 5), (1, 30), (1, 31), (1, 40)], ["in head 1"]),
        ([(0, 2), (1, 5), (0, 9), (1, 29)], ["in request 0", "from position 1,672 on"]),
        ([(0, 2), (1, 32), (0, 30), (1, 29)], []),
        ([(1, 5), (1, 6), (1, 7)], []),
    ],
)
def test_parts_hold_all_faulty_rows_and_not_all_rows(rows: list[tuple[int, int]], parts: list[str]) -> None:
    """The lowest position of the call, 899, is no bound of a part: nothing is outside."""
    found = list(parts_at_fault(engine_case(LENGTHS), graded(rows)))
    assert [words for words, _ in found] == parts
    for _, part in found:
        assert all(part[row] for row in rows)


@pytest.mark.parametrize("record", ALL)
@pytest.mark.parametrize("where", ["head", "request", "late"])
def test_noise_in_a_part_has_no_cause(where: str, record: str) -> None:
    part = {"head": np.s_[1:, :], "request": np.s_[:, 30:], "late": np.s_[:, 15:30]}[where]

    def change(scores: NDArray[np.float32], ids: NDArray[np.int32], random: np.random.Generator) -> None:
        scores[part] += random.normal(size=scores[part].shape) * 20
        right = ids.copy()
        reselect(scores, ids)
        wrong = ids[part].copy()
        ids[:] = right
        ids[part] = wrong

    verdict = explained(changed(change, record))
    assert verdict.fault_rows > 20
    assert verdict.causes == ()


def test_a_person_is_told_which_part() -> None:
    verdict = explained(planted(InOneHead))
    out = io.StringIO()
    print_engine(Console(file=out, width=400), "case", verdict)
    for told in (out.getvalue(), engine_section(verdict)):
        assert "nibbles are swapped, only in head 1" in told
        assert "all in head 1: no other row of the call is faulty." in told
