"""The rule that a difference breaks, in words, with the numbers of its row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.case import EngineRecord
from indexer.case.part import Part
from indexer.explain.differences import NONE, Rule
from indexer.explain.judge_scores import MEASURED, UNMEASURED, unmeasured
from indexer.oracle import OracleResult
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS

ENTRY_RULES: tuple[Rule, ...] = ("below -1", "not of the row", "repeated", "too few", "gap")
"""Rules that one entry of a row breaks."""
SHOWN_LACKS = 3
"""Blocks that a row lacks, in words."""


@dataclass(frozen=True, eq=False)
class Judged:
    """What findings of a part are told from.

    Attributes:
        part: the part.
        seq_len: keys of its whole request.
        engine: the engine's result of the part.
        oracle: the right one.
        tolerance: in units of the cells' bounds.
    """

    part: Part
    seq_len: int
    engine: EngineRecord
    oracle: OracleResult
    tolerance: float


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a part, of which ``seen`` blocks are visible."""

    judged: Judged
    head: int
    token: int
    seen: int
    block_ids: NDArray[np.int32] | None

    @property
    def ids(self) -> list[int]:
        """As the engine wrote them."""
        return [] if self.block_ids is None else [int(i) for i in self.block_ids[self.head, self.token]]

    @property
    def lacks(self) -> list[int]:
        """Blocks of the right selection that are not among the ids, best first."""
        right = self.judged.oracle.block_ids[self.head, self.token].tolist()
        return [block for block in right if block != NONE and block not in self.ids]

    def right(self, block: int) -> str:
        """The right score in words."""
        return f"{float(self.judged.oracle.scores[self.head, self.token, block]):.6g}"

    def own(self, block: int) -> str:
        """The engine's score in words."""
        score = own_score(self.judged.engine, self.head, self.token, block)
        return "nothing" if score is None else f"{score:.6g}"


def own_score(engine: EngineRecord, head: int, token: int, block: int) -> float | None:
    """The engine's score of a cell; None if it was not recorded."""
    return None if engine.scores is None else float(engine.scores[head, token, block])


def rule_of(row: Row, rule: Rule, verdict: str, block: int, place: int, against: int) -> str:
    """The rule, with the numbers of the row."""
    if rule == "score":
        return _score_rule(row, block)
    if rule in ("picked", "missed"):
        return _exchange_rule(row, rule, verdict, against)
    if place == NONE:
        raise AssertionError("rules of ids have a place")
    if rule in ENTRY_RULES:
        return _entry_rule(row, rule, place) + _lacked(row)
    return _order_rule(row, rule, place, block, against)


def _score_rule(row: Row, block: int) -> str:
    at = row.head, row.token, block
    oracle, scores = row.judged.oracle, row.judged.engine.scores
    if scores is None:
        raise AssertionError("scores are judged where there are any")
    have, want = float(scores[at]), float(oracle.scores[at])
    bound = float(oracle.bounds[at])
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
