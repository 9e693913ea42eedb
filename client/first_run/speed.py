"""The measurements of a first run: every kernel by itself, cold and warm, and rocprofv3's counters.

A part's first item is what the device reaches in the same process when it only copies or only multiplies: the
floor of each launch.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from client.first_run.checks import KEY_TYPES, group_maxima
from client.first_run.setting import Item, Setting, attempt
from client.rocprof import read_rocprof, rocprof_commands
from indexer.case import write_case
from indexer.made_cases import Shape, make_case
from indexer.pipeline import StageTimes
from indexer.profile import flush_buffer, measured_fp8_rate, measured_peaks
from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.geometry import Layout
from kernel.backends.flydsl.launch import (
    DecodeLauncher,
    DeviceRequests,
    InsertLauncher,
    PrefillLauncher,
    TopkLauncher,
    request_fields,
)
from kernel.batch import Request, ScoreBatch
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, HEAD_DIM, PAGE_BYTES, SCALE_BYTES
from kernel.nvfp4 import build_lut
from kernel.page import blocks_of
from kernel.plan import MAXIMA_BLOCKS
from kernel.step import Lengths

HEADS = 4
"""Index heads of MiniMax-M3."""
TOPK = 16
_LINE_BYTES = 128
"""A cache line: the bytes that top-k reads of a group."""
SPREAD_PERCENT = 2.0
"""Medians of the same launch differ by as much from run to run, in percent of the slower one."""
_AHEAD_CLOCKS = 1_000_000
"""The GPU waits so long, some 0.4 ms, before a timed launch: a host that enqueues in less is ahead of it."""
_SCALES = (0x20, 0x48)
"""E4M3 bytes of scales from 2^-3 up to below 4."""
_COMMAND_TIMEOUT_S = 400
"""Of a command of rocprofv3; four of them and their cases fit into the half hour of a part."""
_SHOWN_CHARS = 2000
"""Of a failed command's output."""


def prefill(setting: Setting) -> Iterator[Item]:
    """A chunk's scores, its scores and group maxima, and its selection."""
    timer = LaunchTimer(setting)
    yield timer.device_item()
    for heads in setting.sizes.prefill_heads:
        for keys in setting.sizes.prefill_contexts:
            for what in ("scores", "scores and maxima", "selection"):
                name = f"{what}, {heads} heads, {setting.sizes.prefill_queries} x {keys}"
                yield attempt(name, partial(_prefill, setting, timer, heads, keys, what))


def decode(setting: Setting) -> Iterator[Item]:
    """Decode steps in both page layouts, and the faster layout."""
    timer = LaunchTimer(setting)
    yield timer.device_item()
    steps: list[StepTimes] = []
    right = True
    for step in setting.sizes.decodes:
        for maxima in (False, True):
            shape = " x ".join(map(str, step)) + (", maxima" if maxima else "")
            cold_us: dict[Layout, float] = {}
            for layout in geometry.LAYOUTS:
                item = attempt(f"{layout}, {shape}", partial(_decode, setting, timer, step, layout, maxima))
                right = right and item["ok"]
                cold_us[layout] = item["cold"]["median_us"] if item["ok"] else 0.0
                yield item
            steps.append(StepTimes(shape, cold_us))
    yield attempt("the faster layout", partial(_faster, setting, steps if right else None))


def topk(setting: Setting) -> Iterator[Item]:
    """Selections of a prefill chunk's rows, from scores alone and through group maxima."""
    timer = LaunchTimer(setting)
    yield timer.device_item()
    for blocks in setting.sizes.topk_blocks:
        for grouped in (False, True):
            rows = HEADS * setting.sizes.prefill_queries
            name = f"{'through maxima' if grouped else 'from scores'}, {rows} rows x {blocks} blocks"
            yield attempt(name, partial(_topk, setting, timer, blocks, grouped))


def insert(setting: Setting) -> Iterator[Item]:
    """Insertions of keys of each dtype, into permuted pages."""
    timer = LaunchTimer(setting)
    yield timer.device_item()
    for keys in setting.sizes.inserts:
        for dtype in KEY_TYPES:
            name = f"{keys} {str(dtype).removeprefix('torch.')} keys"
            yield attempt(name, partial(_insert, setting, timer, keys, dtype))


def counters(setting: Setting) -> Iterator[Item]:
    """Traces and counters of a prefill and of a decode step, insert and top-k among them."""
    if shutil.which("rocprofv3") is None:
        again = ["nvfp4-indexer", "kernel", "first-run", "--out", str(setting.folder / "counters")]
        again += ["--backend", setting.backend, "--part", "counters"]
        remedy = f"rocprofv3 is not on the path: put ROCm's bin folder there, then run {shlex.join(again)}"
        yield {"name": "rocprofv3", "ok": None, "skipped": remedy}
        return
    if setting.simulated:
        shapes = {"prefill": Shape(300, 17, 1), "decode": Shape(300, 1, 1)}
    else:
        shapes = {"prefill": Shape(131_072, 8192), "decode": Shape(131_072, 1, batch=4)}
    for name, shape in shapes.items():
        folder = setting.folder / "rocprof" / name
        commands = _rocprof_commands(setting, name, shape, folder)
        for what, command in zip(("trace", "counters"), commands):
            yield attempt(f"{name}, {what}", partial(_run, command))
        yield attempt(f"{name}, kernels", partial(_kernels, setting, folder))


# ---- Launches ----


def _prefill(setting: Setting, timer: LaunchTimer, heads: int, keys: int, what: str) -> Item:
    device = setting.device()
    batch = batch_of(device.torch_device, 1, setting.sizes.prefill_queries, keys, heads)
    num_bytes = batch.pages.numel() + batch.q.numel()
    if what == "selection":
        ids = torch.full((heads, batch.total_q, TOPK), -1, dtype=torch.int32, device=device.torch_device)
        select = setting.operations().select
        num_bytes += 4 * ids.numel()
        return timer.measure(lambda: select(batch, ids, "score"), num_bytes=num_bytes, flop=_flop(batch))
    scores, maxima = score_buffers(batch, with_maxima=what == "scores and maxima")
    launcher = PrefillLauncher(device)
    lengths, columns = Lengths.of(batch.requests), batch.block_table.shape[1]
    items = launcher.work(lengths, heads, columns, grouped=maxima is not None)
    work = torch.from_numpy(items).to(device.torch_device)
    num_bytes += _score_bytes(scores, maxima)
    return timer.measure(
        lambda: launcher.launch(batch, work, scores, maxima), num_bytes=num_bytes, flop=_flop(batch)
    )


def _decode(
    setting: Setting, timer: LaunchTimer, step: tuple[int, int, int], layout: Layout, with_maxima: bool
) -> Item:
    num_requests, queries, keys = step
    device = setting.device()
    batch = batch_of(device.torch_device, num_requests, queries, keys, HEADS)
    scores, maxima = score_buffers(batch, with_maxima=with_maxima)
    fields = torch.from_numpy(request_fields(Lengths.of(batch.requests)))
    requests = DeviceRequests.of(fields.to(device.torch_device))
    launcher = DecodeLauncher(device, layout)
    measured = timer.measure(
        lambda: launcher.launch(batch, requests, scores, maxima, fill=False),
        num_bytes=batch.pages.numel() + batch.q.numel() + _score_bytes(scores, maxima),
        flop=_flop(batch),
    )
    return {"layout": layout, **measured}


def _faster(setting: Setting, steps: list[StepTimes] | None) -> Item:
    if steps is None:
        raise RuntimeError("a launch failed: the layouts cannot be compared")
    return {"measured": not setting.simulated, **faster_layout(steps)}


def _topk(setting: Setting, timer: LaunchTimer, blocks: int, grouped: bool) -> Item:
    device = setting.device()
    tokens, at = setting.sizes.prefill_queries, device.torch_device
    scores = torch.randn(HEADS, tokens, blocks, dtype=torch.float32, device=at)
    maxima = group_maxima(scores) if grouped else None
    num_blocks = torch.full((tokens,), blocks, dtype=torch.int32, device=at)
    ids = torch.full((HEADS, tokens, TOPK), -1, dtype=torch.int32, device=at)
    groups = -(-blocks // MAXIMA_BLOCKS)
    read = 4 * groups + min(groups, TOPK) * _LINE_BYTES if grouped else 4 * blocks
    launcher = TopkLauncher(device)
    return timer.measure(
        lambda: launcher(scores, num_blocks, ids, "score", maxima),
        num_bytes=HEADS * tokens * (read + 4 * TOPK + 4),
    )


def _insert(setting: Setting, timer: LaunchTimer, keys: int, dtype: torch.dtype) -> Item:
    device = setting.device()
    at = device.torch_device
    rows = torch.randn(keys, HEAD_DIM, dtype=torch.float32, device=at).to(dtype)
    num_pages = -(-keys // BLOCK_TOKENS)
    pages = torch.zeros(num_pages, PAGE_BYTES, dtype=torch.uint8, device=at)
    slots = torch.randperm(num_pages, dtype=torch.int64, device=at)[:, None] * BLOCK_TOKENS
    slots = (slots + torch.arange(BLOCK_TOKENS, dtype=torch.int64, device=at)).flatten()[:keys]
    launcher = InsertLauncher(device)
    num_bytes = keys * (HEAD_DIM * rows.element_size() + PAGE_BYTES // BLOCK_TOKENS + 8)
    return timer.measure(lambda: launcher(rows, pages, slots), num_bytes=num_bytes)


def batch_of(device: torch.device, num_requests: int, queries: int, keys: int, heads: int) -> ScoreBatch:
    """Random requests of equal length, made on the device; their permuted pages fill the cache."""
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


def score_buffers(batch: ScoreBatch, *, with_maxima: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns unwritten scores ``[H, total_q, S]`` and group maxima ``[H, total_q, ceil(S / 16)]``."""
    heads_and_queries = (batch.num_heads, batch.total_q)
    groups = -(-batch.num_score_blocks // MAXIMA_BLOCKS)
    empty = partial(torch.empty, dtype=torch.float32, device=batch.pages.device)
    scores: torch.Tensor = empty((*heads_and_queries, batch.num_score_blocks))
    return scores, empty((*heads_and_queries, groups)) if with_maxima else None


def _score_bytes(scores: torch.Tensor, maxima: torch.Tensor | None) -> int:
    return 4 * (scores.numel() + (0 if maxima is None else maxima.numel()))


def _flop(batch: ScoreBatch) -> float:
    return 2.0 * HEAD_DIM * BLOCK_TOKENS * batch.num_heads * float(batch.num_blocks_per_query().sum())


# ---- Times of a launch ----


class LaunchTimer:
    """Times single launches, cold and warm, beside the device's own copy bandwidth and product rate.

    Those are measured when it is made. Every item says whether its times are measurements of the kernels.
    """

    def __init__(self, setting: Setting) -> None:
        self._device = setting.device().torch_device
        self._repeats, self._measured = setting.sizes.repeats, not setting.simulated
        self._flush = flush_buffer(self._device)
        self._peaks = measured_peaks(self._device)
        self._fp8_rate = measured_fp8_rate(self._device)

    def device_item(self) -> Item:
        """What the device reaches."""
        return {
            "name": "device",
            "ok": True,
            "measured": self._measured,
            "copy_tbps": self._peaks.bytes_per_second / 1e12,
            "product_tflops": self._peaks.flop_per_second / 1e12,
            "fp8_product_tflops": None if self._fp8_rate is None else self._fp8_rate / 1e12,
            "source": self._peaks.source,
        }

    def measure(self, launch: Callable[[], object], *, num_bytes: int, flop: float = 0.0) -> Item:
        """Returns the fields of a launch: its times, its speed, and how far it is from the floor.

        The kernels multiply E4M3: without the rate of such products a launch that multiplies has no floor.

        Args:
            launch: enqueues it.
            num_bytes: bytes that it must move.
            flop: operations that it must do.
        """
        bounds = floor_fields(num_bytes / self._peaks.bytes_per_second, flop, self._fp8_rate)
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
        """Returns the seconds of each launch, and of each the host's to enqueue it and the GPU's to wait."""
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
    """Returns a launch's least time and what bounds it; only ``memory_us`` where that is not known.

    Args:
        memory: seconds that the device takes to copy as many bytes.
        flop: operations of the launch.
        fp8_rate: E4M3 operations a second; None if it is not known.
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
    """Returns whether launches are host-bound: the host took longer to enqueue them than the GPU waited.

    Args:
        runs: (enqueue, wait) seconds of each launch; empty on a CPU, where nothing is enqueued.
    """
    if not runs:
        return {}
    enqueue, wait = (statistics.median(column) for column in zip(*runs))
    return {"enqueue_us": 1e6 * enqueue, "wait_us": 1e6 * wait, "host_bound": enqueue > wait}


# ---- The faster decode layout ----


@dataclass(frozen=True)
class StepTimes:
    """Cold median microseconds of a decode step by layout."""

    shape: str
    cold_us: dict[Layout, float]


def faster_layout(steps: Sequence[StepTimes]) -> Item:
    """Compares the layouts over all steps, and in each.

    Returns:
        ``layout``: the faster one over all steps, None where they differ by less than
        :data:`SPREAD_PERCENT`; ``percent``: how much less time it took; ``cold_us``: sums by layout;
        ``set``: the setting to use, only where one is faster; ``steps``: the same fields of each step.
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


# ---- Counters ----


def _rocprof_commands(setting: Setting, name: str, shape: Shape, folder: Path) -> tuple[list[str], list[str]]:
    setting.folder.mkdir(parents=True, exist_ok=True)
    case = setting.folder / f"{name}.safetensors"
    write_case(make_case("m3", shape), case)
    profile = ["profile", str(case), "--backend", setting.backend, "--cache", "warm"]
    repeats = ["--repeats", str(min(setting.sizes.repeats, 5))]
    return rocprof_commands([sys.executable, "-m", "client.cli", *profile, *repeats], str(folder))


def _run(command: list[str]) -> Item:
    # A file, not a pipe: a child that outlives a killed rocprofv3 would hold a pipe open beyond the timeout.
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        done = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, timeout=_COMMAND_TIMEOUT_S)
        printed.seek(0)
        shown = printed.read()[-_SHOWN_CHARS:]
    if done.returncode:
        return {"ok": False, "command": command, "error": f"exit code {done.returncode}: {shown}"}
    return {"command": command}


def _kernels(setting: Setting, folder: Path) -> Item:
    found = [dataclasses.asdict(kernel) for kernel in read_rocprof(folder)]
    return {"measured": not setting.simulated, "kernels": found}
