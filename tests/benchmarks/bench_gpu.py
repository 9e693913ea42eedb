"""Speed of the triton backend on one GPU: every stage and the pipeline, cold, beside the run's own
yardsticks.

    python -m tests.benchmarks.bench_gpu [--json FILE] [--peers FILE] [--rounds N]

Cold: calls rotate over sets of pages larger than twice the last-level cache, at permuted places. Work is
counted from the visible blocks. A time is the median of the rounds; a round runs every set once between two
events (top-k, decode and insert as a replay of one graph of all sets, so that the host's launches do not
count). Random data throughout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from client.commands.bench import BenchmarkReport, Measured, print_report
from kernel.backends import registry
from kernel.backends.base import Precision
from kernel.backends.triton.backend import TritonBackend
from kernel.batch import Request, ScoreBatch
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, HEAD_DIM, PAGE_BYTES, SCALE_BYTES
from kernel.nvfp4 import build_lut
from kernel.step import DeviceLengths, Step

QUERIES, TOPK = 8192, 16
CONTEXTS = (131_072, 524_288)
DECODES = ((32, 1, 131_072), (32, 4, 131_072), (1, 1, 524_288))
"""Requests, queries of each, keys of each."""
INSERTS = (65_536, 1_048_576)
"""Keys of an insertion: a prefill chunk's, and so many that starting and ending do not count."""
SQUARE = 8192
COPY_BYTES = 1 << 30
PRECISIONS: tuple[Precision, ...] = ("exact", "fast")


def milliseconds(calls: Sequence[Callable[[], object]], rounds: int) -> float:
    """Median over rounds of a call's time; each round runs every call once."""
    for call in calls:
        call()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for call in calls:
            call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    median: float = statistics.median(start.elapsed_time(end) for start, end in times)
    return median / len(calls)


def graphed(calls: Sequence[Callable[[], object]], rounds: int) -> float:
    """The same for calls replayed from one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return milliseconds([graph.replay], rounds) / len(calls)


def random_pages(num_pages: int) -> torch.Tensor:
    """``[num_pages, 9216]`` uint8 of random codes; scales 2^-3 to 3.75."""
    pages = torch.randint(0, 256, (num_pages, PAGE_BYTES), dtype=torch.uint8, device="cuda")
    pages[:, CODE_BYTES:] = torch.randint(
        0x20, 0x48, (num_pages, SCALE_BYTES), dtype=torch.uint8, device="cuda"
    )
    return pages


def random_queries(tokens: int, heads: int) -> torch.Tensor:
    """``[tokens, heads, 128]`` float8_e4m3fn of normal values."""
    return torch.randn(tokens, heads, HEAD_DIM, device="cuda").to(torch.float8_e4m3fn)


def cold_sets(num_bytes: int) -> int:
    """Sets of so many bytes that are together larger than twice the last-level cache."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, -(-2 * cache // num_bytes))


def yardsticks(rounds: int) -> list[Measured]:
    """Copy bandwidth and the fp8 and float16 matrix rates."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = milliseconds([lambda: target.copy_(source)], rounds)
    found = [Measured("copy of 1 GiB", "", ms, 2 * COPY_BYTES / ms / 1e9, "TB/s")]
    left, right = (torch.randn(SQUARE, SQUARE, device="cuda") for _ in range(2))
    fp8, one = [matrix.to(torch.float8_e4m3fn) for matrix in (left, right)], torch.ones((), device="cuda")
    half = [matrix.half() for matrix in (left, right)]
    flop = 2 * SQUARE**3
    if torch.cuda.get_device_capability() >= (8, 9):
        ms = milliseconds(
            [lambda: torch._scaled_mm(fp8[0], fp8[1].t(), one, one, out_dtype=torch.bfloat16)], rounds
        )
        found.append(Measured(f"torch._scaled_mm {SQUARE} cubed", "fp8", ms, flop / ms / 1e9, "TFLOP/s"))
    ms = milliseconds([lambda: torch.mm(half[0], half[1].t())], rounds)
    return [*found, Measured(f"torch.mm {SQUARE} cubed", "float16", ms, flop / ms / 1e9, "TFLOP/s")]


def prefill(heads: int, keys: int, precision: Precision, rounds: int) -> list[Measured]:
    """The pipeline, the score kernel and top-k on what it wrote."""
    backend = registry.create("triton", precision=precision)
    assert isinstance(backend, TritonBackend)
    blocks = keys // BLOCK_TOKENS
    sets = cold_sets(blocks * PAGE_BYTES)
    pages, lut, q = random_pages(sets * blocks), build_lut("cuda"), random_queries(QUERIES, heads)
    tables = torch.randperm(sets * blocks, device="cuda").int().view(sets, 1, blocks)
    request = (Request(0, 0, QUERIES, keys),)
    batches = [ScoreBatch(q, pages, table, lut, request, 0, 1) for table in tables]
    ids = torch.empty(heads, QUERIES, TOPK, dtype=torch.int32, device="cuda")
    visible = heads * int(batches[0].num_blocks_per_query().sum())
    flop = 2.0 * HEAD_DIM * BLOCK_TOKENS * visible
    shape = f"H={heads} {keys}"

    def line(name: str, ms: float, work: float, unit: str) -> Measured:
        return Measured(f"{name} {shape}", precision, ms, work / ms / 1e9, unit)

    plans = [backend.plan(Step.of(batch)) for batch in batches]
    scores = torch.empty(heads, QUERIES, blocks, device="cuda")
    selects = [partial(backend.select_plan, plan, q, pages, ids) for plan in plans]
    select_ms = milliseconds(selects, rounds)
    score_ms = milliseconds([partial(backend.score_plan, plan, q, pages, scores) for plan in plans], rounds)
    return [
        line("select", select_ms, flop, "TFLOP/s"),
        line("score", score_ms, flop, "TFLOP/s"),
    ]


def topk_of_scores(heads: int, keys: int, rounds: int) -> list[Measured]:
    """Top-k of plain scores and torch.topk of the same."""
    backend = registry.create("triton")
    blocks = keys // BLOCK_TOKENS
    scores = torch.randn(heads, QUERIES, blocks, device="cuda")
    num_blocks = torch.full((QUERIES,), blocks, dtype=torch.int32, device="cuda")
    ids = torch.empty(heads, QUERIES, TOPK, dtype=torch.int32, device="cuda")
    size, shape = 4.0 * scores.numel(), f"H={heads} {keys}"
    own = graphed([lambda: backend.topk(scores, num_blocks, ids, "score")], rounds)
    theirs = milliseconds([lambda: torch.topk(scores, TOPK, dim=2)], rounds)
    return [
        Measured(f"top-k, plain scores {shape}", "", own, size / own / 1e9, "TB/s"),
        Measured(f"torch.topk {shape}", "", theirs, size / theirs / 1e9, "TB/s"),
    ]


def decode(requests: int, queries: int, keys: int, precision: Precision, rounds: int) -> list[Measured]:
    """Score and top-k of a decode step, replayed."""
    backend = registry.create("triton", precision=precision)
    assert isinstance(backend, TritonBackend)
    blocks = keys // BLOCK_TOKENS
    step_bytes = requests * blocks * PAGE_BYTES
    sets = cold_sets(step_bytes)
    pages = random_pages(sets * requests * blocks)
    tables = torch.randperm(sets * requests * blocks, device="cuda").int().view(sets, requests, blocks)
    offsets = torch.arange(0, requests * queries + 1, queries, dtype=torch.int32, device="cuda")
    seq_lens = torch.full((requests,), keys, dtype=torch.int32, device="cuda")
    q = random_queries(requests * queries, 1)
    ids = torch.empty(1, requests * queries, TOPK, dtype=torch.int32, device="cuda")
    lengths = DeviceLengths(offsets, seq_lens, queries, keys)
    plans = [backend.plan(Step(table, requests * queries, 1, lengths, 0, 1)) for table in tables]
    steps = [partial(backend.select_plan, plan, q, pages, ids) for plan in plans]
    shape = f"{requests} x {queries} x {keys}"
    ms, eager = graphed(steps, rounds), milliseconds(steps, rounds)
    return [
        Measured(f"decode + top-k {shape}", precision, ms, step_bytes / ms / 1e9, "TB/s"),
        Measured(f"the same, eager {shape}", precision, eager, step_bytes / eager / 1e9, "TB/s"),
    ]


def insert(tokens: int, rounds: int) -> list[Measured]:
    """Insertion of bfloat16 keys, and a copy of the bytes that it reads and writes."""
    backend = registry.create("triton")
    num_bytes = tokens * (2 * HEAD_DIM + PAGE_BYTES // BLOCK_TOKENS)
    sets = cold_sets(num_bytes) + 2
    keys = [torch.randn(tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    pages = [torch.empty(tokens // BLOCK_TOKENS, PAGE_BYTES, dtype=torch.uint8, device="cuda") for _ in keys]
    slots = torch.randperm(tokens // BLOCK_TOKENS, device="cuda")[:, None] * BLOCK_TOKENS
    slots = (slots + torch.arange(BLOCK_TOKENS, device="cuda")).flatten()
    copies = [torch.randint(0, 255, (num_bytes // 2,), dtype=torch.uint8, device="cuda") for _ in keys]
    targets = [torch.empty_like(copy) for copy in copies]
    own = graphed([partial(backend.insert, k, p, slots) for k, p in zip(keys, pages)], rounds)
    copy = graphed([partial(t.copy_, s) for s, t in zip(copies, targets)], rounds)
    return [
        Measured(f"insert {tokens} bfloat16 keys", "", own, num_bytes / own / 1e9, "TB/s"),
        Measured(f"copy of the same bytes as {tokens} keys", "", copy, num_bytes / copy / 1e9, "TB/s"),
    ]


def measure(rounds: int) -> list[Measured]:
    """The whole benchmark."""
    found = yardsticks(rounds)
    for heads in (4, 1):
        for keys in CONTEXTS:
            for precision in PRECISIONS:
                found += prefill(heads, keys, precision, rounds)
            found += topk_of_scores(heads, keys, rounds)
            torch.cuda.empty_cache()
    for shape in DECODES:
        for precision in PRECISIONS:
            found += decode(*shape, precision, rounds)
    for tokens in INSERTS:
        found += insert(tokens, rounds)
    return found


def main(arguments: list[str]) -> None:
    """Run from a command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument(
        "--peers",
        type=Path,
        help="JSON of other kernels' times in ms, measured beside these: a line's name to [bf16, fp8]",
    )
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    peers = json.loads(options.peers.read_text()) if options.peers else {}
    report = BenchmarkReport(
        torch.cuda.get_device_name(), torch.__version__, options.rounds, measure(options.rounds), peers
    )
    if options.json:
        report.write(options.json)
    print_report(report, Console(width=110))


if __name__ == "__main__":
    main(sys.argv[1:])
