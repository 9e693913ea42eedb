"""A client is an IndexScorer: on a live server every method gives what the scorer in this process gives."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from client import AsyncClient, AuthError, Client, LengthConflictError, ServerConnectionError
from indexer import IndexerConfig, IndexScorer, wire
from indexer.case import encode_case, read_case
from indexer.case.container import Array
from indexer.oracle import run_oracle
from indexer.pipeline import ScoreResult
from indexer.replay import as_tensor
from indexer.wire import ScoreReply
from kernel.errors import InvalidArgumentError, OutOfPagesError, UnknownSequenceError
from tests.client.conftest import MAX_BODY_BYTES, NUM_PAGES, OTHER_TOKEN, TOKEN
from tests.support.cases import CUT
from tests.support.http import binary, normals, random_case
from tests.support.live_server import START_SECONDS, LiveServer
from tests.support.process import printed_by

SELECTIONS: tuple[dict[str, object], ...] = (
    {},
    {"topk": 2, "local_blocks": 0},
    {"topk": 3, "init_blocks": 1, "local_blocks": 2, "order": "block"},
)


@pytest.fixture
def scorer() -> IndexScorer:
    """What the server's scorer is."""
    return IndexScorer(IndexerConfig(num_index_heads=4, num_pages=NUM_PAGES, backend="cpu"))


def assert_same(reply: ScoreReply, result: ScoreResult) -> None:
    """Fail unless an answer has a result's bits."""
    for name in ("block_ids", "num_blocks", "scores"):
        got, want = getattr(reply, name), getattr(result, name)
        assert (got is None) == (want is None)
        if got is not None:
            assert got.dtype == want.numpy().dtype
            assert got.tobytes() == want.numpy().tobytes()
            assert got.flags.writeable
    assert (reply.backend, reply.precision) == (result.backend, result.precision)
    assert "score" in reply.timings or "select" in reply.timings


def test_sequences_live_as_in_process(client: Client, scorer: IndexScorer) -> None:
    random = np.random.default_rng(1)
    pairs: list[tuple[str, int]] = []
    for step in range(60):
        action = random.integers(0, 5)
        if action == 0 or not pairs:
            pairs.append((client.add_sequence(), scorer.add_sequence()))
            continue
        there, here = pairs[random.integers(len(pairs))]
        if action == 1:
            keys = normals(int(random.integers(0, 300)), 128, seed=step).astype(ml_dtypes.bfloat16)
            start = scorer.sequence_length(here) if step % 2 else None
            scorer.append_keys(here, as_tensor(keys))
            assert client.append_keys(there, keys, start=start) == scorer.sequence_length(here)
        elif action == 2:
            pairs.append((client.fork_sequence(there), scorer.fork_sequence(here)))
        elif action == 3 and len(pairs) > 2:
            client.free_sequence(there)
            scorer.free_sequence(here)
            pairs.remove((there, here))
        else:
            lens = [min(int(random.integers(0, 9)), scorer.sequence_length(own)) for _, own in pairs]
            query = normals(sum(lens), 4, 128, seed=step)
            options = SELECTIONS[step % 3]
            with_scores = bool(step % 2)
            reply = client.score(
                query,
                [other for other, _ in pairs],
                lens,
                return_scores=with_scores,
                **options,  # type: ignore[arg-type]
            )
            result = scorer.score(
                torch.from_numpy(query),
                [own for _, own in pairs],
                lens,
                return_scores=with_scores,
                **options,  # type: ignore[arg-type]
            )
            assert_same(reply, result)
        assert client.sequence_length(pairs[0][0]) == scorer.sequence_length(pairs[0][1])
    cache = client.cache()
    assert cache.free_pages == scorer.num_free_pages
    assert [(state.id, state.length) for state in cache.sequences] == [
        (there, scorer.sequence_length(here)) for there, here in pairs
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_queries_of_every_dtype(client: Client, scorer: IndexScorer, dtype: type) -> None:
    keys = normals(400, 128)
    query: Array = normals(7, 4, 128, seed=3).astype(dtype)
    there, here = client.add_sequence(), scorer.add_sequence()
    client.append_keys(there, keys)
    scorer.append_keys(here, torch.from_numpy(keys))
    assert_same(
        client.score(query, [there], local_blocks=0), scorer.score(as_tensor(query), [here], local_blocks=0)
    )


def test_a_case_is_scored_as_by_the_oracle(client: Client) -> None:
    case = dataclasses.replace(read_case(CUT), local_blocks=0)
    reply, oracle = client.score_case(case), run_oracle(case)
    assert (reply.block_ids == oracle.block_ids).all()
    assert (reply.num_blocks == case.num_blocks_per_query()).all()
    assert reply.scores is not None
    np.testing.assert_allclose(reply.scores, oracle.scores, rtol=1e-5, atol=1e-4)
    assert client.score_case(case, return_scores=False).scores is None
    one = client.score_case(case, topk=1, init_blocks=1, order="block")
    assert (one.block_ids == 0).all()


def test_a_body_of_many_chunks_arrives_whole(client: Client) -> None:
    case = random_case(((1900, 1500),), heads=2, seed=5)
    assert case.index_q.nbytes > 1 << 20
    reply, oracle = client.score_case(case), run_oracle(case)
    assert (reply.block_ids == oracle.block_ids).all()


def test_errors_are_the_scorers(client: Client) -> None:
    sequence = client.add_sequence()
    with pytest.raises(InvalidArgumentError) as invalid:
        client.append_keys(sequence, np.full((1, 128), np.inf, np.float32))
    assert invalid.value.argument == "index_k[0, 0]"
    assert invalid.value.value == "inf"
    with pytest.raises(OutOfPagesError) as pages:
        client.append_keys(sequence, normals(NUM_PAGES * 128 + 1, 128).astype(np.float16))
    assert (pages.value.needed, pages.value.free, pages.value.num_pages) == (
        NUM_PAGES + 1,
        NUM_PAGES,
        NUM_PAGES,
    )
    with pytest.raises(UnknownSequenceError) as unknown:
        client.score(normals(1, 4, 128), ["abc"])
    assert unknown.value.sequence == "abc"
    with pytest.raises(LengthConflictError) as conflict:
        client.append_keys(sequence, normals(1, 128), start=5)
    assert conflict.value.length == 0
    with pytest.raises(InvalidArgumentError, match=str(MAX_BODY_BYTES)):
        client.append_keys(sequence, normals(MAX_BODY_BYTES // 512 + 1, 128))
    with pytest.raises(InvalidArgumentError, match="topk"):
        client.score(normals(1, 4, 128), [sequence], topk=65)
    assert client.sequence_length(sequence) == 0


def test_tokens_part_who_may_see_what(server: LiveServer, client: Client) -> None:
    sequence = client.add_sequence()
    with Client(server.url, token=OTHER_TOKEN) as other:
        assert not other.cache().sequences
        with pytest.raises(UnknownSequenceError):
            other.sequence_length(sequence)
    for token in (None, "token-of-nobody"):
        with Client(server.url, token=token) as stranger:
            assert stranger.health().status == "ok"
            with pytest.raises(AuthError):
                stranger.info()


def test_what_the_server_says_of_itself(client: Client) -> None:
    info, ready = client.info(), client.ready()
    assert (info.backend, info.num_pages, info.limits.max_body_bytes) == ("cpu", NUM_PAGES, MAX_BODY_BYTES)
    assert (ready.status, ready.backend) == ("ready", "cpu")
    assert {backend.name for backend in info.backends} >= {"cpu", "reference"}


def test_answers_have_the_members_of_their_records(server: LiveServer, client: Client) -> None:
    sequence = client.add_sequence()
    with server.client(TOKEN) as http:
        answers = {path: http.get(path).json() for path in ("/healthz", "/readyz", "/v1/info", "/v1/cache")}
        profile = http.post("/v1/profile?repeats=1", **binary(encode_case(read_case(CUT)))).json()
    client.free_sequence(sequence)
    pairs: tuple[tuple[type, dict[str, Any]], ...] = (
        (wire.Alive, answers["/healthz"]),
        (wire.Ready, answers["/readyz"]),
        (wire.SequenceInfo, answers["/v1/cache"]["sequences"][0]),
        (wire.CacheInfo, answers["/v1/cache"]),
        (wire.BackendInfo, answers["/v1/info"]["backends"][0]),
        (wire.Limits, answers["/v1/info"]["limits"]),
        (wire.Info, answers["/v1/info"]),
        (wire.StageMs, profile["stages"][0]),
        (wire.Floor, profile["floor"]),
        (wire.Profile, profile),
    )
    for record, answer in pairs:
        assert [field.name for field in dataclasses.fields(record)] == list(answer)


def test_profile(client: Client) -> None:
    case = read_case(CUT)
    profile = client.profile(case, cache="warm", repeats=2, return_scores=True, trace=True)
    assert (profile.cache, profile.repeats, profile.total_q) == ("warm", 2, case.total_q)
    assert {stage.stage for stage in profile.stages} >= {"score", "topk", "insert"}
    assert all(stage.min_ms <= stage.median_ms <= stage.max_ms for stage in profile.stages)
    assert profile.trace is not None
    assert profile.trace["traceEvents"]
    assert client.profile(case, repeats=1).trace is None


def _scores_of(seed: int) -> tuple[Array, Array]:
    keys = normals(200 + seed, 128, seed=seed)
    return keys, normals(3, 4, 128, seed=1000 + seed)


def test_threads_share_a_client_and_get_their_own_answers(client: Client) -> None:
    def work(seed: int) -> tuple[bytes, bytes]:
        keys, query = _scores_of(seed)
        sequence = client.add_sequence()
        client.append_keys(sequence, keys)
        answers = {client.score(query, [sequence], local_blocks=0).scores.tobytes() for _ in range(4)}  # type: ignore[union-attr]
        client.free_sequence(sequence)
        (answer,) = answers
        return answer, _in_process(seed)

    with ThreadPoolExecutor(6) as pool:
        for got, want in pool.map(work, range(12)):
            assert got == want


def test_coroutines_get_their_own_answers(server: LiveServer) -> None:
    async def work(client: AsyncClient, seed: int) -> tuple[bytes, int]:
        keys, query = _scores_of(seed)
        sequence = await client.add_sequence()
        length = await client.append_keys(sequence, keys, start=0)
        fork = await client.fork_sequence(sequence)
        await client.free_sequence(sequence)
        assert await client.sequence_length(fork) == length
        reply = await client.score(query, [fork], local_blocks=0)
        await client.free_sequence(fork)
        assert reply.scores is not None
        return reply.scores.tobytes(), length

    async def main() -> list[tuple[bytes, int]]:
        async with AsyncClient(server.url, token=TOKEN) as client:
            assert (await client.health()).status == "ok"
            assert (await client.ready()).backend == (await client.info()).backend == "cpu"
            case = read_case(CUT)
            reply, profile = await asyncio.gather(
                client.score_case(case, topk=3), client.profile(case, repeats=1)
            )
            assert (reply.block_ids == run_oracle(case).block_ids).all()
            assert profile.total_q == case.total_q
            found = await asyncio.gather(*(work(client, seed) for seed in range(12)))
            assert not (await client.cache()).sequences
            with pytest.raises(UnknownSequenceError):
                await client.free_sequence("abc")
            return found

    for seed, (got, length) in enumerate(asyncio.run(main())):
        assert got == _in_process(seed)
        assert length == 200 + seed


def _in_process(seed: int) -> bytes:
    keys, query = _scores_of(seed)
    scorer = IndexScorer(IndexerConfig(num_index_heads=4, num_pages=4, backend="cpu"))
    sequence = scorer.add_sequence()
    scorer.append_keys(sequence, torch.from_numpy(keys))
    scores = scorer.score(torch.from_numpy(query), [sequence], local_blocks=0).scores
    assert scores is not None
    return scores.numpy().tobytes()


def test_a_busy_server_is_waited_for() -> None:
    case = random_case(((600, 500),), seed=2)
    want = run_oracle(case).block_ids
    with (
        LiveServer("--backend=cpu", "--num-pages=8", "--queue-places=1", forked=True) as server,
        Client(server.url, retry_seconds=START_SECONDS) as client,
        server.client() as http,
        ThreadPoolExecutor(6) as pool,
    ):
        replies = list(pool.map(lambda _: client.score_case(case), range(12)))
        metrics = http.get("/metrics").text
    assert all((reply.block_ids == want).all() for reply in replies)
    assert 'status="429"' in metrics, "the queue of one place was never full: this test shows nothing"


def test_a_warming_server_is_waited_for_and_a_gone_one_is_told() -> None:
    with (
        LiveServer("--backend=cpu", "--num-pages=8", ready=False, forked=True) as server,
        Client(server.url, retry_seconds=START_SECONDS) as client,
    ):
        assert client.ready().status == "ready"
        sequence = client.add_sequence()
    with Client(server.url) as client, pytest.raises(ServerConnectionError):
        client.append_keys(sequence, normals(1, 128), start=0)


# ---- Remote work needs no torch ----

USE = """
import sys
import numpy as np
from client import AsyncClient, Client
from indexer.case import read_case

with Client(sys.argv[1], token=sys.argv[2]) as client:
    sequence = client.add_sequence()
    client.append_keys(sequence, np.ones((200, 128), np.float32))
    assert client.score(np.ones((2, 4, 128), np.float32), [sequence]).scores.shape == (4, 2, 2)
    client.free_sequence(sequence)
    assert client.score_case(read_case(sys.argv[3])).block_ids.shape == (4, 27, 3)
    client.profile(read_case(sys.argv[3]), repeats=1)
    client.info(), client.cache(), client.ready(), client.health()
assert "torch" not in sys.modules
"""
COMMAND = """
import sys
from client.cli import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end.code
assert "torch" not in sys.modules
"""


def test_a_client_imports_no_torch(server: LiveServer) -> None:
    printed_by("-c", USE, server.url, TOKEN, CUT)


@pytest.mark.parametrize("words", [["score"], ["profile", "--repeats=1"], ["bench", "--seconds=0.1"]])
def test_remote_commands_import_no_torch(words: list[str], server: LiveServer) -> None:
    assert printed_by("-c", COMMAND, *words, CUT, "--url", server.url, "--token", TOKEN)
