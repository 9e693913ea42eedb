"""Sequences over HTTP: what a call changes, and what a failed one leaves."""

from __future__ import annotations

import time

import httpx
import numpy as np
import pytest

from indexer import IndexerConfig, IndexScorer
from indexer.case.container import encode_container
from indexer.replay import as_tensor
from indexer.wire import decode_reply, encode_keys
from tests.http.conftest import NUM_PAGES
from tests.support.http import append, assert_problem, binary, make_sequence, normals, sequences_body
from tests.support.live_server import LiveServer


def test_the_life_of_a_sequence(client: httpx.Client) -> None:
    reply = client.post("/v1/sequences")
    assert reply.status_code == 201
    made = reply.json()
    assert (made["length"], made["blocks"]) == (0, 0)
    path = reply.headers["location"]
    assert path == f"/v1/sequences/{made['id']}"
    before = client.get("/v1/cache").json()
    assert append(client, made["id"], normals(200, 128)) == 200
    assert append(client, made["id"], normals(0, 128)) == 200
    assert client.get(path).json() == {"id": made["id"], "length": 200, "blocks": 2}
    after = client.get("/v1/cache").json()
    assert after["used_pages"] == before["used_pages"] + 2
    assert after["used_pages"] + after["free_pages"] == after["num_pages"] == NUM_PAGES
    fork = client.post(f"{path}/fork")
    assert fork.status_code == 201
    assert fork.json()["length"] == 200
    assert client.get("/v1/cache").json()["used_pages"] == after["used_pages"], "a fork shares its pages"
    assert client.delete(path).status_code == 204
    assert_problem(client.get(path), 404, "unknown-sequence", "id")
    assert_problem(client.delete(path), 404, "unknown-sequence", "id")
    assert client.delete(fork.headers["location"]).status_code == 204
    assert client.get("/v1/cache").json()["used_pages"] == before["used_pages"]


def test_a_fork_and_its_parent_part(client: httpx.Client) -> None:
    common, left, right = normals(150, 128, seed=1), normals(60, 128, seed=2), normals(60, 128, seed=3)
    parent = make_sequence(client, common)
    fork = client.post(f"/v1/sequences/{parent}/fork").json()["id"]
    append(client, parent, left)
    append(client, fork, right)
    query = normals(2, 4, 128, seed=4)
    both = decode_reply(
        client.post(
            "/v1/sequences/score?local_blocks=0", **sequences_body(query, [parent, fork], [1, 1])
        ).content
    )
    for row, keys in enumerate((left, right)):
        alone = make_sequence(client, np.concatenate([common, keys]))
        body = sequences_body(query[row : row + 1], [alone])
        single = decode_reply(client.post("/v1/sequences/score?local_blocks=0", **body).content)
        assert both.scores is not None
        assert single.scores is not None
        np.testing.assert_array_equal(both.scores[:, row], single.scores[:, 0])
        client.delete(f"/v1/sequences/{alone}")
    for sequence in (parent, fork):
        client.delete(f"/v1/sequences/{sequence}")


def test_scores_are_those_of_an_in_process_scorer(client: httpx.Client) -> None:
    scorer = IndexScorer(IndexerConfig(num_index_heads=4, num_pages=NUM_PAGES, backend="cpu"))
    here, there, lens = [], [], [5, 1, 0, 130]
    for seed, tokens in enumerate((700, 129, 40, 256)):
        keys = normals(tokens, 128, seed=seed)
        here.append(scorer.add_sequence())
        scorer.append_keys(here[-1], as_tensor(keys))
        there.append(make_sequence(client, keys))
    query = normals(sum(lens), 4, 128, seed=9)
    want = scorer.score(as_tensor(query), here, lens, topk=3, init_blocks=1)
    reply = client.post("/v1/sequences/score?topk=3&init_blocks=1", **sequences_body(query, there, lens))
    found = decode_reply(reply.content)
    assert want.scores is not None
    assert found.scores is not None
    assert found.scores.tobytes() == want.scores.numpy().tobytes()
    assert found.block_ids.tobytes() == want.block_ids.numpy().tobytes()
    assert found.num_blocks.tobytes() == want.num_blocks.numpy().tobytes()
    for sequence in there:
        client.delete(f"/v1/sequences/{sequence}")


def test_out_of_pages_changes_nothing(client: httpx.Client) -> None:
    sequence = make_sequence(client, normals(130, 128))
    query = normals(1, 4, 128, seed=5)
    body = sequences_body(query, [sequence])
    before = decode_reply(client.post("/v1/sequences/score", **body).content)
    cache = client.get("/v1/cache").json()
    keys = normals((cache["free_pages"] + 3) * 128, 128).astype(np.float16)
    reply = client.post(f"/v1/sequences/{sequence}/keys", **binary(encode_keys(keys)))
    problem = assert_problem(reply, 409, "out-of-pages", "num_pages")
    assert problem["missing_pages"] == 3
    assert client.get("/v1/cache").json() == cache
    after = decode_reply(client.post("/v1/sequences/score", **body).content)
    assert before.scores is not None
    assert after.scores is not None
    assert before.scores.tobytes() == after.scores.tobytes()
    client.delete(f"/v1/sequences/{sequence}")


def test_start_makes_a_repeated_append_safe(client: httpx.Client) -> None:
    sequence = make_sequence(client)
    body = binary(encode_keys(normals(10, 128)))
    path = f"/v1/sequences/{sequence}/keys?start=0"
    for _ in range(2):
        reply = client.post(path, **body)
        assert (reply.status_code, reply.json()["length"]) == (200, 10)
    assert client.get(f"/v1/sequences/{sequence}").json()["length"] == 10
    others = (normals(10, 128, seed=1), normals(9, 128), normals(10, 128).astype(np.float16))
    for keys in others:  # as many keys, but other ones; fewer; another type
        problem = assert_problem(
            client.post(path, **binary(encode_keys(keys))), 409, "length-conflict", "start"
        )
        assert problem["length"] == 10
    last = binary(encode_keys(others[0]))
    assert client.post(f"/v1/sequences/{sequence}/keys", **last).json()["length"] == 20
    assert_problem(client.post(path, **body), 409, "length-conflict", "start")
    path = f"/v1/sequences/{sequence}/keys?start=10"
    assert_problem(client.post(path, **body), 409, "length-conflict")
    client.delete(f"/v1/sequences/{sequence}")


def test_json_bodies(client: httpx.Client) -> None:
    sequence = make_sequence(client)
    keys, query = normals(3, 128), normals(2, 4, 128)
    path = f"/v1/sequences/{sequence}/keys"
    assert client.post(path, json={"index_k": keys.tolist()}).json()["length"] == 3
    reply = client.post("/v1/sequences/score", json={"sequences": [sequence], "index_q": query.tolist()})
    found = decode_reply(client.post("/v1/sequences/score", **sequences_body(query, [sequence])).content)
    assert reply.json()["block_ids"] == found.block_ids.tolist()
    client.delete(f"/v1/sequences/{sequence}")


def test_json_without_rows(client: httpx.Client) -> None:
    sequence = make_sequence(client, normals(3, 128))
    path = "/v1/sequences/score"
    for names, lens in (([], None), ([], []), ([sequence], [0]), ([sequence], None)):
        body = {"sequences": names, "index_q": [], "query_lens": lens}
        reply = client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        binary_reply = client.post(path, **sequences_body(normals(0, 4, 128), names, lens))
        assert decode_reply(binary_reply.content).block_ids.shape[:2] == (4, 0)
        assert reply.json()["block_ids"] == [[]] * 4
    client.delete(f"/v1/sequences/{sequence}")


def test_bad_calls_are_named_and_change_nothing(client: httpx.Client) -> None:
    sequence = make_sequence(client, normals(10, 128))
    nan = normals(4, 128)
    nan[2, 5] = np.inf
    append_path, score_path = f"/v1/sequences/{sequence}/keys", "/v1/sequences/score"
    query = normals(2, 4, 128)
    calls = [
        (append_path, binary(encode_keys(nan)), "index_k[2, 5]"),
        (append_path, binary(encode_keys(normals(4, 64))), "index_k.shape"),
        (append_path, binary(encode_keys(np.zeros((4, 128), dtype=np.int32))), "index_k.dtype"),
        (append_path, binary(encode_container({"index_q": normals(4, 128)}, {})), "index_k"),
        (append_path, binary(encode_container({"index_k": nan}, {"a": "b"})), "metadata"),
        (append_path + "?start=-1", binary(encode_keys(nan)), "start"),
        (append_path + "?strat=10", binary(encode_keys(normals(4, 128))), "strat"),
        (append_path + "?start=10&start=11", binary(encode_keys(normals(4, 128))), "start"),
        (score_path, sequences_body(normals(2, 2, 128), [sequence]), "index_q.shape"),
        (score_path, sequences_body(query, [sequence], [3]), "query_lens"),
        (score_path, sequences_body(normals(11, 4, 128), [sequence]), "query_lens[0]"),
        (score_path, binary(encode_container({"index_q": query}, {})), "metadata sequences"),
    ]
    for path, body, argument in calls:
        assert_problem(client.post(path, **body), 422, "invalid-argument", argument)
    for names in ([""] * 2, ["nope"], [sequence.upper()], ["\x00"]):
        reply = client.post(score_path, **sequences_body(query, names))
        if names != [sequence]:
            assert_problem(reply, 404, "unknown-sequence", "id")
    assert client.get(f"/v1/sequences/{sequence}").json()["length"] == 10
    client.delete(f"/v1/sequences/{sequence}")


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    assert_problem(client.get("/v2/score"), 404, "not-found")
    reply = client.put("/v1/cache")
    assert_problem(reply, 405, "method-not-allowed")
    assert reply.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/"])
def test_a_head_is_a_get_without_its_body(client: httpx.Client, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(get.content))


def test_sequences_are_bounded() -> None:
    with (
        LiveServer("--backend=cpu", "--num-pages=4", "--max-sequences=2", forked=True) as live,
        live.client() as client,
    ):
        first = make_sequence(client, normals(5, 128))
        make_sequence(client)
        assert_problem(client.post("/v1/sequences"), 409, "too-many-sequences", "max_sequences")
        assert_problem(client.post(f"/v1/sequences/{first}/fork"), 409, "too-many-sequences")
        client.delete(f"/v1/sequences/{first}")
        make_sequence(client)


def test_a_token_has_its_own_bounds() -> None:
    flags = ("--backend=cpu", "--num-pages=16", "--max-sequences-per-token=2", "--max-keys-per-token=700")
    tokens = {"NVFP4_INDEXER_TOKENS": "token-of-one,token-of-another"}
    with (
        LiveServer(*flags, environment=tokens, forked=True) as live,
        live.client("token-of-one") as one,
        live.client("token-of-another") as other,
    ):
        first = make_sequence(one, normals(300, 128))
        fork = one.post(f"/v1/sequences/{first}/fork").json()["id"]
        problem = assert_problem(
            one.post("/v1/sequences"), 409, "too-many-sequences", "max_sequences_per_token"
        )
        assert (problem["value"], problem["limit"]) == (3, 2)
        body = binary(encode_keys(normals(101, 128)))
        problem = assert_problem(
            one.post(f"/v1/sequences/{first}/keys", **body), 409, "too-many-keys", "max_keys_per_token"
        )
        assert (problem["value"], problem["limit"]) == (701, 700)
        assert append(one, first, normals(100, 128)) == 400
        one.delete(f"/v1/sequences/{fork}")
        problem = assert_problem(one.post(f"/v1/sequences/{first}/fork"), 409, "too-many-keys")
        assert one.get(f"/v1/sequences/{first}").json()["length"] == 400
        assert one.get("/v1/cache").json()["used_pages"] == 4, "what was refused left nothing"
        for length in (600, 100):
            make_sequence(other, normals(length, 128))
        one.delete(f"/v1/sequences/{first}")
        make_sequence(one, normals(700, 128))


def test_a_sequence_that_nobody_uses_expires() -> None:
    flags = ("--backend=cpu", "--num-pages=16", "--sequence-ttl-seconds=2")
    with LiveServer(*flags, forked=True) as live, live.client() as client:
        query = normals(1, 4, 128)
        used, idle = make_sequence(client, normals(300, 128)), make_sequence(client, normals(200, 128))
        end = time.monotonic() + 60
        while client.get(f"/v1/sequences/{idle}").status_code == 200:
            assert time.monotonic() < end
            assert client.post("/v1/sequences/score", **sequences_body(query, [used])).status_code == 200
            time.sleep(0.05)
        problem = assert_problem(client.get(f"/v1/sequences/{idle}"), 404, "unknown-sequence", "id")
        assert "sequence_ttl_seconds" in problem["detail"]
        cache = client.get("/v1/cache").json()
        assert [sequence["id"] for sequence in cache["sequences"]] == [used]
        assert cache["used_pages"] == 3, "its pages are free"
        assert [event["sequences"] for event in live.events() if event["event"] == "expired"] == [1]


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v1/info", "/v1/cache", "/v1/activity", "/metrics"])
def test_what_a_look_returns(client: httpx.Client, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 200
    if path == "/metrics":
        assert f"nvfp4_indexer_pages {float(NUM_PAGES)}" in reply.text
        assert "nvfp4_indexer_request_seconds_bucket" in reply.text
    else:
        assert reply.headers["content-type"] == "application/json"
