"""Turns a part's differences into findings: the place of each, and the rule it breaks in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case, EngineRecord
from indexer.case.case import Part
from indexer.explain.judge import MEASURED, UNMEASURED, unmeasured
from indexer.explain.verdict import (
    FAULT,
    KINDS,
    NONE,
    RIGHT,
    VERDICTS,
    Bools,
    Differences,
    Finding,
    Ints,
    Rule,
    known,
)
from indexer.oracle import OracleResult
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, SUPPORTED_HEADS

ENTRY_RULES: tuple[Rule, ...] = ("below -1", "not of the row", "repeated", "too few", "gap")
"""Rules that one entry of a row breaks."""
SHOWN_LACKS = 3
"""Missing blocks listed in a text."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A judged part of a call.

    Attributes:
        part: the part.
        seq_len: keys of its whole request.
        engine: the engine's result.
        oracle: the right result.
        tolerance: in units of a cell's bound.
    """

    part: Part
    seq_len: int
    engine: EngineRecord
    oracle: OracleResult
    tolerance: float


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a part; it sees ``seen`` blocks."""

    judged: Judged
    head: int
    token: int
    seen: int

    @property
    def ids(self) -> list[int]:
        """The engine's ids; empty if none were recorded."""
        ids = self.judged.engine.block_ids
        return [] if ids is None else [int(i) for i in ids[self.head, self.token]]

    @property
    def lacks(self) -> list[int]:
        """Blocks of the right selection missing from the ids, best first."""
        right = self.judged.oracle.block_ids[self.head, self.token].tolist()
        return [block for block in right if block != NONE and block not in self.ids]

    def right(self, block: int) -> str:
        """The right score as text."""
        return f"{float(self.judged.oracle.scores[self.head, self.token, block]):.6g}"

    def own_score(self, block: int) -> float | None:
        """The engine's score of a block; None if it was not recorded."""
        scores = self.judged.engine.scores
        return None if scores is None else float(scores[self.head, self.token, block])

    def own(self, block: int) -> str:
        """The engine's score as text."""
        score = self.own_score(block)
        return "nothing" if score is None else f"{score:.6g}"


def rule_of(row: Row, rule: Rule, verdict: str, block: int, place: int, against: int) -> str:
    """The rule in words, with the row's numbers."""
    if rule == "score":
        return _score_rule(row, block)
    if rule in ("picked", "missed"):
        return _exchange_rule(row, rule, verdict, against)
    if rule in ENTRY_RULES:
        return _entry_rule(row, rule, place) + _lacked(row)
    return _order_rule(row, rule, place, block, against)


def _score_rule(row: Row, block: int) -> str:
    at = row.head, row.token, block
    have = known(row.own_score(block))
    want, bound = float(row.judged.oracle.scores[at]), float(row.judged.oracle.bounds[at])
    why = int(unmeasured(np.array([have]), np.array([want]), np.array([bound]))[0])
    if why == MEASURED:
        error = abs(have - want) / bound
        return f"off by {error:.3g} of sum|q k|, {row.judged.tolerance:.2g} is allowed"
    right = "a forced block's score" if want >= LOCAL_SCORE else "a number"
    return {
        "NaN": f"NaN where {right} must be",
        "infinite": f"{have:+g} where {right} must be: the row sees the block",
        "forced by the engine only": "a forced block's score: the block is not forced",
        "forced by the contract only": f"the block is forced: its score must be {want:.0e}",
        "another forced score": f"the block's forced score must be {want:.0e}",
        "not exactly 0": "its products are all 0: so must be the score",
    }[UNMEASURED[why]]


def _exchange_rule(row: Row, rule: Rule, verdict: str, against: int) -> str:
    best = f"the best {min(row.judged.part.case.topk, row.seen)}"
    other = f"block {against} ({row.right(against)})"
    if verdict == "tie":
        return f"ties with {other} at the last place: legal"
    if verdict == "rounding":
        return f"as close to {other} as sums in fp32 may differ: legal"
    if rule == "picked":
        return f"not of {best}: {other} was left out"
    return f"of {best}, and left out: {other} was picked"


def _lacked(row: Row) -> str:
    lacks = row.lacks
    if not lacks:
        return ""
    shown = ", ".join(f"{block} ({row.right(block)})" for block in lacks[:SHOWN_LACKS])
    more = f" and {len(lacks) - SHOWN_LACKS} more" if len(lacks) > SHOWN_LACKS else ""
    return f"; of the right blocks the row lacks {shown}{more}"


def _entry_rule(row: Row, rule: Rule, place: int) -> str:
    ids = row.ids
    blocks = -(-row.judged.seq_len // BLOCK_TOKENS)
    wanted = min(len(ids), row.seen)
    if rule == "below -1":
        return "an id is a block from 0 on, or -1 for none"
    filling = f"; the row sees {row.seen} blocks, so here -1 must stand" if place >= wanted else ""
    if rule == "not of the row" and ids[place] >= blocks:
        return f"request {row.judged.part.request} has blocks 0 to {blocks - 1} only{filling}"
    if rule == "not of the row":
        return f"the token sees blocks 0 to {row.seen - 1} only: this one lies after it{filling}"
    if rule == "repeated":
        return f"a block may be picked once: it stands at place {ids.index(ids[place])} already{filling}"
    if rule == "too few":
        picked = sum(i != NONE for i in ids)
        more = ", and ids follow" if any(i != NONE for i in ids[place:]) else ""
        return f"the row sees {row.seen} blocks and must pick {wanted}: it picks {picked}{more}"
    return "-1 may stand only behind all ids, and here ids follow"


def _order_rule(row: Row, rule: Rule, place: int, block: int, against: int) -> str:
    own = f"block {block} ({row.own(block)})", f"block {against} ({row.own(against)})"
    right = f"block {block} ({row.right(block)})", f"block {against} ({row.right(against)})"
    return {
        "own best": f"by its own scores {own[1]} was to be picked before {own[0]}",
        "own tie": f"ties with {own[1]} by its own scores, and the lower id goes first: legal",
        "own descending": f"by its own scores {own[0]} goes before {own[1]}, at place {place - 1}",
        "own tied order": f"ties with {own[1]} by its own scores, and the lower id goes first: legal",
        "descending": f"{right[1]} stands before {right[0]}: not told apart which of them is out of place",
        "ascending": f"block {against} stands before it: not told apart which of them is out of place",
    }[rule]


# ---- Findings ----

MAX_HEADS = max(SUPPORTED_HEADS)
OWN_RULES: tuple[Rule, ...] = ("own best", "own tie", "own descending", "own tied order")
"""Rules decided by the engine's own scores."""


def findings(judged: Judged, differences: list[Differences], *, faults: bool, most: int) -> Iterator[Finding]:
    """Yields the first faults, or the first legal differences, by row and kind."""
    picked = [(one, *_first(one, faults, most)) for one in differences]
    entries = [
        (row, KINDS.index(one.kind), int(one.place[i]), int(one.cells[i, 2]), one, i)
        for one, places, rows in picked
        for i, row in zip(places.tolist(), rows.tolist())
    ]
    entries.sort(key=lambda entry: entry[:4])
    for *_, one, i in entries[:most]:
        yield _finding(judged, one, i)


def _first(one: Differences, faults: bool, most: int) -> tuple[Ints, Ints]:
    """Places that contain the first ``most``, whole rows only, and their rows by token and head."""
    places = np.flatnonzero((one.grades == FAULT) == faults)
    if not most or not len(places):
        return places[:0], places[:0]
    rows = one.cells[places, 1] * MAX_HEADS + one.cells[places, 0]
    if len(rows) > most:
        kept = rows <= np.partition(rows, most - 1)[most - 1]
        places, rows = places[kept], rows[kept]
    return places, rows


def _finding(judged: Judged, one: Differences, i: int) -> Finding:
    head, token, block = (int(n) for n in one.cells[i])
    place, against, verdict = int(one.place[i]), int(one.against[i]), VERDICTS[int(one.grades[i])]
    part, oracle = judged.part, judged.oracle
    position = int(part.case.seq_lens[0]) - part.case.total_q + token
    seen = position // BLOCK_TOKENS + 1
    scores = oracle.scores[head, token, :seen]
    topk = part.case.topk
    kth = float(np.sort(scores)[-topk]) if topk <= seen else None
    row = Row(judged, head, token, seen)
    expected = got = margin = allowed = None
    if block != NONE:
        expected, got = float(scores[block]), row.own_score(block)
        forced = expected >= LOCAL_SCORE
        allowed = 0.0 if forced else judged.tolerance * float(oracle.bounds[head, token, block])
        margin = None if forced or kth is None or kth >= LOCAL_SCORE else expected - kth
    if one.rule in OWN_RULES:
        expected, allowed = row.own_score(against), 0.0
        margin = None if got is None or expected is None else got - expected
        margin = None if margin is None or not np.isfinite(margin) else margin
    if one.kind == "id" and row.lacks:
        against = row.lacks[0]
    return Finding(
        request=part.request,
        head=head,
        token=part.first + token,
        position=position,
        block=block,
        kind=one.kind,
        verdict=verdict,
        expected=expected,
        got=got,
        margin=margin,
        allowed=allowed,
        place=None if place == NONE else place,
        id=None if place == NONE else row.ids[place],
        against=None if against == NONE else against,
        rule=rule_of(row, one.rule, verdict, block, place, against),
    )


# ---- Parts of a call with all of its faulty rows ----

LEAST_FAULTY = 4
"""Fewer faulty rows may be in one part by chance."""


def parts_at_fault(case: Case, grades: NDArray[np.int8]) -> Iterator[tuple[str, Bools]]:
    """Yields the name of each part and its rows ``[H, total_q]``: no row outside is faulty, some are right.

    Args:
        case: the call.
        grades: ``[H, total_q]`` of its rows.
    """
    faulty = grades == FAULT
    if faulty.sum() < LEAST_FAULTY:
        return
    head, token = np.arange(case.num_heads)[:, None], np.arange(case.total_q)
    request = case.requests_of(token)
    position = case.positions()
    heads, tokens = np.nonzero(faulty)
    start = int(position[tokens].min())
    parts = [
        (f"in head {heads[0]}", head == heads[0]),
        (f"in request {request[tokens[0]]:,}", request == request[tokens[0]]),
        ("in decode rows", case.query_lens[request] == 1),
        (f"from position {start:,} on", position >= start),
    ]
    for words, rows in parts:
        part = np.broadcast_to(rows, grades.shape)
        outside = grades[~part]
        if not (outside == FAULT).any() and (outside >= RIGHT).any():
            yield words, part
