"""An engine's judged parts together: what there is of each kind, and whether all of it is right."""

from __future__ import annotations

from collections import Counter

import numpy as np

from indexer.case import Case, EngineRecord
from indexer.case.part import Part
from indexer.explain.differences import FAULT, RIGHT, ROUNDING, TIE, UNJUDGED, VERDICTS, Bools
from indexer.explain.engine_verdict import KINDS, EngineVerdict, Finding, Kind, WrittenKeys
from indexer.explain.findings import findings
from indexer.explain.judge_part import judge_part
from indexer.explain.name_causes import Naming
from indexer.explain.rule_words import Judged
from indexer.oracle import WRONG_CELL_ERROR, OracleResult


class Tally:
    """Collects the judgement of a case's parts.

    Args:
        case: the whole case.
        engine: its result.
        tolerance: largest score error allowed, in units of ``sum_i |q_i k_i|``.
        max_findings: differences kept.
        judged: ``[H, total_q]`` rows to judge; all if None.
    """

    def __init__(
        self, case: Case, engine: EngineRecord, tolerance: float, max_findings: int, judged: Bools | None
    ) -> None:
        self._case, self._engine, self._tolerance = case, engine, tolerance
        shape = (case.num_heads, case.total_q)
        self._judged = np.ones(shape, dtype=bool) if judged is None else judged
        self.grades = np.full(shape, UNJUDGED, dtype=np.int8)
        self.selection_faults = np.zeros(shape, dtype=bool)
        self.score_faults = np.zeros(shape, dtype=bool)
        self._most = max_findings
        self._faults: list[Finding] = []
        self._legal: list[Finding] = []
        self._counts: Counter[tuple[Kind, int]] = Counter()
        self._error = 0.0
        self._unmeasured: Counter[str] = Counter()

    @property
    def judges(self) -> bool:
        """Whether the engine recorded anything that can be judged row by row."""
        return self._engine.scores is not None or self._engine.block_ids is not None

    def add(self, part: Part, oracle: OracleResult) -> None:
        """Judge one part by the oracle's answer to it."""
        record = part.case.engine
        if record is None or not self.judges:
            return
        tokens = slice(part.first, part.first + part.case.total_q)
        found = judge_part(part.case, record, oracle, self._tolerance, self._judged[:, tokens])
        self.grades[:, tokens] = found.grades
        for one in found.differences:
            for grade, count in zip(*np.unique(one.grades, return_counts=True)):
                self._counts[one.kind, int(grade)] += int(count)
        if found.selection_faults is not None:
            self.selection_faults[:, tokens] = found.selection_faults
        if found.scores is not None:
            self._error = max(self._error, found.scores.max_measured_error)
            self._unmeasured.update(found.scores.unmeasured)
            head, token, _ = found.scores.wrong.cells.T
            self.score_faults[head, part.first + token] = True
        told = Judged(part, int(self._case.seq_lens[part.request]), record, oracle, self._tolerance)
        for faults, kept in ((True, self._faults), (False, self._legal)):
            room = self._most - len(self._faults) - (0 if faults else len(self._legal))
            kept.extend(findings(told, found.differences, faults=faults, most=max(0, room)))

    def verdict(self, naming: Naming, written: WrittenKeys | None) -> EngineVerdict:
        """What all parts say together."""
        faulty = self.grades == FAULT
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
            rows=int((self.grades != UNJUDGED).sum()),
            unjudged_rows=unjudged,
            right_rows=int((self.grades == RIGHT).sum()),
            tie_rows=int((self.grades == TIE).sum()),
            rounding_rows=int((self.grades == ROUNDING).sum()),
            fault_rows=int(faulty.sum()),
            selection_fault_rows=int(self.selection_faults.sum()) if both else None,
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
