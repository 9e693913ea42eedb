"""An engine's step through the public API: plan, eager runs, captured runs, 57 layers; host included.

    python -m tests.benchmarks.bench_engine [--json FILE] [--peers FILE] [--rounds N] [--only TEXT]

Calls are made back to back and timed by the clock, from the first call to the end of the last one's work:
what an engine waits for. Cold: calls rotate over sets of pages larger than twice the last-level cache.
Without a GPU the cpu backend runs a few small shapes.

``--peers`` is a JSON file of another indexer's milliseconds, measured on the same machine in the same
session: ``{"decode 32 x 131072 H=1": {"eager": 0.18, "graph": 0.15}}``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from indexer import IndexerConfig, IndexScorer
from kernel.backends.base import Precision
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES

TOPK = 16
LAYERS = 57
"""Sparse layers of MiniMax-M3."""


@dataclass(frozen=True)
class Shape:
    """A step: requests, queries of each, keys of each."""

    requests: int
    queries: int
    keys: int
    heads: int

    @property
    def name(self) -> str:
        """As tables show it."""
        kind = "decode" if self.queries <= 4 else "prefill"
        size = self.requests if self.queries == 1 else f"{self.requests} x {self.queries}"
        return f"{kind} {size} x {self.keys} H={self.heads}"


DECODES = [
    Shape(batch, queries, keys, heads)
    for batch, keys in (
        (1, 2_048),
        (1, 131_072),
        (1, 524_288),
        (8, 2_048),
        (8, 32_768),
        (8, 131_072),
        (32, 8_192),
        (32, 131_072),
        (128, 2_048),
        (128, 8_192),
        (256, 32_768),
        (512, 2_048),
        (512, 8_192),
    )
    for queries, heads in ((1, 1), (1, 4), (4, 1))
]
PREFILLS = [
    Shape(1, 8_192, 8_192, 4),
    Shape(1, 2_048, 32_768, 4),
    Shape(1, 8_192, 131_072, 4),
    Shape(64, 128, 8_192, 1),
    Shape(64, 128, 8_192, 4),
    Shape(8, 512, 16_384, 4),
]
STEPS = [Shape(32, 1, 8_192, 1), Shape(128, 1, 2_048, 1), Shape(64, 1, 32_768, 1)]
SMALL = [Shape(4, 1, 2_048, 4), Shape(1, 27, 520, 4), Shape(1, 512, 2_048, 4)]
"""What a CPU runs in seconds."""


@dataclass
class Line:
    """Milliseconds of a shape."""

    name: str
    precision: str
    plan: float | None = None
    eager: float | None = None
    graph: float | None = None
    api: float | None = None
    floor: float | None = None
    """Bytes of the pages at the device's copy bandwidth."""


def synchronise() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(calls: Sequence[Callable[[], object]], rounds: int, repeats: int = 1) -> float:
    """Median over rounds of a call's time, calls back to back, host included."""
    for call in calls:
        call()
    found = []
    for _ in range(rounds):
        synchronise()
        began = time.perf_counter()
        for _ in range(repeats):
            for call in calls:
                call()
        synchronise()
        found.append((time.perf_counter() - began) / (repeats * len(calls)))
    return 1e3 * statistics.median(found)


def captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """All calls in one graph, which is replayed."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


class Inputs:
    """Pages, tables and queries of a shape, in as many sets as make every run cold."""

    def __init__(self, shape: Shape, device: torch.device, sets: int | None = None) -> None:
        blocks = -(-shape.keys // BLOCK_TOKENS)
        size = shape.requests * blocks * PAGE_BYTES
        if sets is None:
            cache = 64 << 20 if device.type == "cuda" else 1
            sets = max(1, min(64, -(-2 * cache // size) + 1)) if device.type == "cuda" else 1
        generator = torch.Generator(device).manual_seed(0)
        count = sets * shape.requests * blocks
        self.pages = torch.randint(
            0, 255, (count, PAGE_BYTES), dtype=torch.uint8, device=device, generator=generator
        )
        self.pages[:, 8192:] = 0x38
        order = torch.randperm(count, device=device, generator=generator).int()
        self.tables = order.view(sets, shape.requests, blocks)
        rows = shape.requests * shape.queries
        q = torch.randn(rows, shape.heads, HEAD_DIM, device=device, generator=generator)
        self.q = q.to(torch.float8_e4m3fn)
        self.offsets = torch.arange(0, rows + 1, shape.queries, dtype=torch.int32, device=device)
        self.seq_lens = torch.full((shape.requests,), shape.keys, dtype=torch.int32, device=device)
        self.bytes = size


def measure(
    shape: Shape, precision: Precision, device: torch.device, rounds: int, bandwidth: float | None
) -> Line:
    """One shape in one precision."""
    scorer = IndexScorer(IndexerConfig(shape.heads, 0, topk_blocks=TOPK, device=device, precision=precision))
    inputs = Inputs(shape, device)
    lens = {"query_lens": [shape.queries] * shape.requests, "seq_lens": [shape.keys] * shape.requests}
    rows = shape.requests * shape.queries
    out = torch.empty(shape.heads, rows, TOPK, dtype=torch.int32, device=device)
    line = Line(shape.name, precision)

    def plan(table: torch.Tensor) -> object:
        return scorer.plan(table, query_lens=lens["query_lens"], seq_lens=lens["seq_lens"])

    line.plan = milliseconds([partial(plan, table) for table in inputs.tables[:4]], rounds)
    plans = [
        scorer.plan(table, query_lens=lens["query_lens"], seq_lens=lens["seq_lens"])
        for table in inputs.tables
    ]
    repeats = max(1, 20 // len(plans))
    line.eager = milliseconds(
        [partial(plan.select, inputs.q, inputs.pages, out=out) for plan in plans], rounds, repeats
    )
    line.api = milliseconds(
        [
            partial(
                scorer.score_paged,
                inputs.q,
                inputs.pages,
                table,
                inputs.offsets,
                inputs.seq_lens,
                return_scores=False,
            )
            for table in inputs.tables
        ],
        rounds,
    )
    if device.type == "cuda":
        bounded = plans
        if shape.queries * shape.heads <= 64:
            bounded = [
                scorer.plan(
                    table,
                    cu_seqlens_q=inputs.offsets,
                    seq_lens=inputs.seq_lens,
                    max_query_len=shape.queries,
                    max_seq_len=shape.keys,
                )
                for table in inputs.tables
            ]
        replay = captured([partial(plan.select, inputs.q, inputs.pages, out=out) for plan in bounded])
        line.graph = milliseconds([replay], rounds) / len(bounded)
    if bandwidth is not None:
        line.floor = 1e3 * inputs.bytes / bandwidth
    return line


def measure_step(shape: Shape, precision: Precision, device: torch.device, rounds: int) -> Line:
    """57 layers of one key inserted and one query selected for each request."""
    scorer = IndexScorer(IndexerConfig(shape.heads, 0, topk_blocks=TOPK, device=device, precision=precision))
    inputs = Inputs(shape, device, sets=LAYERS)
    keys = torch.randn(shape.requests, HEAD_DIM, device=device, dtype=torch.bfloat16)
    last = inputs.tables[:, :, -1].long() * BLOCK_TOKENS + (shape.keys - 1) % BLOCK_TOKENS
    out = torch.empty(shape.heads, shape.requests, TOPK, dtype=torch.int32, device=device)
    plans = [
        scorer.plan(
            table,
            cu_seqlens_q=inputs.offsets,
            seq_lens=inputs.seq_lens,
            max_query_len=1,
            max_seq_len=shape.keys,
        )
        for table in inputs.tables
    ]

    def layer(number: int) -> None:
        scorer.insert(keys, inputs.pages, last[number])
        plans[number].select(inputs.q, inputs.pages, out=out)

    layers = [partial(layer, number) for number in range(LAYERS)]
    line = Line(f"57 layers {shape.requests} x {shape.keys}", precision)
    line.eager = LAYERS * milliseconds(layers, rounds)
    line.graph = milliseconds([captured(layers)], rounds) if device.type == "cuda" else None
    return line


def measure_cache(device: torch.device, rounds: int) -> list[Line]:
    """One key appended to each of 32 sequences; their scores."""
    scorer = IndexScorer(IndexerConfig(4, 2 * 32 * 40, topk_blocks=TOPK, device=device))
    seqs = [scorer.add_sequence() for _ in range(32)]
    scorer.append_keys(seqs, torch.randn(32 * 4_096, HEAD_DIM, device=device), [4_096] * 32)
    keys, q = torch.randn(32, HEAD_DIM, device=device), torch.randn(32, 4, HEAD_DIM, device=device)
    q = q.to(torch.float8_e4m3fn)
    return [
        Line(
            "append_keys, 32 sequences",
            "exact",
            api=milliseconds([lambda: scorer.append_keys(seqs, keys)], rounds),
        ),
        Line(
            "score, 32 sequences of 4096",
            "exact",
            api=milliseconds([lambda: scorer.score(q, seqs, return_scores=False)], rounds),
        ),
    ]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy, read and written."""
    size = 1 << 30 if device.type == "cuda" else 1 << 26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e3 * size / milliseconds([lambda: target.copy_(source)], 10)


def print_lines(lines: Sequence[Line], peers: dict[str, dict[str, float]], console: Console) -> None:
    """The table, ours beside the peer's."""
    table = Table(title="milliseconds, host included, cold", title_justify="left")
    for column in (
        "step",
        "precision",
        "plan",
        "eager",
        "peer",
        "ratio",
        "graph",
        "peer",
        "ratio",
        "score_paged",
        "floor",
    ):
        table.add_column(column, justify="left" if column in ("step", "precision") else "right")

    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    for line in lines:
        peer = peers.get(line.name, {})
        cells = [line.name, line.precision, shown(line.plan)]
        for own, theirs in ((line.eager, peer.get("eager")), (line.graph, peer.get("graph"))):
            ratio = f"{own / theirs:.2f}" if own is not None and theirs else ""
            cells += [shown(own), shown(theirs), ratio]
        table.add_row(*cells, shown(line.api), shown(line.floor))
    console.print(table)


def main(arguments: list[str]) -> None:
    """Run from a command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    parser.add_argument("--peers", type=Path, help="JSON of another indexer's milliseconds, by step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="only steps whose name contains this")
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    shapes = [*DECODES, *PREFILLS] if cuda else SMALL
    precisions: tuple[Precision, ...] = ("exact", "fast") if cuda else ("exact",)
    bandwidth = copy_bandwidth(device)
    lines = []
    with torch.inference_mode():
        for shape in shapes:
            if options.only in shape.name:
                lines += [measure(shape, each, device, options.rounds, bandwidth) for each in precisions]
        for shape in STEPS if cuda else [Shape(2, 1, 2_048, 1)]:
            if options.only in f"57 layers {shape.requests} x {shape.keys}":
                lines += [measure_step(shape, each, device, options.rounds) for each in precisions]
        if not options.only:
            lines += measure_cache(device, options.rounds)
    peers = json.loads(options.peers.read_text()) if options.peers else {}
    if options.json:
        options.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    print_lines(lines, peers, Console(width=150))


if __name__ == "__main__":
    main(sys.argv[1:])
