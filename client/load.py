"""Scores one call over and over, from several threads, and counts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """What came of it.

    Attributes:
        calls: calls that were answered.
        errors: calls that failed.
        seconds: from the first call's start to the last one's end.
        p50_ms: median latency.
        p90_ms: latency that a tenth exceeds.
        p99_ms: latency that a hundredth exceeds.
        first_error: what the first failure said; empty if there was none.
    """

    calls: int
    errors: int
    seconds: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    first_error: str

    @property
    def calls_per_second(self) -> float:
        """Answered calls a second."""
        return self.calls / self.seconds if self.seconds else 0.0


def run_load(score: Callable[[], object], threads: int, seconds: float) -> Load:
    """Call ``score`` from some threads, each again once it returned, for so long.

    Args:
        score: one call; may raise.
        threads: callers at a time.
        seconds: time after which no further call begins.
    """
    latencies: list[float] = []
    failures: list[Exception] = []
    began = time.perf_counter()

    def work() -> None:
        # A failure does not end the load, but a server that is gone must not be asked a million times.
        failed = 0
        while (started := time.perf_counter()) - began < seconds and failed < 10:
            try:
                score()
            except Exception as error:
                failures.append(error)
                failed += 1
            else:
                latencies.append(time.perf_counter() - started)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed = time.perf_counter() - began
    latencies.sort()
    p50, p90, p99 = (1e3 * _quantile(latencies, part) for part in (0.5, 0.9, 0.99))
    first_error = str(failures[0]) if failures else ""
    return Load(len(latencies), len(failures), elapsed, p50, p90, p99, first_error)


def _quantile(ordered: list[float], part: float) -> float:
    """The least value that ``part`` of all do not exceed; 0 of none."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0
