"""What ``demo`` shows of a case: everything measured, nothing printed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from indexer.answer_errors import mismatched_rows, score_error
from indexer.case import Case
from indexer.fidelity import Recall, selection_recall, unquantised_scores
from indexer.oracle import run_oracle
from indexer.replay import LoadedCase, flop, load_case
from indexer.result import ScoreResult
from kernel.backends.base import SCORE_TOLERANCE

WARM_SECONDS = 2.0
"""Time after which no further warm run begins, but for the fewest."""
WARM_RUNS = (3, 9)
"""Fewest and most warm runs."""


@dataclass(frozen=True)
class StageTime:
    """One stage of the pipeline.

    Attributes:
        name: what it does.
        cold_seconds: its first run in this process.
        warm_seconds: median of later runs.
        work: how much of ``unit`` a run does.
        unit: what is counted: keys, rows, FLOP.
    """

    name: str
    cold_seconds: float
    warm_seconds: float
    work: int
    unit: str

    @property
    def throughput(self) -> float:
        """``unit`` a second, warm."""
        return self.work / self.warm_seconds if self.warm_seconds > 0 else float("inf")


@dataclass(frozen=True, eq=False)
class Demonstration:
    """A case scored, timed, and judged.

    Attributes:
        case: the case.
        backend: the backend that ran.
        scores: ``[H, total_q, S]`` float32.
        block_ids: ``[H, total_q, k]`` int32.
        num_blocks: ``[total_q]`` int32.
        stages: in the order of the pipeline.
        warm_runs: runs that the warm medians are taken over.
        recall: against unquantised scoring; None for a case without the keys before quantisation.
        score_error: largest error against the oracle and the expected scores, units of ``sum_i |q_i k_i|``.
        score_tolerance: largest error allowed.
        wrong_rows: rows whose selection is not right by the oracle and the expected ids.
        expected_rows: rows that equal the case's expected ids; None where it has none.
    """

    case: Case
    backend: str
    scores: NDArray[np.float32]
    block_ids: NDArray[np.int32]
    num_blocks: NDArray[np.int32]
    stages: tuple[StageTime, ...]
    warm_runs: int
    recall: Recall | None
    score_error: float
    score_tolerance: float
    wrong_rows: int
    expected_rows: int | None

    @property
    def ok(self) -> bool:
        """Whether scores and selection are right."""
        return self.wrong_rows == 0 and self.score_error <= self.score_tolerance


def demonstrate(case: Case, backend: str, on_step: Callable[[str], None]) -> Demonstration:
    """Append, score, select, time, and judge a case.

    Args:
        case: the case.
        backend: a backend's name, or ``auto``.
        on_step: told what begins.

    Raises:
        InvalidArgumentError: no such backend, or keys or queries that are not finite.
        BackendUnavailableError: the backend cannot run here.
    """
    on_step("appending keys, scoring, selecting")
    loaded = load_case(case, backend)
    result = loaded.score()
    runs = [(loaded, result)]
    on_step("the same again, warm")
    began = time.perf_counter()
    while _another(len(runs) - 1, time.perf_counter() - began):
        again = load_case(case, backend)
        runs.append((again, again.score()))
    if result.scores is None:
        raise AssertionError("scores were asked for")
    scores, block_ids = result.scores.cpu().numpy(), result.block_ids.cpu().numpy()
    recall = None
    if case.index_k is not None:
        on_step("scoring the unquantised keys")
        recall = selection_recall(case, unquantised_scores(case), torch.from_numpy(block_ids))
    on_step("asking the oracle")
    oracle = run_oracle(case)
    error = score_error(scores, oracle.scores, oracle.bounds)
    if case.expected_scores is not None:
        error = max(error, score_error(scores, case.expected_scores, oracle.bounds))
    tolerance = SCORE_TOLERANCE[result.precision]
    expected = case.expected_block_ids
    return Demonstration(
        case=case,
        backend=result.backend,
        scores=scores,
        block_ids=block_ids,
        num_blocks=result.num_blocks.cpu().numpy(),
        stages=_stages(case, runs),
        warm_runs=len(runs) - 1,
        recall=recall,
        score_error=error,
        score_tolerance=tolerance,
        wrong_rows=mismatched_rows(case, scores, block_ids, oracle, tolerance),
        expected_rows=None if expected is None else int((block_ids == expected).all(axis=2).sum()),
    )


def _another(warm_runs: int, seconds: float) -> bool:
    fewest, most = WARM_RUNS
    return warm_runs < fewest or (warm_runs < most and seconds < WARM_SECONDS)


def _stages(case: Case, runs: list[tuple[LoadedCase, ScoreResult]]) -> tuple[StageTime, ...]:
    stages = []

    def add(name: str, seconds: list[float], work: int, unit: str) -> None:
        stages.append(StageTime(name, seconds[0], statistics.median(seconds[1:]), work, unit))

    if case.index_k is not None:
        add(
            "append: quantise keys into pages",
            [loaded.append_seconds for loaded, _ in runs],
            case.total_k,
            "key",
        )
    for stage, name, work, unit in (
        ("quantize_query", "cast queries to E4M3", case.rows, "row"),
        ("score", "score", flop(case), "FLOP"),
        ("topk", f"select the best {case.topk}", case.rows, "row"),
    ):
        if stage in runs[0][1].timings:
            add(name, [result.timings[stage] for _, result in runs], work, unit)
    return tuple(stages)
