"""POST /v1/score: real and hostile cases."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import torch

from indexer.case import Case, encode_case, read_case
from indexer.oracle import mismatched_rows, run_oracle, score_error, select
from indexer.wire import decode_reply
from kernel.backends.base import SCORE_TOLERANCE
from kernel.backends.reference import ReferenceBackend
from tests.http.conftest import MAX_BODY_BYTES
from tests.support.calls import PAGE
from tests.support.cases import CUT
from tests.support.http import BINARY, assert_problem, binary, normals, random_case

RAGGED = ((300, 45), (0, 0), (129, 1), (128, 4), (700, 0), (1, 1))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_scores_are_the_oracles(client: httpx.Client, heads: int) -> None:
    case = random_case(RAGGED, heads, seed=heads)
    reply = client.post("/v1/score", **binary(encode_case(case)))
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == BINARY
    found = decode_reply(reply.content)
    oracle = run_oracle(case)
    assert found.scores is not None
    assert score_error(found.scores, oracle.scores, oracle.bounds) <= SCORE_TOLERANCE["exact"]
    assert mismatched_rows(case, found.scores, found.block_ids, oracle, SCORE_TOLERANCE["exact"]) == 0
    np.testing.assert_array_equal(found.num_blocks, case.num_blocks_per_query())
    past = np.arange(found.scores.shape[2]) >= found.num_blocks[:, None]
    assert past.any()
    assert np.isneginf(found.scores[:, past]).all(), "cells at and past nb are never anything else"


def test_a_real_case_with_expected_outputs(client: httpx.Client) -> None:
    body = CUT.read_bytes()
    case = read_case(CUT)
    found = decode_reply(client.post("/v1/score", **binary(body)).content)
    assert found.scores is not None
    assert case.expected_scores is not None
    oracle = run_oracle(case)
    assert score_error(found.scores, case.expected_scores, oracle.bounds) <= SCORE_TOLERANCE["exact"]


def test_options_take_the_place_of_the_cases(client: httpx.Client) -> None:
    case = random_case(((700, 20),), 2)
    options = "topk=4&init_blocks=1&local_blocks=2&order=block"
    found = decode_reply(client.post(f"/v1/score?{options}", **binary(encode_case(case))).content)
    wanted = replace(case, topk=4, init_blocks=1, local_blocks=2)
    assert found.scores is not None
    np.testing.assert_array_equal(found.scores[:, :, 0] >= 1e28, True)
    assert found.order == "block"
    best = select(found.scores, wanted)
    np.testing.assert_array_equal(found.block_ids, np.sort(best, axis=2))
    alone = decode_reply(
        client.post(f"/v1/score?{options}&scores=false", **binary(encode_case(case))).content
    )
    assert alone.scores is None
    np.testing.assert_array_equal(alone.block_ids, found.block_ids)


def test_pages_and_keys_give_the_same_bits(client: httpx.Client) -> None:

    case = random_case(((300, 9),), 4)

    pages = torch.zeros(8, PAGE, dtype=torch.uint8)
    table = torch.tensor([[6, 1, 4]], dtype=torch.int32)
    slots = (table[0].long()[:, None] * 128 + torch.arange(128)).flatten()[:300]
    assert case.index_k is not None
    ReferenceBackend().insert(torch.from_numpy(case.index_k.copy()), pages, slots)
    paged = replace(case, index_k=None, pages=pages.numpy(), block_table=table.numpy())
    a, b = (decode_reply(client.post("/v1/score", **binary(encode_case(c))).content) for c in (case, paged))
    assert a.scores is not None
    assert b.scores is not None
    assert a.scores.tobytes() == b.scores.tobytes()
    assert a.block_ids.tobytes() == b.block_ids.tobytes()


def test_json_gives_what_binary_gives(client: httpx.Client) -> None:
    case = random_case(((70, 2),), 1)
    assert case.index_k is not None
    body = {
        "index_q": case.index_q.tolist(),
        "index_k": case.index_k.tolist(),
        "topk": 3,
        "local_blocks": 0,
    }
    json_reply = client.post("/v1/score", json=body).json()
    found = decode_reply(client.post("/v1/score", **binary(encode_case(case))).content)
    assert found.scores is not None
    scores = np.array(json_reply["scores"], dtype=np.float32)
    np.testing.assert_array_equal(scores, found.scores)
    assert json_reply["block_ids"] == found.block_ids.tolist()
    first = random_case(((129, 129),), 1)
    reply = client.post(
        "/v1/score",
        **{**binary(encode_case(first))}
        | {"headers": {"Content-Type": BINARY, "Accept": "application/json"}},
    )
    assert reply.json()["scores"][0][0] == [pytest.approx(reply.json()["scores"][0][0][0]), None]


def test_timings_are_in_the_header_and_the_metadata(client: httpx.Client) -> None:
    reply = client.post("/v1/score", **binary(encode_case(random_case(((200, 5),)))))
    found = decode_reply(reply.content)
    header = dict(part.split(";dur=") for part in reply.headers["server-timing"].split(", "))
    assert {"receive", "queue", "decode", "insert", "quantize_query", "score", "topk", "encode"} <= set(
        header
    )
    assert {"insert", "quantize_query", "score", "topk"} <= set(found.timings)
    for stage, seconds in found.timings.items():
        assert float(header[stage]) == pytest.approx(1e3 * seconds, abs=1e-3)


@pytest.mark.parametrize(
    ("query", "argument"),
    [
        ("topk=0", "topk"),
        ("topk=65", "topk"),
        ("topk=x", "topk"),
        ("init_blocks=-1", "init_blocks"),
        ("order=best", "order"),
        ("scores=maybe", "scores"),
        ("top_k=3", "top_k"),
        ("topk=3&topk=3", "topk"),
        ("scores=true&topk=3&scores=", "scores"),
    ],
)
def test_bad_options_are_named(client: httpx.Client, query: str, argument: str) -> None:
    reply = client.post(f"/v1/score?{query}", **binary(encode_case(random_case(((5, 1),)))))
    assert_problem(reply, 422, "invalid-argument", argument)


def _nan(case: Case, name: str, place: tuple[int, ...]) -> Case:
    array = getattr(case, name).copy()
    array[place] = np.nan
    return replace(case, **{name: array})


def test_values_that_are_not_finite_are_named_with_their_place(client: httpx.Client) -> None:
    case = random_case(((300, 4),), 2)
    reply = client.post("/v1/score", **binary(encode_case(_nan(case, "index_q", (3, 1, 7)))))
    assert_problem(reply, 422, "invalid-argument", "index_q[3, 1, 7]")
    reply = client.post("/v1/score", **binary(encode_case(_nan(case, "index_k", (299, 127)))))
    assert_problem(reply, 422, "invalid-argument", "index_k[299, 127]")
    reply = client.post(
        "/v1/score",
        content='{"index_q": [[[1e999]]], "index_k": []}',
        headers={"Content-Type": "application/json"},
    )
    assert_problem(reply, 422, "invalid-argument", "index_q[0, 0, 0]")


@pytest.mark.parametrize(
    ("body", "argument"),
    [
        ({"index_k": []}, "index_q"),
        ({"index_q": [[[0.0] * 128]], "index_k": [[0.0] * 127]}, "index_k.shape"),
        ({"index_q": [[[0.0] * 128]], "index_k": [[0.0] * 128, [0.0]]}, "index_k"),
        ({"index_q": [[[0.0] * 128]], "index_k": [["1"]]}, "index_k[0, 0]"),
        ({"index_q": [[[0.0] * 128] * 3], "index_k": [[0.0] * 128]}, "index_q.shape[1]"),
        ({"index_q": [], "index_k": [], "seq_lens": [2**40]}, "seq_lens[0]"),
        ({"index_q": [[[0.0] * 128]], "index_k": [[0.0] * 128], "more": 1}, "more"),
    ],
)
def test_bad_json_is_named(client: httpx.Client, body: object, argument: str) -> None:
    assert_problem(client.post("/v1/score", json=body), 422, "invalid-argument", argument)


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"{}", "index_q = not given: Field required; see /openapi.json"),
        (b'{"index_q": {}, "index_k": []}', "index_q = an object: "),
        (b'{"index_q": null, "index_k": []}', "index_q = null: "),
        (b'{"index_q": [], "index_k": [[null]]}', "index_k[0, 0] = null: "),
        (b'{"index_q": [], "index_k": [[true]]}', "index_k[0, 0] = true: "),
        (b'{"index_q": [], "index_k": [], "topk": "4"}', 'topk = "4": '),
        (b"null", "body = null: "),
        (b"[]", "body = an array: "),
        (b"", "body = nothing: must be JSON: EOF while parsing a value"),
        (b"[", "body = '[': must be JSON: EOF while parsing a list at line 1 column 1; see /openapi.json"),
        (
            b'{"index_q": [],\n "index_k": [[1.0, 2.0, 3.0, 4.0, 5.0, nan]]}',
            "body = ' [[1.0, 2.0, 3.0, 4.0, 5.0, na': must be JSON: expected ident at line 2 column 41; see",
        ),
        (
            b'\xef\xbb\xbf{"index_q": []}',
            "body = a byte order mark: must be JSON in UTF-8; encode it without",
        ),
        ('{"index_q": []}'.encode("utf-16"), "body = a byte order mark: must be JSON in UTF-8"),
        (b'{"index_q": "\xff"}', 'body = \'{"index_q": "'),
    ],
)
def test_bad_json_is_told_in_words_of_the_caller(client: httpx.Client, body: bytes, detail: str) -> None:
    reply = client.post("/v1/score", content=body, headers={"Content-Type": "application/json"})
    assert reply.json()["detail"].startswith(detail)


def test_other_media_types_are_refused(client: httpx.Client) -> None:
    reply = client.post("/v1/score", content=b"x", headers={"Content-Type": "text/plain"})
    assert_problem(reply, 415, "unsupported-media-type", "Content-Type")
    reply = client.post(
        "/v1/score", content=b"x", headers={"Content-Type": BINARY, "Content-Encoding": "gzip"}
    )
    assert_problem(reply, 415, "unsupported-media-type", "Content-Encoding")
    reply = client.post("/v1/score", content=b"x", headers={"Content-Type": BINARY, "Accept": "image/png"})
    assert_problem(reply, 406, "not-acceptable", "Accept")


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (f"{BINARY};q=0", None),
        (f"{BINARY};q=0, */*", "application/json"),
        (f"{BINARY};q=0.2, application/json;q=0.8", "application/json"),
        (f"{BINARY}; Q=0.9 , application/json;q=0.8", BINARY),
        (f"application/json, {BINARY}", BINARY),
        ("application/json, text/plain, */*", "application/json"),
        ("application/json;q=0, application/*;q=0.1", BINARY),
        ("*/*;q=0", None),
        ("application/json;q=much", None),
        ("*/*;q=0.1", BINARY),
        ("", BINARY),
    ],
)
def test_the_answer_has_the_form_that_is_preferred(
    client: httpx.Client, accept: str, wanted: str | None
) -> None:
    headers = {"Content-Type": BINARY, "Accept": accept}
    body = encode_case(random_case(((5, 1),), 1))
    reply = client.post("/v1/score?scores=false", content=body, headers=headers)
    if wanted is None:
        assert_problem(reply, 406, "not-acceptable", "Accept")
    else:
        assert (reply.status_code, reply.headers["content-type"]) == (200, wanted)


def test_a_body_over_the_limit_is_not_read(client: httpx.Client) -> None:
    sent = 0

    def body(total: int) -> Iterator[bytes]:
        nonlocal sent
        for _ in range(total // 65536):
            sent += 65536
            yield bytes(65536)

    headers = {"Content-Type": BINARY, "Content-Length": str(1 << 40)}

    parts = urlsplit(str(client.base_url))
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=20) as connection:
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.sendall(f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 413"), "answered without any body"
    reply = client.post("/v1/score", content=body(2 * MAX_BODY_BYTES), headers={"Content-Type": BINARY})
    assert_problem(reply, 413, "too-large", "body")
    reply = client.post("/v1/score", content=b" " * 262145, headers={"Content-Type": "application/json"})
    assert_problem(reply, 413, "too-large", "body")


def test_a_call_that_would_take_too_much_memory_is_refused_first(client: httpx.Client) -> None:
    thin = Case(
        index_q=normals(1000, 4, 128).astype(np.float16),
        cu_seqlens_q=np.array([0, 1000], dtype=np.int32),
        seq_lens=np.array([1 << 20], dtype=np.int32),
        pages=np.zeros((1, 9216), dtype=np.uint8),
        block_table=np.zeros((1, 8192), dtype=np.int32),
    )
    assert_problem(client.post("/v1/score", **binary(encode_case(thin))), 422, "invalid-argument", "scores")
    many = Case(
        index_q=normals(0, 4, 128),
        index_k=normals(8000, 128).astype(np.float16),
        cu_seqlens_q=np.zeros(8001, dtype=np.int32),
        seq_lens=np.ones(8000, dtype=np.int32),
    )
    assert_problem(client.post("/v1/score", **binary(encode_case(many))), 422, "invalid-argument", "seq_lens")


def test_a_failed_call_says_who_it_was(client: httpx.Client) -> None:
    headers = {"Content-Type": BINARY, "X-Request-Id": "my-run.7"}
    problem = assert_problem(client.post("/v1/score", content=b"", headers=headers), 422, "invalid-argument")
    assert problem["request_id"] == "my-run.7"
    reply = client.get("/healthz", headers={"X-Request-Id": "a b"})
    assert reply.headers["x-request-id"] != "a b"


def test_empty_batches(client: httpx.Client) -> None:
    for lengths in ((), ((0, 0), (5, 0))):
        case = random_case(lengths)
        found = decode_reply(client.post("/v1/score", **binary(encode_case(case))).content)
        assert found.block_ids.shape == (4, 0, 3)
    assert json.loads(client.get("/v1/activity").text)["last_call"]["tokens"] == []
