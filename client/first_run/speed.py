"""Speed of every kernel by itself, cold and warm, beside the floor of the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from client.first_run.checks import KEY_TYPES, Item, Setting, attempt, group_maxima
from indexer.pipeline import StageTimes
from indexer.profile import Peaks, flush_buffer, measured_fp8_rate, measured_peaks
from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.geometry import Layout
from kernel.backends.flydsl.launch import (
    DecodeLauncher,
    DeviceRequests,
    InsertLauncher,
    PrefillLauncher,
    TopkLauncher,
)
from kernel.batch import Request, ScoreBatch
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, HEAD_DIM, PAGE_BYTES, SCALE_BYTES
from kernel.nvfp4 import build_lut
from kernel.page import blocks_of
from kernel.plan import MAXIMA_BLOCKS

# Times single launches, cold and warm, beside what the device reaches when it only copies or multiplies.

_AHEAD_CLOCKS = 1_000_000
"""A GPU waits for as long, some 0.4 ms, before a timed launch, and a host that enqueues in less is ahead."""


class Stopwatch:
    """Of one device.

    Args:
        device: where launches go; its copy bandwidth and its product rate are measured here and now.
        repeats: runs that are measured, after one that is not.
        measured: whether times of launches there are measurements of the kernels; every item says it.
    """

    def __init__(self, device: torch.device, repeats: int, *, measured: bool) -> None:
        self._device, self._repeats, self._measured = device, repeats, measured
        self._flush = flush_buffer(device)
        self.peaks: Peaks = measured_peaks(device)
        self._fp8_rate = measured_fp8_rate(device)

    def floor(self) -> Item:
        """What the device reaches, as fields."""
        return {
            "measured": self._measured,
            "copy_tbps": self.peaks.bytes_per_second / 1e12,
            "product_tflops": self.peaks.flop_per_second / 1e12,
            "fp8_product_tflops": None if self._fp8_rate is None else self._fp8_rate / 1e12,
            "source": self.peaks.source,
        }

    def measure(self, launch: Callable[[], object], *, num_bytes: int, flop: float = 0.0) -> Item:
        """Fields of a launch: its times, its speed, and how far it is from the floor.

        The kernels multiply E4M3: without the rate of such products a launch that multiplies has no floor.

        Args:
            launch: enqueues it.
            num_bytes: that it must move.
            flop: that it must do.
        """
        bounds = floor_fields(num_bytes / self.peaks.bytes_per_second, flop, self._fp8_rate)
        fields: Item = {"measured": self._measured, "bytes": num_bytes, "flop": flop, **bounds}
        for cache in ("cold", "warm"):
            seconds, host = self._runs(launch, cold=cache == "cold")
            median = statistics.median(seconds)
            fields[cache] = {
                "median_us": 1e6 * median,
                "min_us": 1e6 * min(seconds),
                "max_us": 1e6 * max(seconds),
                "tbps": num_bytes / median / 1e12,
                "tflops": flop / median / 1e12,
                **host_fields(host),
            }
            if "floor_us" in bounds:
                fields[cache]["times_floor"] = 1e6 * median / bounds["floor_us"]
        fields["host_bound"] = any(fields[cache].get("host_bound", False) for cache in ("cold", "warm"))
        return fields

    def _runs(
        self, launch: Callable[[], object], *, cold: bool
    ) -> tuple[list[float], list[tuple[float, float]]]:
        launch()
        found, host = [], []
        for _ in range(self._repeats):
            if cold:
                self._flush.add_(1)
            times = StageTimes(self._device)
            if self._device.type == "cuda":
                with times.stage("wait"):
                    torch.cuda._sleep(_AHEAD_CLOCKS)  # type: ignore[no-untyped-call]
            began = time.perf_counter()
            with times.stage("launch"):
                launch()
            enqueue = time.perf_counter() - began
            found.append(times["launch"])
            if "wait" in times:
                host.append((enqueue, times["wait"]))
        return found, host


def floor_fields(memory: float, flop: float, fp8_rate: float | None) -> Item:
    """The least time of a launch and what sets it; only ``memory_us`` where that cannot be known.

    Args:
        memory: seconds that the device needs to copy as many bytes.
        flop: that the launch does.
        fp8_rate: of an E4M3 product, a second; None if it is not known.
    """
    if flop and fp8_rate is None:
        return {"memory_us": 1e6 * memory}
    compute = flop / fp8_rate if fp8_rate else 0.0
    return {
        "memory_us": 1e6 * memory,
        "floor_us": 1e6 * max(memory, compute),
        "bound_by": "compute" if compute > memory else "memory",
    }


def host_fields(runs: list[tuple[float, float]]) -> Item:
    """Whether the host's own time is in that of the launches: it took longer to enqueue than the GPU waited.

    Args:
        runs: seconds of either; none on a CPU, where nothing is enqueued.
    """
    if not runs:
        return {}
    enqueue, wait = (statistics.median(column) for column in zip(*runs))
    return {"enqueue_us": 1e6 * enqueue, "wait_us": 1e6 * wait, "host_bound": enqueue > wait}


# Random operands of measured calls, made on the device: no case file of a million keys is needed.

_SCALES = (0x20, 0x48)
"""E4M3 bytes of scales from 2^-3 up to below 4."""


def batch_of(device: torch.device, num_requests: int, queries: int, keys: int, heads: int) -> ScoreBatch:
    """Requests of as many queries and keys each, their pages permuted in a cache of no others."""
    blocks = blocks_of(keys)
    num_pages = num_requests * blocks
    pages = torch.randint(0, 256, (num_pages, PAGE_BYTES), dtype=torch.uint8, device=device)
    pages[:, CODE_BYTES:] = torch.randint(
        *_SCALES, (num_pages, SCALE_BYTES), dtype=torch.uint8, device=device
    )
    table = (
        torch.randperm(num_pages, dtype=torch.int64, device=device).to(torch.int32).view(num_requests, blocks)
    )
    q = torch.randn(num_requests * queries, heads, HEAD_DIM, dtype=torch.float32, device=device).to(
        torch.float8_e4m3fn
    )
    requests = tuple(Request(row, row * queries, queries, keys) for row in range(num_requests))
    return ScoreBatch(q, pages, table, build_lut(device), requests, 0, 1)


def score_buffers(batch: ScoreBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores ``[H, total_q, S]`` and group maxima, unwritten."""
    shape = (batch.num_heads, batch.total_q, batch.num_score_blocks)
    groups = -(-shape[2] // MAXIMA_BLOCKS)
    device = batch.pages.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(
        (*shape[:2], groups), dtype=torch.float32, device=device
    )


# Which decode layout took less time, by how much, and in which steps.

SPREAD_PERCENT = 2.0
"""Of the slower one's time: medians of the same launch differ by as much from run to run."""


@dataclass(frozen=True)
class StepTimes:
    """Cold median microseconds of a decode step by layout."""

    shape: str
    cold_us: dict[Layout, float]


def faster_layout(steps: Sequence[StepTimes]) -> Item:
    """The verdict over all steps and of each.

    Returns:
        ``layout``: the faster one over all steps, None where they differ by less than
        :data:`SPREAD_PERCENT`; ``percent``: less time than the other took; ``cold_us``: sums by layout;
        ``set``: the setting to use, only where there is a faster one; ``steps``: the same of each.
    """
    layouts = geometry.LAYOUTS
    total = {layout: sum(step.cold_us[layout] for step in steps) for layout in layouts}
    found = _compared(total)
    if found["layout"] is not None:
        found["set"] = f"{geometry.VARIABLE}={found['layout']}"
    return {**found, "steps": [{"shape": step.shape, **_compared(step.cold_us)} for step in steps]}


def _compared(cold_us: dict[Layout, float]) -> Item:
    faster = min(cold_us, key=lambda layout: cold_us[layout])
    slowest = max(cold_us.values())
    percent = 100 * (1 - cold_us[faster] / slowest)
    return {
        "layout": faster if percent >= SPREAD_PERCENT else None,
        "percent": percent,
        "cold_us": dict(cold_us),
    }


HEADS = 4
"""Index heads of MiniMax-M3."""
TOPK = 16
_LINE_BYTES = 128
"""Of a cache line: what top-k reads of a group is one."""


def prefill(setting: Setting) -> Iterator[Item]:
    """A chunk's scores, its scores and group maxima, and its selection."""
    watch = _stopwatch(setting)
    yield {"name": "device", "ok": True, **watch.floor()}
    for heads in setting.sizes.prefill_heads:
        for keys in setting.sizes.prefill_contexts:
            for what in ("scores", "scores and maxima", "selection"):
                name = f"{what}, {heads} heads, {setting.sizes.prefill_queries} x {keys}"
                yield attempt(name, partial(_prefill, setting, watch, heads, keys, what))


def decode(setting: Setting) -> Iterator[Item]:
    """Decode steps with the pages in either layout, and which layout took less time."""
    watch = _stopwatch(setting)
    yield {"name": "device", "ok": True, **watch.floor()}
    steps: list[StepTimes] = []
    right = True
    for step in setting.sizes.decodes:
        for maxima in (False, True):
            shape = " x ".join(map(str, step)) + (", maxima" if maxima else "")
            cold_us: dict[Layout, float] = {}
            for layout in geometry.LAYOUTS:
                item = attempt(f"{layout}, {shape}", partial(_decode, setting, watch, step, layout, maxima))
                right = right and item["ok"]
                cold_us[layout] = item["cold"]["median_us"] if item["ok"] else 0.0
                yield item
            steps.append(StepTimes(shape, cold_us))
    yield attempt("the faster layout", partial(_faster, setting, steps if right else None))


def topk(setting: Setting) -> Iterator[Item]:
    """Selections of a prefill chunk's rows, from scores alone and through group maxima."""
    watch = _stopwatch(setting)
    yield {"name": "device", "ok": True, **watch.floor()}
    for blocks in setting.sizes.topk_blocks:
        for grouped in (False, True):
            rows = HEADS * setting.sizes.prefill_queries
            name = f"{'through maxima' if grouped else 'from scores'}, {rows} rows x {blocks} blocks"
            yield attempt(name, partial(_topk, setting, watch, blocks, grouped))


def insert(setting: Setting) -> Iterator[Item]:
    """Insertions of each type of keys, to permuted pages."""
    watch = _stopwatch(setting)
    yield {"name": "device", "ok": True, **watch.floor()}
    for keys in setting.sizes.inserts:
        for dtype in KEY_TYPES:
            name = f"{keys} {str(dtype).removeprefix('torch.')} keys"
            yield attempt(name, partial(_insert, setting, watch, keys, dtype))


def _stopwatch(setting: Setting) -> Stopwatch:
    device = setting.device().torch_device
    return Stopwatch(device, setting.sizes.repeats, measured=not setting.simulated)


def _prefill(setting: Setting, watch: Stopwatch, heads: int, keys: int, what: str) -> Item:
    device = setting.device()
    batch = batch_of(device.torch_device, 1, setting.sizes.prefill_queries, keys, heads)
    rows = heads * batch.total_q
    num_bytes = batch.pages.numel() + batch.q.numel()
    flop = 2.0 * HEAD_DIM * BLOCK_TOKENS * heads * float(batch.num_blocks_per_query().sum())
    if what == "selection":
        ids = torch.full((heads, batch.total_q, TOPK), -1, dtype=torch.int32, device=device.torch_device)
        num_bytes += 4 * ids.numel()
        select = setting.launchers().select
        return watch.measure(lambda: select(batch, ids, "score"), num_bytes=num_bytes, flop=flop)
    scores, maxima = score_buffers(batch)
    num_bytes += 4 * rows * batch.num_score_blocks
    if what == "scores":
        launcher = PrefillLauncher(device)
        return watch.measure(lambda: launcher(batch, scores), num_bytes=num_bytes, flop=flop)
    num_bytes += 4 * maxima.numel()
    launcher = PrefillLauncher(device)
    return watch.measure(lambda: launcher(batch, scores, maxima), num_bytes=num_bytes, flop=flop)


def _decode(
    setting: Setting, watch: Stopwatch, step: tuple[int, int, int], layout: Layout, with_maxima: bool
) -> Item:
    num_requests, queries, keys = step
    device = setting.device()
    batch = batch_of(device.torch_device, num_requests, queries, keys, HEADS)
    scores, maxima = score_buffers(batch)
    requests = DeviceRequests.of(batch.requests, device.torch_device)
    launcher = DecodeLauncher(device, layout)
    wanted = maxima if with_maxima else None
    num_bytes = batch.pages.numel() + batch.q.numel() + 4 * scores.numel()
    fields = watch.measure(
        lambda: launcher.launch(batch, requests, scores, wanted, fill=False),
        num_bytes=num_bytes + (4 * maxima.numel() if with_maxima else 0),
        flop=2.0 * HEAD_DIM * BLOCK_TOKENS * HEADS * float(batch.num_blocks_per_query().sum()),
    )
    return {"layout": layout, **fields}


def _faster(setting: Setting, steps: list[StepTimes] | None) -> Item:
    if steps is None:
        raise RuntimeError("a launch failed: the layouts cannot be compared")
    return {"measured": not setting.simulated, **faster_layout(steps)}


def _topk(setting: Setting, watch: Stopwatch, blocks: int, grouped: bool) -> Item:
    device = setting.device()
    tokens, at = setting.sizes.prefill_queries, device.torch_device
    scores = torch.randn(HEADS, tokens, blocks, dtype=torch.float32, device=at)
    maxima = group_maxima(scores) if grouped else None
    num_blocks = torch.full((tokens,), blocks, dtype=torch.int32, device=at)
    ids = torch.full((HEADS, tokens, TOPK), -1, dtype=torch.int32, device=at)
    groups = -(-blocks // MAXIMA_BLOCKS)
    read = 4 * groups + min(groups, TOPK) * _LINE_BYTES if grouped else 4 * blocks
    launcher = TopkLauncher(device)
    return watch.measure(
        lambda: launcher(scores, num_blocks, ids, "score", maxima),
        num_bytes=HEADS * tokens * (read + 4 * TOPK + 4),
    )


def _insert(setting: Setting, watch: Stopwatch, keys: int, dtype: torch.dtype) -> Item:
    device = setting.device()
    at = device.torch_device
    rows = torch.randn(keys, HEAD_DIM, dtype=torch.float32, device=at).to(dtype)
    num_pages = -(-keys // BLOCK_TOKENS)
    pages = torch.zeros(num_pages, PAGE_BYTES, dtype=torch.uint8, device=at)
    slots = torch.randperm(num_pages, dtype=torch.int64, device=at)[:, None] * BLOCK_TOKENS
    slots = (slots + torch.arange(BLOCK_TOKENS, dtype=torch.int64, device=at)).flatten()[:keys]
    launcher = InsertLauncher(device)
    num_bytes = keys * (HEAD_DIM * rows.element_size() + PAGE_BYTES // BLOCK_TOKENS + 8)
    return watch.measure(lambda: launcher(rows, pages, slots), num_bytes=num_bytes)
