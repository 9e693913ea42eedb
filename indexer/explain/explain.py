"""Judges an engine's result part by part, then names what explains it."""

from __future__ import annotations

from collections import Counter

import numpy as np

from indexer.case import Case, EngineRecord
from indexer.case.part import Part
from indexer.explain.engine_verdict import EngineVerdict, Finding
from indexer.explain.evidence import gather_evidence
from indexer.explain.judge_part import FAULT, RIGHT, ROUNDING, TIE, PartJudgement, findings, judge_part
from indexer.explain.name_causes import Naming, name_causes
from indexer.explain.written import check_written
from indexer.oracle import OracleResult

MAX_FINDINGS = 1000
"""Differences that are kept, faults before all else."""


def _place(finding: Finding) -> tuple[int, int, int]:
    return finding.token, finding.head, finding.block


class EngineJudge:
    """Collects the judgement of a case's parts.

    Args:
        case: the whole case, its keys in pages.
        tolerance: largest score error allowed, in units of ``sum_i |q_i k_i|``.
        max_findings: differences kept.
    """

    def __init__(self, case: Case, tolerance: float, max_findings: int = MAX_FINDINGS) -> None:
        if case.engine is None:
            raise AssertionError("there is an engine's result to judge")
        self._case, self._engine, self._tolerance = case, case.engine, tolerance
        self._grades = np.zeros((case.num_heads, case.total_q), dtype=np.int8)
        self._most = max_findings
        self._faults: list[Finding] = []
        self._legal: list[Finding] = []
        self._total = self._selection_faults = 0
        self._error: float | None = None

    @property
    def judges(self) -> bool:
        """Whether the engine recorded anything that can be judged row by row."""
        return self._engine.scores is not None or self._engine.block_ids is not None

    def add(self, part: Part, oracle: OracleResult) -> None:
        """Judge one part by the oracle's answer to it."""
        record = part.case.engine
        if record is None or not self.judges:
            return
        judged = judge_part(part.case, record, oracle, self._tolerance)
        self._grades[:, part.first : part.first + part.case.total_q] = judged.grades
        self._total += sum(len(cells) for _, cells, _ in judged.differences)
        if judged.selection_faults is not None:
            self._selection_faults += int(judged.selection_faults.sum())
        if judged.max_score_error is not None:
            self._error = max(self._error or 0.0, judged.max_score_error)
        self._keep(part, record, oracle, judged)

    def verdict(self) -> EngineVerdict:
        """What all parts say together."""
        faulty = self._grades == FAULT
        naming = Naming((), (), ())
        if faulty.any():
            evidence = gather_evidence(self._case, self._grades, FAULT, self._tolerance)
            naming = name_causes(evidence)
        written = check_written(self._case)
        request = np.repeat(np.arange(self._case.batch), self._case.query_lens)
        by_request = Counter(request[np.nonzero(faulty)[1]].tolist())
        both = self._engine.scores is not None and self._engine.block_ids is not None
        kept = [*sorted(self._faults, key=_place), *sorted(self._legal, key=_place)][: self._most]
        return EngineVerdict(
            ok=not faulty.any() and (written is None or not written.wrong),
            rows=self._case.rows,
            right_rows=int((self._grades == RIGHT).sum()),
            tie_rows=int((self._grades == TIE).sum()),
            rounding_rows=int((self._grades == ROUNDING).sum()),
            fault_rows=int(faulty.sum()),
            selection_fault_rows=self._selection_faults if both else None,
            max_score_error=self._error,
            score_tolerance=self._tolerance,
            fault_rows_by_request=dict(sorted(by_request.items())),
            fault_rows_by_head={h: int(n) for h, n in enumerate(faulty.sum(axis=1)) if n},
            findings=tuple(kept),
            total_findings=self._total,
            causes=naming.causes,
            candidates=naming.candidates,
            untried=naming.untried,
            written=written,
        )

    def _keep(self, part: Part, record: EngineRecord, oracle: OracleResult, judged: PartJudgement) -> None:
        if len(self._faults) >= self._most:
            return
        for finding in findings(part, record, oracle, judged, self._tolerance):
            kept = self._faults if finding.verdict == "fault" else self._legal
            if len(kept) < self._most:
                kept.append(finding)
            elif kept is self._faults:
                return
