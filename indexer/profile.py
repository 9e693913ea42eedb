"""Runs a case several times and says where the time went."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from indexer.case import Case
from indexer.case_scorer import CaseScorer
from indexer.peaks import Peaks, measured_peaks
from indexer.replay import flop
from indexer.stages import StageTimes
from indexer.wire.profile import Floor, Profile, StageMs
from kernel.contract import BLOCK_TOKENS, PAGE_BYTES

CacheUse = Literal["cold", "warm"]
_DEVICE_STAGES = ("score", "topk", "select")
"""Stages that the floor is compared with."""
_FLUSH_BYTES = 1 << 29
"""Larger than the last-level cache of any GPU, and of a CPU that does not say how large its own is."""
_CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def profile_case(
    scorer: CaseScorer,
    case: Case,
    *,
    cache: CacheUse = "cold",
    repeats: int = 5,
    scores: bool = False,
    trace: bool = False,
    before_run: Callable[[], None] | None = None,
) -> Profile:
    """Profile a case.

    Args:
        scorer: what runs it.
        case: the call.
        cache: ``cold``: the device's caches are flushed before each run; or ``warm``.
        repeats: runs that are measured, 1 or more, after one that is not.
        scores: whether the scores are kept, as a caller that wants them would.
        trace: whether to add a chrome trace of one more run.
        before_run: called before each run that is measured or traced; what it raises ends the profile.

    Raises:
        InvalidArgumentError: as :meth:`indexer.case_scorer.CaseScorer.score`.
    """
    device = scorer.device
    flush = flush_buffer(device) if cache == "cold" else None
    _run(scorer, case, scores, flush)
    runs = []
    for _ in range(repeats):
        if before_run is not None:
            before_run()
        runs.append(_run(scorer, case, scores, flush))
    if trace and before_run is not None:
        before_run()
    device_seconds = statistics.median(sum(run.get(name, 0.0) for name in _DEVICE_STAGES) for run in runs)
    work, moved = flop(case), bytes_moved(case, scores=scores)
    floor = _floor(work, moved, measured_peaks(device))
    return Profile(
        backend=scorer.backend,
        device=str(device),
        precision=scorer.precision,
        cache=cache,
        repeats=repeats,
        num_heads=case.num_heads,
        total_q=case.total_q,
        batch=case.batch,
        longest_context=int(case.seq_lens.max(initial=0)),
        stages=tuple(_stage(name, [run[name] for run in runs]) for name in runs[0]),
        device_ms=1e3 * device_seconds,
        flop=work,
        bytes=moved,
        tflops=work / device_seconds / 1e12 if device_seconds else 0.0,
        tbps=moved / device_seconds / 1e12 if device_seconds else 0.0,
        floor=floor,
        times_floor=1e3 * device_seconds / max(floor.compute_ms, floor.memory_ms, 1e-9),
        trace=_trace(scorer, case, scores) if trace else None,
    )


def bytes_moved(case: Case, *, scores: bool) -> int:
    """Bytes that scoring must move: each page in use and the queries in, block ids and any scores out."""
    with_queries = case.query_lens > 0
    blocks = -(-case.seq_lens.astype(np.int64) // BLOCK_TOKENS) * with_queries
    num_pages = int(blocks.sum())
    if case.block_table is not None:
        used = np.arange(case.block_table.shape[1]) < blocks[:, None]
        num_pages = np.unique(case.block_table[used]).size
    cells = case.rows * case.num_score_blocks if scores else 0
    queries = case.index_q.size  # one byte a value: scored as E4M3
    return num_pages * PAGE_BYTES + queries + 4 * cells + 4 * case.rows * case.topk


def _run(scorer: CaseScorer, case: Case, scores: bool, flush: torch.Tensor | None) -> dict[str, float]:
    times = StageTimes(scorer.device)
    batch = scorer.batch(case, case.init_blocks, case.local_blocks, times)
    if flush is not None:
        flush.add_(1)
    scorer.run(batch, topk=case.topk, order="score", times=times, return_scores=scores)
    return dict(times)


def _floor(work: int, moved: int, peaks: Peaks) -> Floor:
    compute, memory = work / peaks.flop_per_second, moved / peaks.bytes_per_second
    return Floor(
        tflops=peaks.flop_per_second / 1e12,
        tbps=peaks.bytes_per_second / 1e12,
        source=peaks.source,
        compute_ms=1e3 * compute,
        memory_ms=1e3 * memory,
        bound_by="compute" if compute > memory else "memory",
    )


def _stage(name: str, seconds: list[float]) -> StageMs:
    return StageMs(
        stage=name,
        median_ms=1e3 * statistics.median(seconds),
        min_ms=1e3 * min(seconds),
        max_ms=1e3 * max(seconds),
    )


def flush_buffer(device: torch.device) -> torch.Tensor:
    """A tensor that leaves nothing else in a device's caches when all of it is written."""
    size = _FLUSH_BYTES
    if device.type == "cpu" and _CPU_CACHE.exists():
        text = _CPU_CACHE.read_text(encoding="ascii").strip()
        size = 2 * 1024 * int(text.removesuffix("K")) if text.endswith("K") else size
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _trace(scorer: CaseScorer, case: Case, scores: bool) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if scorer.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        _run(scorer, case, scores, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return trace
