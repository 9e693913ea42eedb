"""What is said about an engine's result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["score", "picked", "missed", "order", "id"]
"""``score``: a cell's score. ``picked``: a block that should not be. ``missed``: one that should.
``order``: ids not in the order stated. ``id``: not a block of the row, repeated, or too many or too few."""
Verdict = Literal["tie", "rounding", "fault"]
"""``tie``: equal scores at the last place. ``rounding``: no more than sums in fp32 may differ. ``fault``:
neither."""


@dataclass(frozen=True)
class Finding:
    """One place where an engine differs from the oracle.

    Attributes:
        request: of the batch.
        head: index head.
        token: query token, in the whole call.
        position: of the token in its request.
        block: logical block; -1 for a row as a whole.
        kind: what differs.
        verdict: whether that is legal.
        expected: the right score; None for an id that is no block of the row.
        got: the engine's score, None if it was not recorded.
        margin: the right score less that of the row's k-th best block; None without one.
        allowed: how far a score may be off, same unit.
    """

    request: int
    head: int
    token: int
    position: int
    block: int
    kind: Kind
    verdict: Verdict
    expected: float | None
    got: float | None
    margin: float | None
    allowed: float | None


@dataclass(frozen=True)
class Cause:
    """A fault that was computed, and its result compared with the engine's.

    Attributes:
        name: the fault in a few words, the same in every report.
        family: the kind of fault.
        says: what the engine would have to do for it, and where to look.
        explained: faulty sampled rows that the fault gives exactly.
        faulty: faulty sampled rows.
        kept: right sampled rows that the fault leaves right.
        right: right sampled rows.
        fitted: 0 if nothing was fitted to the engine's result; more, the more could be.
    """

    name: str
    family: str
    says: str
    explained: int
    faulty: int
    kept: int
    right: int
    fitted: int


@dataclass(frozen=True)
class WrittenKeys:
    """Keys of this step, against the bytes that the engine's pages hold for them.

    Attributes:
        tokens: compared.
        wrong: of them, whose bytes are not the contract's.
        worst_request: where the first wrong one is, -1 if there is none.
        worst_position: its position there.
        cause: what explains them, None if nothing does or nothing is wrong.
    """

    tokens: int
    wrong: int
    worst_request: int
    worst_position: int
    cause: Cause | None


@dataclass(frozen=True)
class EngineVerdict:
    """Whether an engine's result is right.

    Attributes:
        ok: no row is faulty, and no key was written wrong.
        rows: judged.
        right_rows: equal to the oracle's selection and scores within rounding.
        tie_rows: differ by equal scores at the last place only.
        rounding_rows: differ by rounding only.
        fault_rows: differ by more.
        selection_fault_rows: where the ids are not even the best by the engine's own scores; None if only one
            of the two was recorded.
        max_score_error: of a cell that no sentinel or mask decides, in units of its ``sum_i |q_i k_i|``; None
            without scores.
        score_tolerance: largest error allowed, same unit.
        fault_rows_by_request: request to faulty rows, those with any.
        fault_rows_by_head: head to faulty rows, those with any.
        findings: differences, faults first, up to a limit.
        total_findings: how many there are.
        causes: the fault that explains the difference best, or several that cannot be told apart.
        candidates: others that explain a part, best first.
        untried: names of faults for which there was no time.
        written: of ``new_keys``; None without.
    """

    ok: bool
    rows: int
    right_rows: int
    tie_rows: int
    rounding_rows: int
    fault_rows: int
    selection_fault_rows: int | None
    max_score_error: float | None
    score_tolerance: float
    fault_rows_by_request: dict[int, int]
    fault_rows_by_head: dict[int, int]
    findings: tuple[Finding, ...]
    total_findings: int
    causes: tuple[Cause, ...]
    candidates: tuple[Cause, ...]
    untried: tuple[str, ...]
    written: WrittenKeys | None
