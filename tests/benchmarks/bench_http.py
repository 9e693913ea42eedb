"""What HTTP costs over an in-process call, and how many small calls a second it serves. Loopback only.

    python -m tests.benchmarks.bench_http [--seconds 5] [--busy]

Both sides run in turns, so that other load on the machine falls on both. Three figures:

- decode: 32 sequences of 2,048 tokens, one query each; median of the differences of neighbouring runs;
- prefill: 8,192 queries as a body of 4 MiB (E4M3, H = 4) on 8,192 tokens; ratio of medians;
- load: 16 connections, each asking again once answered; one query on 256 tokens; calls a second and p99.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import torch

from indexer import IndexerConfig, IndexScorer
from indexer.case.container import Array
from indexer.replay import as_tensor
from indexer.wire import SequencesCall, decode_reply, encode_keys, encode_sequences_call
from tests.benchmarks.bench_cpu import busy_process
from tests.support.http import Connection, request_bytes
from tests.support.live_server import LiveServer

BINARY = "application/octet-stream"
CONNECTIONS = 16
HEADS = 4
PAGES = 1024


class Pair:
    """The same sequences in this process and in the server."""

    def __init__(self, connection: Connection, tokens: int, count: int, scorer: IndexScorer) -> None:
        self.connection = connection
        self.scorer = scorer
        self.tokens, self.count = tokens, count
        self.here: list[int] = []
        self.there: list[str] = []

    async def fill(self, generator: np.random.Generator) -> None:
        """Make the sequences and append keys."""
        for _ in range(self.count):
            keys = generator.standard_normal((self.tokens, 128), dtype=np.float32)
            sequence = self.scorer.add_sequence()
            self.scorer.append_keys(sequence, torch.from_numpy(keys))
            self.here.append(sequence)
            _, _, body = await self.connection.ask(request_bytes("POST", "/v1/sequences", [], BINARY))
            self.there.append(json.loads(body)["id"])
            path = f"/v1/sequences/{self.there[-1]}/keys"
            status, _, body = await self.connection.ask(
                request_bytes("POST", path, encode_keys(keys), BINARY)
            )
            if status != 200:
                raise AssertionError(body)

    async def measure(self, query: Array, *, scores: bool, runs: int) -> tuple[list[float], list[float]]:
        """Seconds of each run, in process and over HTTP, taken in turns."""
        lens = [query.shape[0] // self.count] * self.count
        call = SequencesCall(query, tuple(self.there), tuple(lens))
        path = f"/v1/sequences/score?scores={'true' if scores else 'false'}"
        request = request_bytes("POST", path, encode_sequences_call(call), BINARY)
        here: list[float] = []
        there: list[float] = []
        for _ in range(runs):
            began = time.perf_counter()
            result = self.scorer.score(as_tensor(query), self.here, lens, return_scores=scores)
            ended = time.perf_counter()
            here.append(ended - began)
            began = time.perf_counter()
            status, _, body = await self.connection.ask(request)
            there.append(time.perf_counter() - began)
            reply = decode_reply(body)
            if status != 200 or not np.array_equal(reply.block_ids, result.block_ids.numpy()):
                raise AssertionError("the two sides differ")
        return here, there

    async def clear(self) -> None:
        """Drop the sequences on both sides."""
        for sequence, other in zip(self.here, self.there):
            self.scorer.free_sequence(sequence)
            await self.connection.ask(request_bytes("DELETE", f"/v1/sequences/{other}", [], BINARY))


async def load(url: str, seconds: float, generator: np.random.Generator) -> tuple[float, float, float, int]:
    """Calls a second, median and p99 in seconds, and errors, of 16 connections."""
    connections = [await Connection.open(url) for _ in range(CONNECTIONS)]
    _, _, body = await connections[0].ask(request_bytes("POST", "/v1/sequences", [], BINARY))
    sequence = json.loads(body)["id"]
    keys = encode_keys(generator.standard_normal((256, 128), dtype=np.float32))
    await connections[0].ask(request_bytes("POST", f"/v1/sequences/{sequence}/keys", keys, BINARY))
    query = generator.standard_normal((1, HEADS, 128), dtype=np.float32).astype(ml_dtypes.bfloat16)
    call = encode_sequences_call(SequencesCall(query, (sequence,)))
    request = request_bytes("POST", "/v1/sequences/score", call, BINARY)
    latencies: list[float] = []
    errors = 0
    end = time.perf_counter() + seconds

    async def work(connection: Connection) -> None:
        nonlocal errors
        while (began := time.perf_counter()) < end:
            status, _, _ = await connection.ask(request)
            latencies.append(time.perf_counter() - began)
            errors += status != 200

    began = time.perf_counter()
    await asyncio.gather(*map(work, connections))
    elapsed = time.perf_counter() - began
    for connection in connections:
        connection.close()
    latencies.sort()
    return (
        len(latencies) / elapsed,
        statistics.median(latencies),
        latencies[int(0.99 * len(latencies))],
        errors,
    )


async def run(url: str, seconds: float, parts: Sequence[str]) -> dict[str, float]:
    """Measure and print."""
    generator = np.random.default_rng(0)
    scorer = IndexScorer(IndexerConfig(num_index_heads=HEADS, num_pages=PAGES, backend="cpu"))
    connection = await Connection.open(url)
    figures: dict[str, float] = {}
    if "decode" in parts:
        pair = Pair(connection, 2048, 32, scorer)
        await pair.fill(generator)
        query = generator.standard_normal((32, HEADS, 128), dtype=np.float32).astype(ml_dtypes.bfloat16)
        here, there = await pair.measure(query, scores=True, runs=max(10, int(10 * seconds)))
        figures["decode_in_process_ms"] = 1e3 * statistics.median(here)
        figures["decode_http_ms"] = 1e3 * statistics.median(there)
        figures["decode_overhead_ms"] = 1e3 * statistics.median(b - a for a, b in zip(here, there))
        await pair.clear()
    if "prefill" in parts:
        pair = Pair(connection, 8192, 1, scorer)
        await pair.fill(generator)
        query = generator.standard_normal((8192, HEADS, 128), dtype=np.float32)
        fp8 = query.astype(ml_dtypes.float8_e4m3fn)
        here, there = await pair.measure(fp8, scores=False, runs=5)
        figures["prefill_in_process_ms"] = 1e3 * statistics.median(here)
        figures["prefill_http_ms"] = 1e3 * statistics.median(there)
        figures["prefill_ratio"] = statistics.median(there) / statistics.median(here)
        await pair.clear()
    if "load" in parts:
        rate, median, p99, errors = await load(url, seconds, generator)
        figures["load_calls_per_second"] = rate
        figures["load_median_ms"], figures["load_p99_ms"] = 1e3 * median, 1e3 * p99
        figures["load_errors"] = errors
    connection.close()
    return figures


def main() -> int:
    """Run against a server of its own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the load, at most 60")
    parser.add_argument("parts", nargs="*", default=["decode", "prefill", "load"], help="which figures")
    parser.add_argument("--busy", action="store_true", help="beside a process that takes a core")
    arguments = parser.parse_args()
    flags = ("--backend", "cpu", "--num-pages", str(PAGES), "--log-level", "warning")
    busy = busy_process() if arguments.busy else nullcontext()
    with LiveServer(*flags, "--log-level", "info") as server, busy:
        figures = asyncio.run(run(server.url, min(arguments.seconds, 60.0), arguments.parts))
    for name, value in figures.items():
        print(f"{name:24} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
