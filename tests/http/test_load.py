"""Mixed load at the queue's limit: no answer lost, doubled or mixed up, and memory flat."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest

from indexer import IndexerConfig, IndexScorer
from indexer.case import encode_case
from indexer.replay import as_tensor
from indexer.wire import SequencesCall, decode_reply, encode_keys, encode_sequences_call
from tests.support.http_calls import BINARY, normals, random_case
from tests.support.live_server import LiveServer
from tests.support.raw_http import Connection, request_bytes

CLIENTS = 16
PLACES = 8
HEADS = 4


@dataclass
class Tally:
    """What the clients saw."""

    answers: int = 0
    refused: int = 0
    memory: list[int] = field(default_factory=list)


class Worker:
    """A client with sequences and answers of its own, known beforehand from an in-process scorer."""

    def __init__(self, url: str, seed: int, tally: Tally, scorer: IndexScorer) -> None:
        self.url, self.seed, self.tally = url, seed, tally
        self.random = np.random.default_rng(seed)
        self.keys = normals(400, 128, seed=seed)
        self.query = normals(3, HEADS, 128, seed=1000 + seed)
        self.expected: dict[int, bytes] = {}
        for length in (130, 400):
            sequence = scorer.add_sequence()
            scorer.append_keys(sequence, as_tensor(self.keys[:length]))
            result = scorer.score(as_tensor(self.query), [sequence])
            assert result.scores is not None
            self.expected[length] = result.scores.numpy().tobytes()
            scorer.free_sequence(sequence)
        case = random_case(((300, 4),), HEADS, seed=seed)
        self.case = request_bytes("POST", "/v1/score?scores=false", [encode_case(case)], BINARY)
        self.case_answer = b""

    async def ask(self, connection: Connection, request: bytes) -> bytes:
        """Ask until there is a place; the body of the answer."""
        while True:
            status, head, body = await connection.ask(request)
            if status != 429:
                assert status in (200, 201, 204), (status, body)
                self.tally.answers += 1
                return body
            assert b"retry-after" in head.lower()
            self.tally.refused += 1
            await asyncio.sleep(0.005 + 0.02 * self.random.random())

    async def run(self, end: float) -> None:
        """Work until the end, and leave nothing behind."""
        connection = await Connection.open(self.url)
        while time.monotonic() < end:
            made = await self.ask(connection, request_bytes("POST", "/v1/sequences", [], BINARY))
            sequence = json.loads(made)["id"]
            path = f"/v1/sequences/{sequence}"
            for start, stop in ((0, 130), (130, 400)):
                body = encode_keys(self.keys[start:stop])
                grown = await self.ask(
                    connection, request_bytes("POST", f"{path}/keys?start={start}", body, BINARY)
                )
                assert json.loads(grown) == {"id": sequence, "length": stop, "blocks": -(-stop // 128)}
                call = encode_sequences_call(SequencesCall(self.query, (sequence,)))
                request = request_bytes("POST", "/v1/sequences/score", call, BINARY)
                for _ in range(int(self.random.integers(1, 4))):
                    reply = decode_reply(await self.ask(connection, request))
                    assert reply.scores is not None
                    assert reply.scores.tobytes() == self.expected[stop], "another call's answer"
            answer = decode_reply(await self.ask(connection, self.case)).block_ids.tobytes()
            assert answer == (self.case_answer or answer)
            self.case_answer = answer
            if self.random.random() < 0.2:
                # Goes away in the middle of a body, and comes back on another connection.
                connection.send(self.case[: len(self.case) // 2])
                connection.close()
                connection = await Connection.open(self.url)
            await self.ask(connection, request_bytes("DELETE", path, [], BINARY))
        connection.close()


async def _soak(server: LiveServer, seconds: float) -> Tally:
    tally = Tally()
    scorer = IndexScorer(IndexerConfig(num_index_heads=HEADS, num_pages=8, backend="cpu"))
    workers = [Worker(server.url, seed, tally, scorer) for seed in range(CLIENTS)]
    process = psutil.Process(server.process.pid)
    end = time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < end:
            tally.memory.append(process.memory_info().rss)
            await asyncio.sleep(seconds / 60)

    await asyncio.gather(watch(), *(worker.run(end) for worker in workers))
    return tally


def _executed(metrics: str) -> int:
    """Calls that changed or computed something, as the server counted them."""
    pattern = (
        r'nvfp4_indexer_request_seconds_count{method="(?:POST|DELETE)",route="[^"]*",status="2\d\d"} (\d+)'
    )
    return sum(map(int, re.findall(pattern, metrics)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seconds", "max_growth"), [(20, 1.15), pytest.param(600, 1.05, marks=pytest.mark.nightly)]
)
def test_mixed_load_at_the_queues_limit(seconds: int, max_growth: float) -> None:
    # Growth: resident memory of the last third over that of the second. Allocators settle, leaks do not.
    flags = ("--backend=cpu", f"--queue-places={PLACES}", "--num-pages=128", "--log-level=info")
    with LiveServer(*flags) as server:
        tally = asyncio.run(_soak(server, seconds))
        with server.client() as client:
            cache, activity = client.get("/v1/cache").json(), client.get("/v1/activity").json()
            executed = _executed(client.get("/metrics").text)
        third = len(tally.memory) // 3
        middle, last = (
            statistics.median(part) for part in (tally.memory[third : 2 * third], tally.memory[2 * third :])
        )
        print(
            f"{tally.answers} answers, {tally.refused} refusals in {seconds} s; resident "
            f"{middle / 1e6:.1f} MB, then {last / 1e6:.1f} MB, at most {max(tally.memory) / 1e6:.1f} MB"
        )
        assert tally.refused > 0, "the queue was never full"
        assert tally.answers > 10 * CLIENTS
        assert executed == tally.answers, "each call was executed once and answered once"
        assert (cache["used_pages"], cache["total_sequences"]) == (0, 0), "nothing is left behind"
        assert (activity["places_taken"], activity["waiting"]) == (0, 0)
        assert last <= max_growth * middle
        assert not [event for event in server.events() if event.get("level") == "error"]
