"""The queries: read in another layout, or not in E4M3."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import by_steps
from indexer.explain.replica import Steps, quantised
from kernel.contract import HEAD_DIM


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    found = []
    case = evidence.case
    if case.num_heads > 1:
        found += [
            Hypothesis(
                "queries are read head-major",
                "head/token layout",
                "index_q is [token, head, 128] and is read as if it were [head, token, 128].",
                by_steps(_head_major),
            ),
            Hypothesis(
                "every head is scored with head 0's queries",
                "head/token layout",
                "The head is left out of the query's address.",
                by_steps(_head_zero),
            ),
        ]
    if case.index_q.dtype.itemsize > 1:
        found.append(
            Hypothesis(
                "queries are not cast to E4M3",
                "saturation and rounding",
                "Scores are made from the queries as they come, not from their E4M3 values.",
                by_steps(_as_they_come),
            )
        )
    return found


def _head_major(evidence: Evidence) -> Steps:
    case = evidence.case
    rows = case.index_q.reshape(-1, HEAD_DIM)[evidence.head * case.total_q + evidence.token]
    return Steps(queries=quantised(rows.astype(np.float64)))


def _head_zero(evidence: Evidence) -> Steps:
    return Steps(queries=quantised(evidence.case.index_q[evidence.token, 0].astype(np.float64)))


def _as_they_come(evidence: Evidence) -> Steps:
    return Steps(queries=evidence.case.index_q[evidence.token, evidence.head].astype(np.float32))
