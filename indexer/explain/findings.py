"""The differences of a part as findings: where each is, and which rule it breaks, in words."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from indexer.explain.differences import FAULT, NONE, VERDICTS, Differences, Ints, Rule
from indexer.explain.engine_verdict import KINDS, Finding
from indexer.explain.rule_words import Judged, Row, own_score, rule_of
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, SUPPORTED_HEADS

MAX_HEADS = max(SUPPORTED_HEADS)
OWN_RULES: tuple[Rule, ...] = ("own best", "own tie", "own descending", "own tied order")
"""Rules that the engine's own scores decide."""


def findings(judged: Judged, differences: list[Differences], *, faults: bool, most: int) -> Iterator[Finding]:
    """The first faults, or else the first of what is legal, row by row; in a row by kind."""
    picked = [(one, *_first(one, faults, most)) for one in differences]
    entries = [
        (row, KINDS.index(one.kind), int(one.place[i]), int(one.cells[i, 2]), one, i)
        for one, places, rows in picked
        for i, row in zip(places.tolist(), rows.tolist())
    ]
    entries.sort(key=lambda entry: entry[:4])
    for *_, one, i in entries[:most]:
        place, against = int(one.place[i]), int(one.against[i])
        yield _finding(judged, one, one.cells[i], int(one.grades[i]), place, against)


def _first(one: Differences, faults: bool, most: int) -> tuple[Ints, Ints]:
    """Places among which the first ``most`` are, all of a row or none, and their rows by token and head."""
    places = np.flatnonzero((one.grades == FAULT) == faults)
    if not most or not len(places):
        return places[:0], places[:0]
    rows = one.cells[places, 1] * MAX_HEADS + one.cells[places, 0]
    if len(rows) > most:
        kept = rows <= np.partition(rows, most - 1)[most - 1]
        places, rows = places[kept], rows[kept]
    return places, rows


def _finding(
    judged: Judged, one: Differences, cell: NDArray[np.int64], grade: int, place: int, against: int
) -> Finding:
    head, token, block = (int(n) for n in cell)
    part, oracle, engine = judged.part, judged.oracle, judged.engine
    position = int(part.case.seq_lens[0]) - part.case.total_q + token
    seen = position // BLOCK_TOKENS + 1
    scores = oracle.scores[head, token, :seen]
    topk = part.case.topk
    kth = float(np.sort(scores)[-topk]) if topk <= seen else None
    expected = got = margin = allowed = None
    if block != NONE:
        expected, got = float(scores[block]), own_score(engine, head, token, block)
        forced = expected >= LOCAL_SCORE
        allowed = 0.0 if forced else judged.tolerance * float(oracle.bounds[head, token, block])
        margin = None if forced or kth is None or kth >= LOCAL_SCORE else expected - kth
    if one.rule in OWN_RULES:
        expected, allowed = own_score(engine, head, token, against), 0.0
        margin = None if got is None or expected is None else got - expected
        if margin is not None and not np.isfinite(margin):
            margin = None
    row = Row(judged, head, token, seen, engine.block_ids)
    if one.kind == "id" and row.lacks:
        against = row.lacks[0]
    return Finding(
        request=part.request,
        head=head,
        token=part.first + token,
        position=position,
        block=block,
        kind=one.kind,
        verdict=VERDICTS[grade],
        expected=expected,
        got=got,
        margin=margin,
        allowed=allowed,
        place=None if place == NONE else place,
        id=None if place == NONE else row.ids[place],
        against=None if against == NONE else against,
        rule=rule_of(row, one.rule, VERDICTS[grade], block, place, against),
    )
