"""A sidecar over several ranks gives the bytes that one scorer gives, and ends with its ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil

from indexer import IndexerConfig, IndexScorer
from indexer.case import encode_case
from indexer.replay import as_tensor
from indexer.wire import decode_reply, encode_keys
from tests.support.http import (
    append,
    assert_problem,
    binary,
    make_sequence,
    normals,
    random_case,
    sequences_body,
)
from tests.support.live_server import LiveServer, until

RANKS = 3
NUM_PAGES = 32
FLAGS = ("--backend=cpu", f"--context-parallel={RANKS}", f"--num-pages={NUM_PAGES}")
FORKED_RANKS = "tests.http.forked_ranks"


def pids(live: LiveServer) -> dict[int, int]:
    """The process of each rank but the first, as the log says."""
    return {event["rank"]: event["pid"] for event in live.events() if event["event"] == "rank started"}


@contextmanager
def live(module: str, *flags: str) -> Iterator[LiveServer]:
    """A server of three ranks, of which none is left afterwards."""
    with LiveServer(*FLAGS, *flags, module=module, forked=True) as server:
        started = pids(server)
        assert sorted(started) == [1, 2]
        yield server
    until(lambda: not any(map(psutil.pid_exists, started.values())))


def test_the_bytes_of_one_scorer_until_a_rank_is_killed() -> None:
    keys, query = normals(1500, 128), normals(40, 4, 128, seed=1)
    single = IndexScorer(IndexerConfig(4, NUM_PAGES, backend="cpu"))
    seq = single.add_sequence()
    single.append_keys(seq, as_tensor(keys))
    with live(FORKED_RANKS) as server, server.client() as client:
        there = make_sequence(client, keys[:700])
        append(client, there, keys[700:])
        fork = client.post(f"/v1/sequences/{there}/fork").json()["id"]
        for scores in (True, False):
            want = single.score(as_tensor(query), [seq], return_scores=scores, topk=5)
            path = f"/v1/sequences/score?topk=5&scores={str(scores).lower()}"
            reply = client.post(path, **sequences_body(query, [fork]))
            found = decode_reply(reply.content)
            assert found.block_ids.tobytes() == want.block_ids.numpy().tobytes()
            if want.scores is not None:
                assert found.scores is not None
                assert found.scores.tobytes() == want.scores.numpy().tobytes()
        cache = client.get("/v1/cache").json()
        assert (cache["num_pages"], cache["used_pages"]) == (33, 12), "11 pages on each rank"
        bad = keys[:2].copy()
        bad[1, 3] = np.nan
        reply = client.post(f"/v1/sequences/{there}/keys", **binary(encode_keys(bad)))
        assert_problem(reply, 422, "invalid-argument", "index_k[1, 3]")
        assert client.delete(f"/v1/sequences/{fork}").status_code == 204
        reply = client.post(f"/v1/sequences/{there}/keys", **binary(encode_keys(normals(3000, 128))))
        assert_problem(reply, 409, "out-of-pages", "num_pages")
        assert client.get("/v1/info").json()["num_pages"] == 33

        os.kill(pids(server)[2], signal.SIGKILL)
        until(lambda: client.get("/readyz").status_code == 503)
        problem = assert_problem(client.get("/readyz"), 503, "rank-lost")
        assert problem["ranks"] == [2]
        assert_problem(client.post("/v1/sequences"), 503, "rank-lost")
        assert_problem(
            client.post("/v1/score", **binary(encode_case(random_case(((9, 1),))))), 503, "rank-lost"
        )
        assert client.get("/healthz").status_code == 200
        assert "nvfp4_indexer_ready 0.0" in client.get("/metrics").text
        assert server.stop() == 0


def test_a_rank_that_hangs_within_a_call() -> None:
    with live(FORKED_RANKS, "--rank-seconds=2") as server, server.client() as client:
        there = make_sequence(client, normals(500, 128))
        os.kill(pids(server)[1], signal.SIGSTOP)
        began = time.monotonic()
        body = binary(encode_keys(normals(3000, 128)))  # more than a pipe holds
        problem = assert_problem(client.post(f"/v1/sequences/{there}/keys", **body), 503, "rank-lost")
        # Rank 2 waits for rank 1 as well: if its 2 s are over first, its connection has ended too.
        assert problem["ranks"] in ([1], [1, 2])
        assert "no answer within 2 s" in problem["detail"]
        assert time.monotonic() - began < 30
        assert_problem(client.get("/readyz"), 503, "rank-lost")


def test_no_rank_outlives_a_server_that_is_killed() -> None:
    with live("server") as server:  # whose ranks are started, as those of a user
        server.kill()
