"""A mixed attack beside an honest client of another token: nightly for ten minutes, or as long as asked.

    python -m tests.http.test_mixed_attack 30

runs it for 30 seconds and prints what the honest client and the probes saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import ml_dtypes
import numpy as np
import psutil
import pytest

from client import AsyncClient
from indexer import IndexerConfig, IndexScorer
from indexer.case import Case, encode_case
from indexer.replay import as_tensor
from tests.support.http import BINARY, normals, random_case
from tests.support.live_server import LiveServer

HONEST, HOSTILE = "honest-0123456789", "hostile-9876543210"
MIB = 1 << 20
FLAGS = (
    "--backend=cpu",
    "--num-pages=64",
    "--deadline-seconds=10",
    f"--max-body-bytes={256 * MIB}",
    f"--queue-bytes={256 * MIB}",
    "--max-connections=256",
    f"--max-call-flop={2e10}",
)


@dataclass
class Seen:
    """What was measured, seconds and bytes."""

    idle: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    attacks: dict[str, int] = field(default_factory=dict)


class Attack:
    """One hostile client: connections of its own, its token, and a way to misuse them."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = str(parts.hostname), int(parts.port or 0)
        self._token = f"Authorization: Bearer {HOSTILE}"

    def _head(self, line: str, *fields: str) -> bytes:
        return "\r\n".join([f"{line} HTTP/1.1", "Host: localhost", self._token, *fields, "", ""]).encode()

    def _call(self, path: str, body: bytes) -> bytes:
        return self._head(f"POST {path}", f"Content-Type: {BINARY}", f"Content-Length: {len(body)}") + body

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(*self._address, limit=4096)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def unread(self) -> None:
        """Pipelines calls with long answers, and reads none."""
        queries = 900
        case = Case(
            index_q=np.zeros((queries, 4, 128), dtype=ml_dtypes.float8_e4m3fn),
            pages=np.zeros((1, 9216), dtype=np.uint8),
            block_table=np.zeros((9, 1), dtype=np.int32),
            cu_seqlens_q=np.arange(10, dtype=np.int32) * 100,
            seq_lens=np.full(9, 100, dtype=np.int32),
            topk=64,
        )
        async with self._connection() as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(self._call("/v1/score", encode_case(case)) * 8)
            await asyncio.sleep(8)

    async def announced(self) -> None:
        """Announces a long body and sends a few bytes of it."""
        async with self._connection() as (_, writer):
            fields = (f"Content-Type: {BINARY}", f"Content-Length: {200 * MIB}")
            writer.write(self._head("POST /v1/score", *fields) + b"few")
            await asyncio.sleep(6)

    async def slow(self) -> None:
        """Sends a body byte by byte."""
        async with self._connection() as (_, writer):
            writer.write(self._head("POST /v1/score", f"Content-Type: {BINARY}", "Content-Length: 5000"))
            for _ in range(100):
                writer.write(b"x")
                await asyncio.sleep(0.05)

    async def methods(self) -> None:
        """Invents methods and paths."""
        async with self._connection() as (reader, writer):
            for number in range(100):
                writer.write(
                    self._head(f"M{time.monotonic_ns()} /healthz?{number}", "Connection: keep-alive")
                )
                await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b"}")

    async def connections(self) -> None:
        """Opens connections and says nothing, or half a head."""
        async with contextlib.AsyncExitStack() as stack:
            for number in range(40):
                _, writer = await stack.enter_async_context(self._connection())
                if number % 2:
                    writer.write(b"GET /healthz HTTP/1.1\r\nX: ")
            await asyncio.sleep(2)

    async def trace(self) -> None:
        """Asks for the trace of many requests."""
        body = encode_case(random_case(((1, 1),) * 300, heads=1))
        async with self._connection() as (reader, writer):
            call = self._call("/v1/profile?repeats=1&trace=true&cache=warm", body)
            writer.write(call.replace(b"Host", b"Connection: close\r\nHost", 1))
            while await reader.read(65536):
                pass

    async def calls(self) -> None:
        """Asks for much work, and again."""
        body = encode_case(random_case(((2000, 200),)))
        async with self._connection() as (reader, writer):
            for _ in range(4):
                writer.write(self._call("/v1/score?scores=false", body))
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)


KINDS = {"unread": 6, "announced": 4, "slow": 6, "methods": 2, "connections": 3, "trace": 1, "calls": 6}
"""Hostile clients of each kind."""


async def _repeat(attack: Callable[[], Awaitable[None]], name: str, done: dict[str, int], end: float) -> None:
    while time.monotonic() < end:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, ValueError):
            await attack()
            done[name] = done.get(name, 0) + 1
        await asyncio.sleep(0.05)


async def _honest(client: AsyncClient, times: list[float], end: float) -> None:
    """Makes a sequence, appends, scores and compares, over and over; no call may be lost."""
    keys, query = normals(400, 128, seed=1), normals(3, 4, 128, seed=2)
    scorer = IndexScorer(IndexerConfig(num_index_heads=4, num_pages=8, backend="cpu"))
    here = scorer.add_sequence()
    scorer.append_keys(here, as_tensor(keys))
    right = scorer.score(as_tensor(query), [here]).scores
    assert right is not None
    while time.monotonic() < end:
        sequence = await client.add_sequence()
        assert await client.append_keys(sequence, keys, start=0) == 400
        for _ in range(5):
            began = time.monotonic()
            reply = await client.score(query, [sequence])
            times.append(time.monotonic() - began)
            assert reply.scores is not None
            assert reply.scores.tobytes() == right.numpy().tobytes()
        await client.free_sequence(sequence)
        await asyncio.sleep(0.02)


async def _probe(url: str, process: psutil.Process, seen: Seen, end: float) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as client:
        while time.monotonic() < end:
            began = time.monotonic()
            assert (await client.get("/healthz")).status_code == 200
            seen.probes.append(time.monotonic() - began)
            seen.memory.append(process.memory_info().rss)
            await asyncio.sleep(0.1)


async def attack(url: str, seconds: float) -> dict[str, int]:
    """Run every hostile client; how often each kind came to its end."""
    done: dict[str, int] = {}
    hostile, end = Attack(url), time.monotonic() + seconds
    attacks = [
        asyncio.ensure_future(_repeat(getattr(hostile, name), name, done, end))
        for name, count in KINDS.items()
        for _ in range(count)
    ]
    await asyncio.sleep(seconds)
    for task in attacks:
        task.cancel()
    await asyncio.gather(*attacks, return_exceptions=True)
    return done


async def watch(server: LiveServer, seconds: float) -> Seen:
    """Run the attack in a process of its own; what an honest client and the probes saw in this one."""
    seen = Seen()
    process = psutil.Process(server.process.pid)
    async with AsyncClient(server.url, token=HONEST) as client:
        await _honest(client, seen.idle, time.monotonic() + min(5.0, seconds / 4))
        words = ("-m", "tests.http.test_mixed_attack", server.url, str(seconds))
        hostile = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
        end = time.monotonic() + seconds
        await asyncio.gather(_honest(client, seen.calls, end), _probe(server.url, process, seen, end))
        seen.attacks = json.loads((await hostile.communicate())[0])
    return seen


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(seconds: float) -> dict[str, Any]:
    """Run the attack on a server of its own; the figures."""
    environment = {"NVFP4_INDEXER_TOKENS": f"{HONEST},{HOSTILE}"}
    with LiveServer(*FLAGS, environment=environment, forked=True) as server:
        seen = asyncio.run(watch(server, seconds))
        with server.client(HOSTILE) as client:
            metrics = client.get("/metrics").text
        events = [event for event in server.events() if event["event"] == "request"]
        errors = [event for event in server.events() if event.get("level") == "error"]
    held = [
        (event["seconds"] - event["queue_seconds"] - event.get("receive_seconds", 0.0), event["path"])
        for event in events
        if "queue_seconds" in event
    ]
    third = len(seen.memory) // 3
    middle, last = (
        statistics.median(seen.memory[third : 2 * third]),
        statistics.median(seen.memory[2 * third :]),
    )
    return {
        "seconds": seconds,
        "attacks": seen.attacks,
        "honest_calls": len(seen.calls),
        "idle_p50_ms": round(1e3 * _quantile(seen.idle, 0.5), 1),
        "attacked_p50_ms": round(1e3 * _quantile(seen.calls, 0.5), 1),
        "attacked_p99_ms": round(1e3 * _quantile(seen.calls, 0.99), 1),
        "attacked_max_ms": round(1e3 * max(seen.calls), 1),
        "bound_ms": round(2e3 * _quantile(seen.idle, 0.5) + 1e3 * max(held)[0], 1),
        "healthz_p50_ms": round(1e3 * _quantile(seen.probes, 0.5), 1),
        "healthz_p99_ms": round(1e3 * _quantile(seen.probes, 0.99), 1),
        "healthz_max_ms": round(1e3 * max(seen.probes), 1),
        "memory_mb": round(max(seen.memory) / 1e6, 1),
        "memory_course_mb": [round(seen.memory[i * len(seen.memory) // 10] / 1e6) for i in range(10)],
        "memory_growth_mb": round((last - middle) / 1e6, 1),
        "longest_calls": [(round(seconds, 3), path) for seconds, path in sorted(held)[-3:]],
        "longest_profiles": sorted(round(seconds, 3) for seconds, path in held if "profile" in path)[-3:],
        "metrics_bytes": len(metrics),
        "errors": len(errors),
        "first_error": errors[:1],
    }


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_mixed_attack_of_ten_minutes() -> None:
    found = measure(600)
    print(json.dumps(found))
    assert found["healthz_p99_ms"] < 100
    assert found["attacked_p99_ms"] < found["bound_ms"], "twice the idle time, and the longest call"
    assert found["memory_growth_mb"] < 50
    assert found["metrics_bytes"] < 200_000
    assert found["errors"] == 0
    assert found["honest_calls"] > 100, "none was lost, and none was wrong"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(asyncio.run(attack(sys.argv[1], float(sys.argv[2])))))
    else:
        print(json.dumps(measure(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0), indent=1))
