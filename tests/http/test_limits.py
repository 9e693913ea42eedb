"""The work that a call may take: a small body must not hold the device for long."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import ml_dtypes
import numpy as np
import pytest

from indexer.case import Case, encode_case
from indexer.replay import flop
from server.limits import (
    MAX_FLOP_CPU,
    MAX_FLOP_GPU,
    PAGE_ROWS,
    REQUEST_ROWS,
    CallLimits,
    call_flop,
    check_case,
)
from server.problems import ProblemError
from tests.support.http_calls import (
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
    with LiveServer(*flags) as live, live.client() as found:
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
