"""An engine's result changed by hand and judged, without a search for causes."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case, EngineOrder
from indexer.case.case import parts
from indexer.explain import MAX_FINDINGS, EngineVerdict
from indexer.explain.engine import Naming, Tally
from indexer.oracle import run_oracle
from kernel.backends.base import SCORE_TOLERANCE
from tests.support.faulty_engine import Engine, engine_case

LENGTHS = ((300, 2), (2600, 3))
"""``(seq_len, query_len)``: rows that see fewer blocks than they could pick, and rows that see more."""
TOPK = 6


def right_case() -> Case:
    """Two heads, five tokens; the first block and the last one are forced."""
    return Engine(engine_case(LENGTHS, topk=TOPK, init_blocks=1, local_blocks=1)).run()


def recorded(case: Case) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Copies of the engine's scores and ids, to be changed."""
    assert case.engine is not None
    assert case.engine.scores is not None
    assert case.engine.block_ids is not None
    return case.engine.scores.copy(), case.engine.block_ids.copy()


def with_result(
    case: Case,
    scores: NDArray[np.float32] | None,
    ids: NDArray[np.int32] | None,
    order: EngineOrder = "score",
) -> Case:
    """The case with another result of the engine."""
    assert case.engine is not None
    record = dataclasses.replace(case.engine, scores=scores, block_ids=ids, order=order)
    return dataclasses.replace(case, engine=record)


def judged(
    case: Case, tolerance: float = SCORE_TOLERANCE["exact"], max_findings: int = MAX_FINDINGS
) -> EngineVerdict:
    """The verdict, without causes."""
    assert case.engine is not None
    tally = Tally(case, case.engine, tolerance, max_findings, None)
    for part in parts(case, 1 << 22):
        tally.add(part, run_oracle(part.case))
    return tally.verdict(Naming((), (), ()), None)
