"""Runs a case several times, and compares the time of each stage with what the device reaches at best.

floor = max(flop / peak product rate, bytes / peak copy bandwidth)
"""

from __future__ import annotations

import heapq
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from indexer.case import Case
from indexer.pipeline import StageTimes
from indexer.replay import CaseScorer, flop
from indexer.wire import Floor, Profile, StageMs
from kernel.batch import Request
from kernel.contract import BLOCK_TOKENS, PAGE_BYTES
from kernel.plan import STORE_BLOCKS, XCDS, plan_prefill

# ---- Peaks of the device, measured ----

_RUNS = 5
_CPU_SIZE, _GPU_SIZE = 1024, 8192
_CPU_BYTES, _GPU_BYTES, _RANDOM_BYTES = 1 << 26, 1 << 29, 1 << 20


@dataclass(frozen=True)
class Peaks:
    """Best of some runs on the device itself."""

    flop_per_second: float
    bytes_per_second: float
    source: str


@lru_cache(maxsize=4)
def measured_peaks(device: torch.device) -> Peaks:
    """Measure a device once: takes some tens of milliseconds and up to 1 GiB of its memory."""
    gpu = device.type == "cuda"
    size, dtype = (_GPU_SIZE, torch.bfloat16) if gpu else (_CPU_SIZE, torch.float32)
    left = torch.randn(size, size, dtype=torch.float32, device=device).to(dtype)
    product = torch.empty_like(left)
    flop = 2 * size**3 / _best_seconds(lambda: torch.mm(left, left, out=product), device)
    num_bytes = _GPU_BYTES if gpu else _CPU_BYTES
    random = torch.randint(256, (_RANDOM_BYTES,), dtype=torch.uint8, device=device)  # zeros can move faster
    source = random.repeat(num_bytes // _RANDOM_BYTES)
    target = torch.empty_like(source)
    moved = 2 * source.numel() / _best_seconds(lambda: target.copy_(source), device)
    name = str(dtype).removeprefix("torch.")
    return Peaks(flop, moved, f"measured here: {name} {size}^3 product, copy of {source.numel() >> 20} MiB")


@lru_cache(maxsize=4)
def measured_fp8_rate(device: torch.device) -> float | None:
    """Floating point operations a second of an E4M3 product, measured once.

    None on a CPU, and where torch has no such product for the GPU.
    """
    if device.type != "cuda":
        return None
    left = torch.randn(_GPU_SIZE, _GPU_SIZE, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones((), dtype=torch.float32, device=device)

    def product() -> object:
        return torch._scaled_mm(left, left.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    try:
        return 2 * _GPU_SIZE**3 / _best_seconds(product, device)
    except (RuntimeError, ValueError):  # torch's, for a GPU without it
        return None


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of some runs on an idle device."""
    best = float("inf")
    for _ in range(_RUNS):
        times = StageTimes(device)
        with times.stage("run"):
            run()
        best = min(best, times["run"])
    return best


# ---- The profile of a case ----

CacheUse = Literal["cold", "warm"]
_DEVICE_STAGES = ("score", "topk", "select")
"""Stages that the floor is compared with."""
_FLUSH_BYTES = 1 << 29
"""Larger than the last-level cache of any GPU, and of a CPU that does not say how large its own is."""
_TRACED_RUNS = 3
"""Runs that a traced one may take as long as: every operation is recorded, and written."""
_CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def profile_case(
    scorer: CaseScorer,
    case: Case,
    *,
    cache: CacheUse = "cold",
    repeats: int = 5,
    scores: bool = False,
    trace: bool = False,
    before_run: Callable[[float], None] | None = None,
) -> Profile:
    """Profile a case.

    Args:
        scorer: what runs it.
        case: the call.
        cache: ``cold``: the device's caches are flushed before each run; or ``warm``.
        repeats: runs that are measured, 1 or more, after one that is not.
        scores: whether the scores are kept, as a caller that wants them would.
        trace: whether to add a chrome trace of one more run.
        before_run: called before each run that is measured or traced, with the seconds that it may take by
            those before it; what it raises ends the profile.

    Raises:
        InvalidArgumentError: as :meth:`indexer.replay.CaseScorer.score`.
    """
    device = scorer.device
    flush = flush_buffer(device) if cache == "cold" else None
    runs: list[dict[str, float]] = []
    seconds = 0.0
    for _ in range(1 + repeats):
        if before_run is not None:
            before_run(seconds)
        began = time.perf_counter()
        runs.append(_run(scorer, case, scores, flush))
        seconds = time.perf_counter() - began
    del runs[0]
    if trace and before_run is not None:
        before_run(_TRACED_RUNS * seconds)
    device_seconds = statistics.median(sum(run.get(name, 0.0) for name in _DEVICE_STAGES) for run in runs)
    work, moved = flop(case), bytes_moved(case, scores=scores)
    peaks = measured_peaks(device)
    compute, memory = work / peaks.flop_per_second, moved / peaks.bytes_per_second
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
        floor=Floor(
            tflops=peaks.flop_per_second / 1e12,
            tbps=peaks.bytes_per_second / 1e12,
            source=peaks.source,
            compute_ms=1e3 * compute,
            memory_ms=1e3 * memory,
            bound_by="compute" if compute > memory else "memory",
        ),
        times_floor=device_seconds / max(compute, memory, 1e-12),
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


def _stage(name: str, seconds: list[float]) -> StageMs:
    return StageMs(name, *(1e3 * of(seconds) for of in (statistics.median, min, max)))


def flush_buffer(device: torch.device) -> torch.Tensor:
    """A tensor that leaves nothing else in a device's caches when all of it is written."""
    size = _FLUSH_BYTES
    if device.type == "cpu" and _CPU_CACHE.exists():
        text = _CPU_CACHE.read_text(encoding="ascii").strip()
        size = 2 * 1024 * int(text.removesuffix("K")) if text.endswith("K") else size
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _trace(scorer: CaseScorer, case: Case, scores: bool) -> dict[str, Any]:
    # torch.profiler.profile would import Inductor, which holds all threads of a server up for seconds.
    use_device = "cuda" if scorer.device.type == "cuda" else None
    with torch.autograd.profiler.profile(use_kineto=True, use_device=use_device) as profiler:
        _run(scorer, case, scores, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return trace


# ---- How evenly the gfx950 launch plan keeps its workgroups busy: a prediction, no GPU is needed ----

MAX_DECODE_QUERIES = 16
"""Queries up to which a request is decoded rather than planned."""
COMPUTE_UNITS = 256
"""Of an MI350X and an MI355X."""
WORKGROUPS_PER_COMPUTE_UNIT = 2


@dataclass(frozen=True)
class PlanBalance:
    """The plan of a call's prefill requests.

    Attributes:
        items: workgroups of the launch.
        slots: workgroups that run at once.
        compute_units: of the device that is assumed.
        busy_share: work over what all slots could do until the last is done; 1 is even.
        slot_blocks: predicted time of each slot in blocks of 128 keys, most first.
        decode_requests: requests left out, which another kernel scores.
    """

    items: int
    slots: int
    compute_units: int
    busy_share: float
    slot_blocks: tuple[float, ...]
    decode_requests: int


def plan_balance(case: Case, compute_units: int = COMPUTE_UNITS) -> PlanBalance | None:
    """Plan a call as the gfx950 backend would; None if it has no prefill request."""
    requests, decode = [], 0
    for row, (start, count) in enumerate(zip(case.cu_seqlens_q.tolist(), case.query_lens.tolist())):
        if count > MAX_DECODE_QUERIES:
            requests.append(Request(row, start, count, int(case.seq_lens[row])))
        elif count:
            decode += 1
    slots = WORKGROUPS_PER_COMPUTE_UNIT * compute_units
    items = plan_prefill(
        requests,
        case.num_heads,
        table_stride=case.num_score_blocks if case.block_table is None else case.block_table.shape[1],
        score_blocks=case.num_score_blocks,
        slots=slots,
        alignment=STORE_BLOCKS,
    )
    if not items:
        return None
    ends: list[int] = []
    for die in range(XCDS):
        free = [0] * max(1, slots // XCDS)
        for item in items[die::XCDS]:
            heapq.heapreplace(free, free[0] + item.cost)
        ends += free
    most = max(ends)
    return PlanBalance(
        items=len(items),
        slots=slots,
        compute_units=compute_units,
        busy_share=sum(ends) / (most * len(ends)),
        slot_blocks=tuple(end / 4 for end in sorted(ends, reverse=True)),
        decode_requests=decode,
    )
