"""Judges an engine's result part by part, then names the cause that explains it.

A cause is named if it reproduces nearly all faulty rows of a sample, keeps the right ones right, and no other
does better; causes that do equally well are named together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from indexer.case.case import Part
from indexer.explain.causes import hypotheses, ids, keys, pages
from indexer.explain.evidence import Evidence, PageKeys, gather_evidence, prediction_by_contract, right_keys
from indexer.explain.findings import Judged, findings, parts_at_fault
from indexer.explain.judge import judge_part
from indexer.explain.match import (
    Hypothesis,
    Match,
    disagreements,
    few_faulty,
    match,
    narrowed,
    reproduces_any,
)
from indexer.explain.verdict import (
    FAULT,
    KINDS,
    RIGHT,
    ROUNDING,
    TIE,
    UNJUDGED,
    VERDICTS,
    Bools,
    Bytes,
    Cause,
    EngineVerdict,
    Finding,
    Ids,
    Ints,
    Kind,
    WrittenKeys,
    known,
)
from indexer.oracle import WRONG_CELL_ERROR, OracleResult
from kernel.backends.reference.quantizer import dequantize_keys, quantize_keys
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUPS, PAGE_BYTES, TOKEN_CODE_BYTES

# ---- Naming a cause ----

NAMED_SHARE = 0.9
"""Share of faulty rows that a cause must reproduce, and of right rows that it must keep right."""
NAMED_BITS = 8
"""Least evidence for a named cause, see :func:`indexer.explain.match.disagreements`."""
FITTED_BITS = 12
"""Least evidence for one that was fitted to the result."""
CANDIDATE_SHARE = 0.25
"""Share of faulty rows from which a cause is worth showing."""
MAX_CANDIDATES = 4
TIME_LIMIT = 120.0
"""Seconds after which no further fault is tried."""


@dataclass(frozen=True)
class Naming:
    """What explains a result.

    Attributes:
        causes: the best explanation, or several equally good ones.
        candidates: faults that explain a part, best first.
        untried: names of faults for which there was no time.
        most: largest share of the sample's faulty rows that one fault explains.
    """

    causes: tuple[Cause, ...]
    candidates: tuple[Cause, ...]
    untried: tuple[str, ...]
    most: float = 0.0


@dataclass(frozen=True, eq=False)
class Trial:
    """A hypothesis and its match with the sample."""

    hypothesis: Hypothesis
    match: Match
    cause: Cause
    bits: int

    @property
    def rank(self) -> tuple[int, int, int]:
        """Rows reproduced, then how little was fitted, then cells reproduced."""
        return self.cause.explained + self.cause.kept, -self.cause.fitted, self.match.cells

    @property
    def names(self) -> bool:
        """Whether the evidence suffices to name the cause."""
        cause = self.cause
        # The choice of a part of the call is a fit, too.
        enough = self.bits >= (FITTED_BITS if cause.fitted or cause.only else NAMED_BITS)
        many = cause.explained >= NAMED_SHARE * cause.faulty and cause.kept >= NAMED_SHARE * cause.right
        return enough and many


def name_causes(
    evidence: Evidence,
    seconds: float = TIME_LIMIT,
    clock: Callable[[], float] = time.monotonic,
    only: str | None = None,
) -> Naming:
    """Tries every fault: on a few rows, on all rows in some columns, then on everything.

    A fault explains a row if it gives what the engine recorded and the contract does not.

    Args:
        evidence: the sample.
        seconds: after which no further fault is tried.
        clock: seconds.
        only: the part of the call that the sample is of, human-readable.
    """
    end = clock() + seconds
    right = prediction_by_contract(evidence)
    wrong = evidence.faulty & ~match(right, evidence).rows
    if not wrong.any():
        return Naming((), (), ())
    bits = disagreements(evidence, right)
    narrow = narrowed(evidence, right)
    few = few_faulty(evidence, right, wrong)
    untried: list[str] = []

    def in_time(found: list[Hypothesis]) -> Iterator[Hypothesis]:
        for hypothesis in found:
            if clock() < end:
                yield hypothesis
            else:
                untried.append(hypothesis.name)

    left = [
        hypothesis
        for hypothesis in in_time(_applicable(hypotheses(evidence, narrow), only))
        if reproduces_any(hypothesis.predict(few), few)
    ]
    if narrow is not evidence:  # a fault explains no more rows in all columns than in some
        most = [_try(hypothesis, narrow, wrong, bits, only) for hypothesis in in_time(left)]
        most = [one for one in most if one.cause.explained >= CANDIDATE_SHARE * one.cause.faulty]
        left = [one.hypothesis for one in sorted(most, key=lambda one: one.rank, reverse=True)]
    tried = [_try(hypothesis, evidence, wrong, bits, only) for hypothesis in in_time(left)]
    tried = [one for one in tried if one.cause.explained]
    tried.sort(key=lambda one: one.rank, reverse=True)
    named = [one for one in tried[:1] if one.names]
    if named:
        named += [one for one in tried[1:] if one.rank == named[0].rank and one.names]
    shown = {one.hypothesis.name for one in named}
    others = [
        one.cause
        for one in tried
        if one.hypothesis.name not in shown and one.cause.explained >= CANDIDATE_SHARE * one.cause.faulty
    ]
    causes = tuple(one.cause for one in named)
    most_given = max((one.cause.explained / one.cause.faulty for one in tried), default=0.0)
    return Naming(causes, tuple(others[:MAX_CANDIDATES]), tuple(untried), most_given)


def _applicable(found: list[Hypothesis], only: str | None) -> list[Hypothesis]:
    """Causes that a part of a call can have by itself: a page's bytes are the same for every row."""
    if only is None:
        return found
    return [one for one in found if one.family != pages.STALE.name and not one.leaves_open]


def _try(hypothesis: Hypothesis, evidence: Evidence, wrong: Bools, bits: Ints, only: str | None) -> Trial:
    found = match(hypothesis.predict(evidence), evidence)
    given = found.rows
    if not hypothesis.leaves_open and evidence.blocks is None:
        # A row read only from pages outside the file agrees with any result.
        given = given & found.determined
    fitted = hypothesis.fitted
    if found.unknown and evidence.blocks is None:
        fitted = max(fitted, 2)  # undetermined cells contradict nothing
    explained = given & wrong
    cause = Cause(
        name=hypothesis.name,
        family=hypothesis.family,
        says=hypothesis.says,
        explained=int(explained.sum()),
        faulty=int(evidence.faulty.sum()),
        kept=int((given & ~evidence.faulty).sum()),
        right=int((~evidence.faulty).sum()),
        fitted=fitted,
        only=only,
    )
    return Trial(hypothesis, found, cause, int(bits[explained].sum()))


# ---- The cause that needs no prediction: right scores whose best are not selected ----


def selection_cause(
    evidence: Evidence, selection_faults: Bools, score_faults: Bools, named: tuple[Cause, ...]
) -> tuple[Cause, ...]:
    """The cause, if nothing better was named.

    Args:
        evidence: a sample of rows.
        selection_faults: ``[H, total_q]`` rows whose ids the engine's own scores contradict.
        score_faults: ``[H, total_q]`` rows that have a wrong score.
        named: causes that explain the scores or the ids. Those of a wrong order of ids accept close scores
            in any order, so they miss an id that is one place off.
    """
    if any(cause.family != "order of ids" for cause in named):
        return named
    contradicted = selection_faults[evidence.head, evidence.token]
    scores_right = ~score_faults[evidence.head, evidence.token]
    explained = int((scores_right & contradicted & evidence.faulty).sum())
    faulty = int(evidence.faulty.sum())
    if not explained or explained < NAMED_SHARE * faulty:
        return named
    right = int((~evidence.faulty).sum())
    cause = Cause(
        name="the ids are not the best by the engine's own scores",
        family=ids.SELECTION.name,
        says="The scores are right, and the selection does not follow them: look at the top-k step, at what "
        "it reads, and at what is done to its ids afterwards.",
        explained=explained,
        faulty=faulty,
        kept=right,
        right=right,
        fitted=0,
    )
    return (cause,)


# ---- This step's keys against the bytes that the engine's pages hold for them ----

CHUNK_TOKENS = 4096
SAMPLE_TOKENS = 256
"""Wrong tokens among which a cause is searched, at most."""
READINGS: tuple[tuple[str, str, PageKeys], ...] = (
    ("nibbles are written swapped", keys.NIBBLES.name, keys.swapped),
    ("nibbles are written planar", keys.NIBBLES.name, keys.planar),
    ("scales are written interleaved with codes", keys.SCALE_ORDER.name, keys.interleaved),
    ("scales are written group-major", keys.SCALE_ORDER.name, keys.group_major),
    ("scales are written swizzled", keys.SCALE_ORDER.name, keys.swizzled),
    ("scales are written before the codes", keys.SCALE_ORDER.name, keys.scales_first),
    *(
        (f"scales are written wrong: {name}", keys.SCALE_GROUP.name, keys.grouped(groups))
        for name, _, groups in keys.GROUPINGS[:5]
    ),
    ("keys are written with the other sign", keys.SIGN.name, keys.negated),
    ("keys are not written", pages.STALE.name, right_keys),  # which are 0
)
"""Name, family, and how to read a page that was written that way."""


def check_written(case: Case) -> WrittenKeys | None:
    """Compare a case's keys of this step with its pages; None unless it has both."""
    record = case.engine
    if record is None or record.new_keys is None or case.pages is None or case.block_table is None:
        return None
    pages = case.pages.reshape(-1, PAGE_BYTES)
    request = np.repeat(np.arange(case.batch), case.query_lens)
    position = case.positions()
    place, slot = case.block_table[request, position // BLOCK_TOKENS], position % BLOCK_TOKENS
    wrong = np.zeros(case.total_q, dtype=bool)
    for first in range(0, case.total_q, CHUNK_TOKENS):
        chunk = slice(first, first + CHUNK_TOKENS)
        codes, scales = quantize_keys(record.new_keys[chunk].astype(np.float64))
        at_codes = slot[chunk, None] * TOKEN_CODE_BYTES + np.arange(TOKEN_CODE_BYTES)
        at_scales = CODE_BYTES + slot[chunk, None] * GROUPS + np.arange(GROUPS)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        wrong[chunk] = (pages[place[chunk, None], at_codes] != packed).any(axis=1)
        wrong[chunk] |= (pages[place[chunk, None], at_scales] != scales).any(axis=1)
    at = np.flatnonzero(wrong)
    return WrittenKeys(
        tokens=case.total_q,
        wrong=int(at.size),
        worst_request=int(request[at[0]]) if at.size else -1,
        worst_position=int(position[at[0]]) if at.size else -1,
        cause=_written_as(pages, record.new_keys, place, slot, at) if at.size else None,
    )


def _written_as(pages: Bytes, keys: NDArray[np.generic], place: Ids, slot: Ints, wrong: Ints) -> Cause | None:
    """The layout in which the wrong tokens' bytes are right."""
    at = wrong[np.unique(np.linspace(0, len(wrong) - 1, SAMPLE_TOKENS).round().astype(np.int64))]
    codes, scales = quantize_keys(keys[at].astype(np.float64))
    wanted = dequantize_keys(codes, scales).astype(np.float32)
    used, inverse = np.unique(place[at], return_inverse=True)
    best: Cause | None = None
    for name, family, reading in READINGS:
        given = reading(pages[used])[inverse, slot[at]] == (wanted if reading is not right_keys else 0)
        explained = int(given.all(axis=1).sum())
        if explained > 0.9 * len(at) and (best is None or explained > best.explained):
            says = "are right if the page is read in that way: the writer has it."
            if reading is right_keys:
                says = "are zero: the insert did not run, or not yet."
            says = f"The bytes of this step's keys {says}"
            best = Cause(name, family, says, explained, len(at), 0, 0, 0)
    return best


# ---- A whole case ----

MAX_FINDINGS = 1000
"""Differences that are kept, faults first."""


class EngineJudge:
    """Collects the judgement of a case's parts.

    Args:
        case: the whole case, its keys in pages, its queries finite.
        tolerance: largest score error allowed, in units of ``sum_i |q_i k_i|``.
        max_findings: differences kept.
        judged: ``[H, total_q]`` rows to judge; all if None.
    """

    def __init__(
        self, case: Case, tolerance: float, max_findings: int = MAX_FINDINGS, judged: Bools | None = None
    ) -> None:
        self._case, self._engine, self._tolerance = case, known(case.engine), tolerance
        shape = (case.num_heads, case.total_q)
        self._judged = np.ones(shape, dtype=bool) if judged is None else judged
        self._grades = np.full(shape, UNJUDGED, dtype=np.int8)
        self._selection_faults = np.zeros(shape, dtype=bool)
        self._score_faults = np.zeros(shape, dtype=bool)
        self._most = max_findings
        self._faults: list[Finding] = []
        self._legal: list[Finding] = []
        self._counts: Counter[tuple[Kind, int]] = Counter()
        self._error = 0.0
        self._unmeasured: Counter[str] = Counter()

    def add(self, part: Part, oracle: OracleResult) -> None:
        """Judges one part by the oracle's answer to it."""
        record = part.case.engine
        if record is None or (record.scores is None and record.block_ids is None):
            return
        tokens = slice(part.first, part.first + part.case.total_q)
        found = judge_part(part.case, record, oracle, self._tolerance, self._judged[:, tokens])
        self._grades[:, tokens] = found.grades
        for one in found.differences:
            for grade, count in zip(*np.unique(one.grades, return_counts=True)):
                self._counts[one.kind, int(grade)] += int(count)
        if found.selection_faults is not None:
            self._selection_faults[:, tokens] = found.selection_faults
        if found.scores is not None:
            self._error = max(self._error, found.scores.max_measured_error)
            self._unmeasured.update(found.scores.unmeasured)
            head, token, _ = found.scores.wrong.cells.T
            self._score_faults[head, part.first + token] = True
        context = Judged(part, int(self._case.seq_lens[part.request]), record, oracle, self._tolerance)
        for faults, kept in ((True, self._faults), (False, self._legal)):
            room = self._most - len(self._faults) - (0 if faults else len(self._legal))
            kept.extend(findings(context, found.differences, faults=faults, most=max(0, room)))

    def verdict(self) -> EngineVerdict:
        """Names the causes and sums up all parts."""
        naming = Naming((), (), ())
        if (self._grades == FAULT).any():
            end = time.monotonic() + TIME_LIMIT
            evidence = gather_evidence(self._case, self._grades, FAULT, self._tolerance)
            naming = name_causes(evidence)
            if not naming.causes and naming.most >= NAMED_SHARE:
                naming = self._named_in_a_part(end) or naming
            causes = selection_cause(evidence, self._selection_faults, self._score_faults, naming.causes)
            naming = replace(naming, causes=causes)
        return self.summary(naming, check_written(self._case))

    def _named_in_a_part(self, end: float) -> Naming | None:
        """Names a fault that only one part of the call has."""
        for words, rows in parts_at_fault(self._case, self._grades):
            seconds = end - time.monotonic()
            if seconds <= 0:
                break
            own = np.where(rows, self._grades, UNJUDGED).astype(np.int8)
            evidence = gather_evidence(self._case, own, FAULT, self._tolerance)
            naming = name_causes(evidence, seconds, only=words)
            if naming.causes:
                return naming
        return None

    def summary(self, naming: Naming, written: WrittenKeys | None) -> EngineVerdict:
        """Sums up all parts, with the causes and the written keys given."""
        faulty = self._grades == FAULT
        unjudged = int((~self._judged).sum())
        with_scores = self._engine.scores is not None
        both = with_scores and self._engine.block_ids is not None
        request = np.repeat(np.arange(self._case.batch), self._case.query_lens)
        by_request = Counter(request[np.nonzero(faulty)[1]].tolist())
        differences = {
            kind: {VERDICTS[grade]: n for grade in (FAULT, ROUNDING, TIE) if (n := self._counts[kind, grade])}
            for kind in KINDS
        }
        return EngineVerdict(
            ok=not faulty.any() and not unjudged and (written is None or not written.wrong),
            rows=int((self._grades != UNJUDGED).sum()),
            unjudged_rows=unjudged,
            right_rows=int((self._grades == RIGHT).sum()),
            tie_rows=int((self._grades == TIE).sum()),
            rounding_rows=int((self._grades == ROUNDING).sum()),
            fault_rows=int(faulty.sum()),
            selection_fault_rows=int(self._selection_faults.sum()) if both else None,
            max_score_error=(WRONG_CELL_ERROR if self._unmeasured else self._error) if with_scores else None,
            max_measured_error=self._error if with_scores else None,
            unmeasured_cells=dict(self._unmeasured) if with_scores else None,
            score_tolerance=self._tolerance,
            fault_rows_by_request=dict(sorted(by_request.items())),
            fault_rows_by_head={h: int(n) for h, n in enumerate(faulty.sum(axis=1)) if n},
            differences={kind: counts for kind, counts in differences.items() if counts},
            total_findings=self._counts.total(),
            findings=(*self._faults, *self._legal)[: self._most],
            causes=naming.causes,
            candidates=naming.candidates,
            untried=naming.untried,
            written=written,
        )
