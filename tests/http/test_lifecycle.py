"""Warming, a full queue, deadlines, clients that leave, the end of the server, and its restart."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest

from indexer import IndexerConfig, IndexScorer
from indexer.case import encode_case
from indexer.replay import as_tensor
from indexer.wire import SequencesCall, decode_reply, encode_keys, encode_sequences_call
from tests.http.slow_server import SLOW_QUERIES
from tests.support.http import (
    BINARY,
    Connection,
    assert_problem,
    binary,
    make_sequence,
    normals,
    random_case,
    request_bytes,
)
from tests.support.live_server import LiveServer, until

SLOW_SERVER = "tests.http.slow_server"


def _slow_body() -> bytes:
    """A call that keeps the device of a slow server busy."""
    return encode_case(random_case(((200, SLOW_QUERIES),)))


class _Background:
    """A request in a thread."""

    def __init__(self, server: LiveServer, path: str, body: bytes) -> None:
        self.reply: httpx.Response | None = None

        def ask() -> None:
            with server.client() as client:
                self.reply = client.post(path, timeout=120, **binary(body))

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    def wait(self) -> httpx.Response:
        """Its answer."""
        self._thread.join(120)
        assert self.reply is not None
        return self.reply


def _busy(client: httpx.Client) -> bool:
    return bool(client.get("/v1/activity").json()["busy"])


def _check_warming(live: LiveServer) -> None:
    with live.client() as client:
        body = binary(encode_case(random_case(((200, 3),))))
        assert client.get("/healthz").json() == {"status": "ok"}
        reply = client.get("/readyz")
        assert_problem(reply, 503, "warming")
        assert int(reply.headers["retry-after"]) >= 1
        assert_problem(client.post("/v1/score", **body), 503, "warming")
        assert_problem(client.post("/v1/sequences"), 503, "warming")
        assert "nvfp4_indexer_ready 0.0" in client.get("/metrics").text
        until(lambda: client.get("/readyz").status_code == 200, 120)
        assert client.post("/v1/score", **body).status_code == 200


@pytest.mark.parametrize(
    ("module", "flags", "reason"),
    [
        ("tests.http.wrong_server", (), "score error"),
        ("server", ("--num-pages=99999999999",), "num_pages"),
    ],
)
def test_a_warm_up_that_fails_ends_the_server(module: str, flags: tuple[str, ...], reason: str) -> None:
    with LiveServer("--backend=cpu", *flags, ready=False, module=module, forked=True) as live:
        assert live.process.wait(120) == 1, live.log_text()
        failed = [event for event in live.events() if event["event"] == "self-test failed"]
        assert len(failed) == 1
        assert reason in failed[0]["reason"]
        assert "ready" not in {event["event"] for event in live.events()}


def test_a_call_longer_than_the_drain_is_left_without_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW_SERVER_SECONDS", "60")
    monkeypatch.setenv("SLOW_SERVER_REST_SECONDS", "0")  # only within torch could the interpreter abort it
    with LiveServer("--backend=cpu", "--num-pages=8", "--drain-seconds=1", module=SLOW_SERVER) as live:
        running = _Background(live, "/v1/score", _slow_body())
        with live.client() as client:
            until(lambda: _busy(client))
        live.process.send_signal(signal.SIGTERM)
        assert assert_problem(running.wait(), 503, "stopping", "drain_seconds")["limit"] == 1
        assert live.process.wait(30) == 1, live.log_text()
        assert [event for event in live.events() if event["event"] == "left a running call"]
        assert "terminate called" not in live.log_text()


@pytest.fixture(scope="module")
def narrow() -> Iterator[LiveServer]:
    """A server with three places and a short deadline."""
    flags = ("--backend=cpu", "--queue-places=3", "--deadline-seconds=1", "--num-pages=8")
    with LiveServer(*flags, module=SLOW_SERVER, forked=True) as live:
        yield live


@pytest.mark.parametrize("leaves", [False, True])
def test_a_profile_of_many_runs_ends_at_the_deadline_or_with_its_client(
    narrow: LiveServer, leaves: bool
) -> None:
    with narrow.client() as client:
        path = "/v1/profile?repeats=100&cache=warm&scores=true"
        if leaves:
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, timeout=0.3, **binary(_slow_body()))
        else:
            assert_problem(client.post(path, **binary(_slow_body())), 504, "deadline")
        until(lambda: client.get("/v1/activity").json()["places_taken"] == 0, 10)
        assert not _busy(client)


def test_a_full_queue_a_deadline_and_a_client_that_leaves(narrow: LiveServer) -> None:
    live = narrow
    with live.client() as client:
        sequence = make_sequence(client)
        small = encode_case(random_case(((10, 1),)))
        slow = _Background(live, "/v1/score", _slow_body())
        until(lambda: _busy(client))
        late = _Background(live, f"/v1/sequences/{sequence}/keys", _keys(5))
        parts = urlsplit(live.url)
        with socket.create_connection((str(parts.hostname), int(parts.port or 0))) as leaving:
            head = f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: {BINARY}\r\n"
            leaving.sendall(f"{head}Content-Length: {len(small)}\r\n\r\n".encode() + small)
            until(lambda: client.get("/v1/activity").json()["places_taken"] == 3)
            reply = client.post("/v1/score", **binary(small))
            problem = assert_problem(reply, 429, "busy")
            assert int(reply.headers["retry-after"]) >= 1
            assert problem["retry_after_seconds"] > 0
        until(lambda: client.get("/v1/activity").json()["places_taken"] == 2)
        assert late.reply is None, "its going is seen at once, not at a deadline"
        assert assert_problem(late.wait(), 504, "deadline", "deadline_seconds")["limit"] == 1
        assert _busy(client), "the deadline is answered while the device is still busy"
        assert slow.wait().status_code == 200
        assert client.get(f"/v1/sequences/{sequence}").json()["length"] == 0, "a late append is not executed"
        assert client.get("/v1/activity").json()["places_taken"] == 0


def test_a_body_that_never_arrives_frees_its_place(narrow: LiveServer) -> None:
    with narrow.client() as client:
        parts = urlsplit(narrow.url)
        with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=30) as stalled:
            head = f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: {BINARY}\r\n"
            stalled.sendall(f"{head}Content-Length: 1000\r\n\r\nabc".encode())
            until(lambda: client.get("/v1/activity").json()["places_taken"] == 1)
            assert stalled.recv(4096).startswith(b"HTTP/1.1 504")
        until(lambda: client.get("/v1/activity").json()["places_taken"] == 0)
        assert client.post("/v1/score", **binary(encode_case(random_case(((10, 1),))))).status_code == 200


@pytest.mark.parametrize("kept", [False, True])
def test_a_head_that_never_ends_closes_its_connection(narrow: LiveServer, kept: bool) -> None:
    parts = urlsplit(narrow.url)
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=30) as stalled:
        if kept:
            stalled.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert stalled.recv(4096).startswith(b"HTTP/1.1 200")
        stalled.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        began = time.monotonic()
        rest = b"more"
        while rest:
            rest = stalled.recv(4096)
        assert time.monotonic() - began < 20


def test_sigterm_drains_and_refuses_what_comes_later() -> None:
    flags = ("--backend=cpu", "--num-pages=8", "--drain-seconds=120")
    with LiveServer(*flags, module=SLOW_SERVER, forked=True) as live, live.client() as client:
        running = _Background(live, "/v1/score", _slow_body())
        until(lambda: _busy(client))
        waiting = _Background(live, "/v1/score", encode_case(random_case(((10, 1),))))
        until(lambda: client.get("/v1/activity").json()["waiting"] == 1)
        live.process.send_signal(signal.SIGTERM)
        assert running.wait().status_code == 200
        assert waiting.wait().status_code == 200
        assert live.process.wait(120) == 0
        with pytest.raises(httpx.TransportError):
            client.get("/healthz")


def test_a_killed_server_starts_again_warms_up_and_knows_nothing_of_before() -> None:
    with LiveServer("--backend=cpu", "--num-pages=8", forked=True) as live:
        with live.client() as client:
            sequence = make_sequence(client, normals(300, 128))
        port = urlsplit(live.url).port
        live.kill()
    flags = ("--backend=cpu", "--num-pages=8", f"--port={port}")
    warm_up = {"SLOW_SERVER_WARM_UP_SECONDS": "2"}
    with (
        LiveServer(*flags, module=SLOW_SERVER, environment=warm_up, ready=False, forked=True) as again,
        again.client() as client,
    ):
        _check_warming(again)
        make_sequence(client, normals(5, 128))
        assert_problem(client.get(f"/v1/sequences/{sequence}"), 404, "unknown-sequence", "id")
        reply = client.post(f"/v1/sequences/{sequence}/keys", **binary(_keys(3)))
        assert_problem(reply, 404, "unknown-sequence", "id")
        assert client.get("/v1/cache").json()["used_pages"] == 1


def test_the_log_is_json_with_request_ids(client: httpx.Client, server: LiveServer) -> None:
    client.get("/v1/info", headers={"X-Request-Id": "find-me"})
    until(lambda: any(event.get("request_id") == "find-me" for event in server.events()), 10)
    event = next(event for event in server.events() if event.get("request_id") == "find-me")
    assert (event["event"], event["status"], event["path"]) == ("request", 200, "/v1/info")
    for line in server.log_text().splitlines():
        json.loads(line)


def _keys(count: int) -> bytes:
    return b"".join(encode_keys(normals(count, 128)))


# ---- Mixed load at the queue's limit: no answer lost, doubled or mixed up, memory flat ----

CLIENTS = 16
PLACES = 8
LEAST_ANSWERS = 10 * CLIENTS
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
        """Work until the end, on a busy machine until enough was answered, and leave nothing behind."""
        connection = await Connection.open(self.url)
        while (now := time.monotonic()) < end or (self.tally.answers <= LEAST_ANSWERS and now < end + 60):
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
    ("seconds", "max_growth"), [(4, 1.15), pytest.param(600, 1.05, marks=pytest.mark.nightly)]
)
def test_mixed_load_at_the_queues_limit(seconds: int, max_growth: float) -> None:
    # Growth: resident memory of the last third over that of the second. Allocators settle, leaks do not.
    flags = ("--backend=cpu", f"--queue-places={PLACES}", "--num-pages=128", "--log-level=info")
    with LiveServer(*flags, forked=True) as server:
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
        assert tally.answers > LEAST_ANSWERS
        assert executed == tally.answers, "each call was executed once and answered once"
        assert (cache["used_pages"], cache["total_sequences"]) == (0, 0), "nothing is left behind"
        assert (activity["places_taken"], activity["waiting"]) == (0, 0)
        assert last <= max_growth * middle
        assert not [event for event in server.events() if event.get("level") == "error"]
