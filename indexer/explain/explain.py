"""Judges an engine's result part by part, then names what explains it."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from indexer.case.part import Part
from indexer.explain.differences import FAULT, UNJUDGED, Bools
from indexer.explain.engine_verdict import EngineVerdict
from indexer.explain.evidence import gather_evidence
from indexer.explain.name_causes import NAMED_SHARE, TIME_LIMIT, Naming, name_causes
from indexer.explain.parts_at_fault import parts_at_fault
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
            end = time.monotonic() + TIME_LIMIT
            evidence = gather_evidence(self._case, grades, FAULT, self._tolerance)
            naming = name_causes(evidence)
            if not naming.causes and naming.most >= NAMED_SHARE:
                naming = self._named_in_a_part(grades, end) or naming
            causes = selection_cause(
                evidence, self._tally.selection_faults, self._tally.score_faults, naming.causes
            )
            naming = replace(naming, causes=causes)
        return self._tally.verdict(naming, check_written(self._case))

    def _named_in_a_part(self, grades: NDArray[np.int8], end: float) -> Naming | None:
        """What a fault explains that only some rows of the call have: it leaves the right ones among them."""
        for words, rows in parts_at_fault(self._case, grades):
            seconds = end - time.monotonic()
            if seconds <= 0:
                break
            own = np.where(rows, grades, UNJUDGED).astype(np.int8)
            evidence = gather_evidence(self._case, own, FAULT, self._tolerance)
            naming = name_causes(evidence, seconds, only=words)
            if naming.causes:
                return naming
        return None
