"""Speed of every kernel by itself, cold and warm, beside the floor of the same process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from indexer.first_run.attempt import Item, attempt
from indexer.first_run.checks import KEY_TYPES, group_maxima
from indexer.first_run.layout_verdict import StepTimes, faster_layout
from indexer.first_run.operands import batch_of, score_buffers
from indexer.first_run.setting import Setting
from indexer.first_run.stopwatch import Stopwatch
from kernel.backends.flydsl import decode_layout
from kernel.backends.flydsl.decode_layout import Layout
from kernel.backends.flydsl.insert_launch import InsertLauncher
from kernel.backends.flydsl.launch import PrefillLauncher
from kernel.backends.flydsl.score_decode_launch import DecodeLauncher, DeviceRequests
from kernel.backends.flydsl.topk_launch import TopkLauncher
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.plan import MAXIMA_BLOCKS

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
            for layout in decode_layout.LAYOUTS:
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
