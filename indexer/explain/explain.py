"""Judges an engine's result part by part, then names what explains it."""

from __future__ import annotations

from dataclasses import replace

from indexer.case import Case
from indexer.case.part import Part
from indexer.explain.differences import FAULT, Bools
from indexer.explain.engine_verdict import EngineVerdict
from indexer.explain.evidence import gather_evidence
from indexer.explain.name_causes import Naming, name_causes
from indexer.explain.selection_cause import selection_cause
from indexer.explain.tally import Tally
from indexer.explain.written import check_written
from indexer.oracle import OracleResult

MAX_FINDINGS = 1000
"""Differences that are kept, faults before all else."""


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
        if case.engine is None:
            raise AssertionError("there is an engine's result to judge")
        self._case, self._tolerance = case, tolerance
        self._tally = Tally(case, case.engine, tolerance, max_findings, judged)

    def add(self, part: Part, oracle: OracleResult) -> None:
        """Judge one part by the oracle's answer to it."""
        self._tally.add(part, oracle)

    def verdict(self) -> EngineVerdict:
        """What all parts say together."""
        grades = self._tally.grades
        naming = Naming((), (), ())
        if (grades == FAULT).any():
            evidence = gather_evidence(self._case, grades, FAULT, self._tolerance)
            naming = name_causes(evidence)
            causes = selection_cause(
                evidence, self._tally.selection_faults, self._tally.score_faults, naming.causes
            )
            naming = replace(naming, causes=causes)
        return self._tally.verdict(naming, check_written(self._case))
