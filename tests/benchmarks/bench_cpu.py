"""Speed and memory of the cpu backend, as ratios in one run.

    python -m tests.benchmarks.bench_cpu [--json] [--rounds N]

512 queries x 4 heads x 32,768 keys, cold: each call reads other pages, at permuted places of a cache twice as
large as the last-level cache. FLOP are counted from the visible blocks. Then small calls, warm. Measurements
alternate, and a ratio is the median of the rounds' ratios: what else the machine does harms both sides.
Then all is measured again beside a busy process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from indexer import IndexerConfig, IndexScorer
from kernel.backends import registry
from kernel.batch import ScoreBatch
from kernel.checks import checked_batch
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, HEAD_DIM, PAGE_BYTES, SCALE_BYTES
from kernel.nvfp4 import build_lut, quantize_query
from kernel.page import blocks_of

QUERIES, HEADS, KEYS, TOPK = 512, 4, 32_768, 16
LONG_QUERIES, LONG_KEYS = 16, 1_048_576
SMALL_QUERIES, SMALL_KEYS, SMALL_CALLS = 27, 520, 20
"""A call that is little to multiply, and how many of them are timed together."""
SQUARE = 2_048
"""Side of the square product: the best case of ``torch.mm``."""
LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
ASSUMED_CACHE_BYTES = 64 << 20
MIB = 1 << 20


@dataclass(frozen=True)
class Timing:
    """Seconds of one kind of call, a value a round."""

    name: str
    flop: float
    seconds: tuple[float, ...]

    @property
    def gflops(self) -> float:
        return self.flop / statistics.median(self.seconds) / 1e9

    def per_flop_of(self, other: Timing) -> float:
        """How many times the FLOP/s of ``other``: the median of the rounds' ratios."""
        work = self.flop / other.flop
        return statistics.median(work * theirs / own for own, theirs in zip(self.seconds, other.seconds))


@dataclass(frozen=True)
class Report:
    """Everything measured in one run."""

    threads: int
    rounds: int
    cache_mib: float
    milliseconds: dict[str, float]
    gflops: dict[str, float]
    score_of_mm: float
    """FLOP/s of scoring, as a share of the faster product of the same FLOP."""
    score_of_square_mm: float
    select_of_mm: float
    topk_of_score: float
    """Time of top-k as a share of scoring."""
    score_of_oracle: float
    """FLOP/s of scoring, in multiples of the reference backend's."""
    small_milliseconds: dict[str, float]
    small_of_mm: dict[str, float]
    """Time of a small call in multiples of the faster product of its queries and keys."""
    busy_of_alone: dict[str, float]
    """Time beside a busy process, in multiples of the time alone."""
    long_seconds: dict[str, float]
    long_mib_beyond_pages: dict[str, float]


def random_pages(num_pages: int, generator: torch.Generator) -> torch.Tensor:
    """``[num_pages, 9216]`` uint8 of random codes; scales 2^-3 to 3.75."""
    pages = torch.randint(0, 256, (num_pages, PAGE_BYTES), dtype=torch.uint8, generator=generator)
    pages[:, CODE_BYTES:] = torch.randint(
        0x20, 0x48, (num_pages, SCALE_BYTES), dtype=torch.uint8, generator=generator
    )
    return pages


def batches(queries: int, keys: int, sets: int) -> list[ScoreBatch]:
    """Calls on disjoint sets of pages, permuted over one cache."""
    generator = torch.Generator().manual_seed(0)
    blocks = blocks_of(keys)
    pages = random_pages(sets * blocks, generator)
    q = quantize_query(torch.randn(queries, HEADS, HEAD_DIM, generator=generator))
    page_ids = torch.randperm(sets * blocks, generator=generator).to(torch.int32)
    return [
        checked_batch(
            q,
            pages,
            table,
            torch.tensor([0, queries], dtype=torch.int32),
            torch.tensor([keys], dtype=torch.int32),
            lut=build_lut("cpu"),
            num_heads=HEADS,
            init_blocks=0,
            local_blocks=1,
        )
        for table in page_ids.view(sets, 1, blocks)
    ]


def visible_flop(batch: ScoreBatch) -> float:
    """FLOP of the blocks that some key of is visible: ``2 * 128 * 128`` a row and block."""
    return 2.0 * HEAD_DIM * BLOCK_TOKENS * batch.num_heads * int(batch.num_blocks_per_query().sum())


def last_level_cache_bytes() -> int:
    """Size of the last-level cache, or an assumed one where the system does not tell."""
    try:
        return int(LAST_LEVEL_CACHE.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return ASSUMED_CACHE_BYTES


def interleaved(calls: dict[str, tuple[float, Callable[[], object]]], rounds: int) -> dict[str, Timing]:
    """Time every call in every round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for counted in range(-1, rounds):
        for name, (_, call) in calls.items():
            start = time.perf_counter()
            call()
            if counted >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing(name, calls[name][0], tuple(values)) for name, values in seconds.items()}


def measure_speed(rounds: int, cache_bytes: int) -> dict[str, Timing]:
    """Scoring, selecting and the products they are compared with."""
    sets = -(-2 * cache_bytes // (blocks_of(KEYS) * PAGE_BYTES))
    calls = batches(QUERIES, KEYS, sets)
    batch = calls[0]
    next_batch: Iterator[ScoreBatch] = cycle(calls)
    backend, oracle = registry.create("cpu"), registry.create("reference")
    scores = torch.empty(HEADS, QUERIES, blocks_of(KEYS))
    block_ids = torch.empty(HEADS, QUERIES, TOPK, dtype=torch.int32)
    num_blocks = batch.num_blocks_per_query()

    rows = batch.q.float().flatten(0, 1)
    key_sets = cycle(
        [torch.randn(KEYS, HEAD_DIM) for _ in range(-(-2 * cache_bytes // (KEYS * HEAD_DIM * 4)))]
    )
    product = torch.empty(rows.shape[0] * KEYS)
    left, right, square = (torch.randn(SQUARE, SQUARE) for _ in range(3))
    product_flop = 2.0 * rows.shape[0] * KEYS * HEAD_DIM
    flop = visible_flop(batch)
    return interleaved(
        {
            "torch.mm, q @ k^T": (
                product_flop,
                lambda: torch.mm(rows, next(key_sets).t(), out=product.view(-1, KEYS)),
            ),
            "torch.mm, k @ q^T": (
                product_flop,
                lambda: torch.mm(next(key_sets), rows.t(), out=product.view(KEYS, -1)),
            ),
            f"torch.mm, {SQUARE} cubed": (2.0 * SQUARE**3, lambda: torch.mm(left, right, out=square)),
            "score": (flop, lambda: backend.score(next(next_batch), scores)),
            "top-k of scores": (flop, lambda: backend.topk(scores, num_blocks, block_ids, "score")),
            "select": (flop, lambda: backend.select(next(next_batch), block_ids, "score")),
            "oracle": (flop, lambda: oracle.score(next(next_batch), scores)),
        },
        rounds,
    )


def measure_small(rounds: int) -> dict[str, Timing]:
    """Small calls through :class:`indexer.IndexScorer`, and the products of their queries and keys."""
    (batch,) = batches(SMALL_QUERIES, SMALL_KEYS, 1)
    scorer = IndexScorer(IndexerConfig(HEADS, 0, topk_blocks=TOPK, backend="cpu"))
    tensors = batch.q, batch.pages, batch.block_table
    offsets, seq_lens = (torch.tensor(n, dtype=torch.int32) for n in ([0, SMALL_QUERIES], [SMALL_KEYS]))
    plan = scorer.plan(batch.block_table, query_lens=[SMALL_QUERIES], seq_lens=[SMALL_KEYS])
    rows, keys = batch.q.float().flatten(0, 1), torch.randn(SMALL_KEYS, HEAD_DIM)
    product = torch.empty(rows.shape[0] * SMALL_KEYS)
    calls: dict[str, Callable[[], object]] = {
        "torch.mm, q @ k^T": lambda: torch.mm(rows, keys.t(), out=product.view(-1, SMALL_KEYS)),
        "torch.mm, k @ q^T": lambda: torch.mm(keys, rows.t(), out=product.view(SMALL_KEYS, -1)),
        "IndexPlan.select": lambda: plan.select(batch.q, batch.pages),
        "IndexPlan.score": lambda: plan.score(batch.q, batch.pages),
        "score_paged, ids alone": lambda: scorer.score_paged(
            *tensors, offsets, seq_lens, return_scores=False
        ),
        "score_paged": lambda: scorer.score_paged(*tensors, offsets, seq_lens),
    }

    def repeated(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for _ in range(SMALL_CALLS)]

    flop = 2.0 * SMALL_CALLS * rows.shape[0] * SMALL_KEYS * HEAD_DIM
    return interleaved({name: (flop, repeated(call)) for name, call in calls.items()}, rounds)


def long_context(keep_scores: bool) -> tuple[float, float]:
    """Seconds and peak MiB beyond pages and queries of 16 queries on 1,048,576 keys, the backend's making
    included.

    To be run in a fresh process whose parent is small: the peak is the process's and starts at its parent's.
    So the figure is an upper bound.
    """
    (batch,) = batches(LONG_QUERIES, LONG_KEYS, 1)
    resident = psutil.Process().memory_info().rss
    start = time.perf_counter()
    backend = registry.create("cpu")
    block_ids = torch.empty(HEADS, LONG_QUERIES, TOPK, dtype=torch.int32)
    if keep_scores:
        scores = torch.empty(HEADS, LONG_QUERIES, batch.num_score_blocks)
        backend.score(batch, scores)
        backend.topk(scores, batch.num_blocks_per_query(), block_ids, "score")
    else:
        backend.select(batch, block_ids, "score")
    seconds = time.perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return seconds, (peak - resident) / MIB


def _busy() -> None:
    while True:
        pass


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that takes a core for as long as the context lasts."""
    process = multiprocessing.get_context("spawn").Process(target=_busy, daemon=True)
    process.start()
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.join()


def measure(rounds: int) -> Report:
    """Run the whole benchmark."""
    cache_bytes = last_level_cache_bytes()
    long_seconds, long_mib = {}, {}
    context = multiprocessing.get_context("spawn")
    for name, keep_scores in (("select", False), ("score + top-k", True)):
        with context.Pool(1) as pool:
            long_seconds[name], long_mib[name] = pool.apply(long_context, (keep_scores,))
    timings = measure_speed(rounds, cache_bytes)
    small = measure_small(rounds)
    alone = {**timings, **{name: timing for name, timing in small.items() if name not in timings}}
    with busy_process():
        beside = {**measure_small(rounds), **measure_speed(rounds, cache_bytes)}
    floors = [timing for name, timing in small.items() if name.startswith("torch.mm")]
    score, select, topk = timings["score"], timings["select"], timings["top-k of scores"]
    products = [timings["torch.mm, q @ k^T"], timings["torch.mm, k @ q^T"]]
    return Report(
        threads=torch.get_num_threads(),
        rounds=rounds,
        cache_mib=cache_bytes / MIB,
        milliseconds={name: 1e3 * statistics.median(timing.seconds) for name, timing in timings.items()},
        gflops={name: timing.gflops for name, timing in timings.items() if timing is not topk},
        score_of_mm=min(score.per_flop_of(product) for product in products),
        score_of_square_mm=score.per_flop_of(timings[f"torch.mm, {SQUARE} cubed"]),
        select_of_mm=min(select.per_flop_of(product) for product in products),
        topk_of_score=1 / topk.per_flop_of(score),
        score_of_oracle=score.per_flop_of(timings["oracle"]),
        small_milliseconds={
            name: 1e3 * statistics.median(timing.seconds) / SMALL_CALLS for name, timing in small.items()
        },
        small_of_mm={
            name: max(floor.per_flop_of(timing) for floor in floors)
            for name, timing in small.items()
            if timing not in floors
        },
        busy_of_alone={
            name: statistics.median(beside[name].seconds) / statistics.median(timing.seconds)
            for name, timing in alone.items()
            if name != "oracle"
        },
        long_seconds=long_seconds,
        long_mib_beyond_pages=long_mib,
    )


def print_report(report: Report, console: Console) -> None:
    """Two tables: times, and ratios beside their aims."""
    times = Table(
        title=f"{QUERIES} queries x {HEADS} heads x {KEYS:,} keys, cold, {report.threads} threads, "
        f"median of {report.rounds}"
    )
    times.add_column("call")
    times.add_column("ms", justify="right")
    times.add_column("GFLOP/s", justify="right")
    for name, milliseconds in report.milliseconds.items():
        rate = f"{report.gflops[name]:.0f}" if name in report.gflops else ""
        times.add_row(name, f"{milliseconds:.1f}", rate)
    ratios = Table(title="Ratios in this run")
    ratios.add_column("ratio")
    ratios.add_column("measured", justify="right")
    ratios.add_column("aim", justify="right")
    ratios.add_row("score, of torch.mm of the same FLOP", f"{report.score_of_mm:.2f}", ">= 0.70")
    ratios.add_row(f"score, of torch.mm {SQUARE} cubed", f"{report.score_of_square_mm:.2f}", "")
    ratios.add_row("select, of torch.mm of the same FLOP", f"{report.select_of_mm:.2f}", "")
    ratios.add_row("top-k, of the time of scoring", f"{100 * report.topk_of_score:.1f} %", "< 15 %")
    ratios.add_row("score, times the oracle", f"{report.score_of_oracle:.1f}", ">= 20")
    for name, ratio in report.small_of_mm.items():
        ratios.add_row(
            f"{SMALL_QUERIES} queries x {SMALL_KEYS} keys, {name}, {report.small_milliseconds[name]:.2f} ms: "
            "times torch.mm",
            f"{ratio:.1f}",
            "<= 12",
        )
    for name, ratio in report.busy_of_alone.items():
        aim = "" if name.startswith("torch.mm") else "<= 2.2"
        ratios.add_row(f"{name}: beside a busy process, times alone", f"{ratio:.2f}", aim)
    for name, mib in report.long_mib_beyond_pages.items():
        ratios.add_row(
            f"{name}, {LONG_KEYS:,} keys x {LONG_QUERIES} queries: MiB beyond pages, "
            f"{report.long_seconds[name]:.1f} s",
            f"{mib:.0f}",
            "< 1024",
        )
    console.print(times, ratios)


def main() -> None:
    """Parse the command line and print the report."""
    parser = argparse.ArgumentParser(description="Speed and memory of the cpu backend.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default 15)")
    arguments = parser.parse_args()
    report = measure(arguments.rounds)
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
    else:
        print_report(report, Console())


if __name__ == "__main__":
    main()
