"""A planted fault, and how it is recorded and explained."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from indexer.case import Case
from indexer.case.case import parts
from indexer.explain import EngineJudge, EngineVerdict
from indexer.oracle import run_oracle
from kernel.backends.base import SCORE_TOLERANCE
from tests.support.faulty_engine import Engine, engine_case

BOTH, ONLY_SCORES, ONLY_IDS = "scores ids", "scores", "ids"
ALL = (BOTH, ONLY_SCORES, ONLY_IDS)
LONG = {"lengths": [(900, 300), (700, 10), (600, 200)]}
"""Chunks of more than one block."""
ANY_FORCED = {"init_blocks": 2, "local_blocks": 2}


class Planted(Engine):
    """A fault: its case, what names it, and what must be recorded for that, and the part that has it."""

    name: ClassVar[str]
    family: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    records: ClassVar[tuple[str, ...]] = ALL
    only: ClassVar[str | None] = None

    @classmethod
    def made(cls) -> Case:
        return engine_case(**cls.options)


_MADE: dict[str, Case] = {}


def planted(fault: type[Planted]) -> Case:
    """The fault's file, with scores and ids; made once."""
    if fault.__name__ not in _MADE:
        with np.errstate(invalid="ignore", over="ignore"):
            _MADE[fault.__name__] = fault(fault.made()).run()
    return _MADE[fault.__name__]


def only(case: Case, record: str) -> Case:
    """The same with only what was recorded."""
    assert case.engine is not None
    engine = dataclasses.replace(
        case.engine,
        scores=case.engine.scores if "scores" in record else None,
        block_ids=case.engine.block_ids if "ids" in record else None,
    )
    return dataclasses.replace(case, engine=engine)


def explained(case: Case) -> EngineVerdict:
    """As ``verify`` does it, without a backend of our own."""
    judge = EngineJudge(case, SCORE_TOLERANCE["exact"])
    for part in parts(case, 1 << 22):
        judge.add(part, run_oracle(part.case))
    return judge.verdict()
