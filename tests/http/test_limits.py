"""The work that a call may take: a small body must not hold the device for long."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import httpx
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexer.case import Case, encode_case
from indexer.case.container import encode_container
from indexer.replay import flop
from indexer.wire import PROBLEM_PREFIX, SequencesCall, decode_reply, encode_keys, encode_sequences_call
from kernel.errors import CaseFileError
from server.limits import (
    MAX_FLOP_CPU,
    MAX_FLOP_GPU,
    PAGE_ROWS,
    REQUEST_ROWS,
    CallLimits,
    call_flop,
    check_case,
)
from server.problems import TITLES, ProblemError
from tests.support.http import (
    BINARY,
    PROBLEM,
    assert_problem,
    binary,
    make_sequence,
    normals,
    random_case,
    sequences_body,
)
from tests.support.live_server import LiveServer

RAGGED = ((300, 45), (0, 0), (129, 1), (128, 128), (700, 0), (1, 1), (385, 257))
MAX_FLOP = 2 * 128 * 128 * (4 * 3 + PAGE_ROWS * 3 + REQUEST_ROWS)
"""Of one query of four heads to three blocks."""


def thin_case(requests: int, queries: int) -> Case:
    """Requests of 2^20 tokens whose blocks are all the same page."""
    return Case(
        index_q=np.ones((requests * queries, 1, 128), dtype=ml_dtypes.float8_e4m3fn),
        cu_seqlens_q=np.arange(requests + 1, dtype=np.int32) * queries,
        seq_lens=np.full(requests, 1 << 20, dtype=np.int32),
        pages=np.zeros((1, 9216), dtype=np.uint8),
        block_table=np.zeros((requests, 8192), dtype=np.int32),
    )


@pytest.mark.parametrize("heads", [1, 4])
def test_the_work_is_that_of_every_visible_cell_page_and_request(heads: int) -> None:
    case = random_case(RAGGED, heads)
    pages = sum(-(-tokens // 128) for tokens, queries in RAGGED if queries)
    work = call_flop(heads, case.seq_lens.tolist(), case.query_lens.tolist())
    assert work == flop(case) + 2 * 128 * 128 * (PAGE_ROWS * pages + REQUEST_ROWS * len(RAGGED))
    assert call_flop(heads, [], []) == 0
    assert call_flop(heads, [5], [9]) >= 0, "lengths that do not fit are refused elsewhere"


def test_defaults_let_large_calls_in() -> None:
    assert call_flop(4, [8192 * 4], [8192]) < MAX_FLOP_CPU
    assert 10 * call_flop(4, [1 << 20], [8192]) < MAX_FLOP_GPU


def test_many_tiny_requests_are_as_much_work_as_they_take_time() -> None:
    """20,000 requests of a key and a query take two cores some 6 s, more than the default means to allow."""
    count = 20_000
    tiny = Case(
        index_q=np.zeros((count, 4, 128), dtype=ml_dtypes.bfloat16),
        index_k=np.zeros((count, 128), dtype=ml_dtypes.bfloat16),
        cu_seqlens_q=np.arange(count + 1, dtype=np.int32),
        seq_lens=np.ones(count, dtype=np.int32),
    )
    limits = CallLimits(1 << 31, MAX_FLOP_CPU)
    with pytest.raises(ProblemError, match="20000 queries of 20000 requests"):
        check_case(tiny, limits, scores=False)
    assert call_flop(4, [1 << 17] * 32, [1] * 32) < MAX_FLOP_CPU
    requests = call_flop(4, [8192] * 32, [1] * 32) - 32 * 64 * 32768 * (4 + PAGE_ROWS)
    assert requests == 32 * 32768 * REQUEST_ROWS < MAX_FLOP_CPU / 500, "nothing to a decode step"


def test_a_small_body_that_means_much_work_is_refused(client: httpx.Client) -> None:
    body = encode_case(thin_case(16, 400))
    assert len(body) < 2 << 20
    for path in ("/v1/score?scores=false", "/v1/profile"):
        problem = assert_problem(client.post(path, **binary(body)), 422, "invalid-argument", "index_q")
        assert "6400 queries of 16 requests" in problem["value"]
        assert "may take 5e+11 (max_call_flop)" in problem["limit"]
        assert problem["remedy"]


@pytest.fixture(scope="module")
def tight() -> Iterator[httpx.Client]:
    """A client of a server that lets hardly any work in."""
    flags = ("--backend=cpu", "--num-pages=16", f"--max-call-flop={MAX_FLOP}")
    with LiveServer(*flags, forked=True) as live, live.client() as found:
        yield found


def test_the_limit_is_exact_for_sequences(tight: httpx.Client) -> None:
    sequence = make_sequence(tight, normals(300, 128))
    path = "/v1/sequences/score?scores=false"
    for lens in (None, [1]):
        reply = tight.post(path, **sequences_body(normals(1, 4, 128), [sequence], lens))
        assert reply.status_code == 200, reply.text
    for names, lens in (
        ([sequence], [2]),
        ([sequence] * 2, [1, 1]),
        ([sequence], None),
        ([sequence] * 2, None),
    ):
        reply = tight.post(path, **sequences_body(normals(2, 4, 128), names, lens))
        assert_problem(reply, 422, "invalid-argument", "index_q")
    reply = tight.post(path, **sequences_body(normals(1, 4, 128), [sequence], [-5]))
    assert_problem(reply, 422, "invalid-argument", "query_lens[0]")


def test_the_limit_is_exact_for_cases(tight: httpx.Client) -> None:
    assert tight.post("/v1/score", **binary(encode_case(random_case(((300, 1),))))).status_code == 200
    assert tight.get("/v1/info").json()["limits"]["max_call_flop"] == MAX_FLOP
    for lengths in (((300, 2),), ((385, 1),), ((300, 1), (1, 1))):
        reply = tight.post("/v1/score", **binary(encode_case(random_case(lengths))))
        assert_problem(reply, 422, "invalid-argument", "index_q")


# ---- Malformed bodies: always a problem that names the argument, never a 500, never a change ----

CASE = encode_case(random_case(((200, 3), (1, 1)), 2))
KEYS = b"".join(encode_keys(normals(5, 128)))
CALL = b"".join(encode_sequences_call(SequencesCall(normals(1, 4, 128), ("0123456789abcdef",), (1,))))
TARGETS = {"/v1/score": CASE, "/v1/sequences/{id}/keys": KEYS, "/v1/sequences/score": CALL}


def _check(client: httpx.Client, path: str, body: bytes) -> None:
    reply = client.post(path, content=body, headers={"Content-Type": BINARY})
    if reply.status_code == 200:
        return
    assert reply.status_code in (404, 409, 422), (reply.status_code, body[:200])
    assert reply.headers["content-type"] == PROBLEM
    problem = reply.json()
    assert problem["type"].removeprefix(PROBLEM_PREFIX) in TITLES
    assert problem["argument"]
    assert len(reply.content) < 4000, "a message repeats no long value"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    target=st.sampled_from(sorted(TARGETS)),
    edits=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 2000)),
    tail=st.binary(max_size=8),
)
def test_mutated_bodies(
    server: LiveServer,
    client: httpx.Client,
    target: str,
    edits: list[tuple[int, int]],
    cut: int | None,
    tail: bytes,
) -> None:
    body = bytearray(TARGETS[target])
    header = 8 + int.from_bytes(body[:8], "little")
    for place, value in edits:
        body[place % header] = value
    sequence = "0123456789abcdef"
    _check(client, target.format(id=sequence), bytes(body[:cut]) + tail)
    assert server.process.poll() is None


def _container(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "empty": b"",
    "length past the end": struct.pack("<Q", 2**63) + b"{}",
    "header of a terabyte": struct.pack("<Q", 1 << 40) + b"{}",
    "not JSON": _container(b"{nope"),
    "deep": _container(b'{"a":' * 20000 + b"1" + b"}" * 20000),
    "a number of 10,000 digits": _container(b'{"a":' + b"9" * 10000 + b"}"),
    "metadata bomb": _container({"__metadata__": {str(i): "x" * 100 for i in range(600)}}),
    "metadata that is no string": _container({"__metadata__": {"format": 1}}),
    "overlap": _container({"a": _tensor("F32", [2], 0, 8), "b": _tensor("F32", [2], 4, 12)}, bytes(12)),
    "gap": _container({"a": _tensor("F32", [1], 0, 4), "b": _tensor("F32", [1], 8, 12)}, bytes(12)),
    "shape of 2^120": _container({"index_k": _tensor("F32", [2**40, 2**40, 2**40], 0, 0)}),
    "negative size": _container({"index_k": _tensor("F32", [-1, 128], 0, 0)}),
    "complex dtype": _container({"index_k": _tensor("C64", [1], 0, 8)}, bytes(8)),
    "name twice": _container(b'{"a":{},"a":{}}'),
    "nothing in it": _container({}),
    "bytes after the tensors": KEYS + b"x",
}


@pytest.mark.parametrize("path", sorted(TARGETS))
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_headers(client: httpx.Client, path: str, name: str) -> None:
    sequence = make_sequence(client)
    before = client.get("/v1/cache").json()
    reply = client.post(path.format(id=sequence), content=HOSTILE[name], headers={"Content-Type": BINARY})
    assert reply.status_code == 422, reply.text
    assert reply.json()["argument"]
    assert client.get("/v1/cache").json() == before
    client.delete(f"/v1/sequences/{sequence}")


def test_a_reply_survives_the_codec_and_nothing_else_is_one() -> None:
    with pytest.raises(CaseFileError, match="metadata format"):
        decode_reply(CASE)
    block_ids, scores = np.zeros((4, 3, 2), dtype=np.int32), normals(4, 3, 5)
    metadata = {"format": "nvfp4-indexer-scores", "version": "1"}
    for tensors, argument in (
        ({"num_blocks": np.zeros(3, dtype=np.int32)}, "block_ids"),
        ({"block_ids": block_ids, "num_blocks": np.zeros(2, dtype=np.int32)}, "num_blocks.shape"),
        ({"block_ids": block_ids, "num_blocks": np.zeros(3, dtype=np.int32), "scores": scores[:2]}, "scores"),
    ):
        with pytest.raises(CaseFileError, match=argument):
            decode_reply(b"".join(encode_container(tensors, metadata)))
    for text in ("[]", "x", '{"a":"b"}', "{" * 60000):
        fields = {**metadata, "timings_seconds": text[:60000]}
        tensors = {"block_ids": block_ids, "num_blocks": np.zeros(3, dtype=np.int32)}
        with pytest.raises(CaseFileError, match="timings_seconds"):
            decode_reply(b"".join(encode_container(tensors, fields)))
