"""Answers of any kind become named errors, and never a traceback of something else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

import client as client_package
from client import (
    AsyncClient,
    AuthError,
    BadReplyError,
    BusyError,
    Client,
    DeadlineError,
    LengthConflictError,
    NotReadyError,
    ServerConnectionError,
    ServerError,
    ServerTimeoutError,
    TooManyKeysError,
    TooManySequencesError,
)
from client.errors import error_of
from client.transport import MAX_RESENT
from indexer.wire import ScoreReply, decode_sequences_call, encode_reply
from kernel.errors import IndexerError, InvalidArgumentError, OutOfPagesError, UnknownSequenceError
from server.problems import TITLES, ProblemError, invalid, of_error
from tests.support.http import PROBLEM, Script, Step, answer, breaks, normals, problem, random_case

URL = "http://sidecar.test"


def told(problem: ProblemError) -> IndexerError:
    """What a client makes of a problem that the server writes."""
    response = problem.response("r1")
    return error_of(response.status_code, response.headers, bytes(response.body))


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("index_k[3, 5]", float("nan"), "must be finite", "check the model"),
        OutOfPagesError(needed=7, free=3, num_pages=64),
        UnknownSequenceError("abc"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_scorer_come_back_as_themselves(error: IndexerError) -> None:
    back = told(of_error(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    fields = {name: str(value) for name, value in vars(error).items()}
    assert {name: str(value) for name, value in vars(back).items()} == fields
    assert isinstance(back.__cause__, ServerError)
    assert back.__cause__.request_id == "r1"


@pytest.mark.parametrize("kind", TITLES)
def test_every_kind_of_problem_is_told(kind: str) -> None:
    back = told(ProblemError(499, kind, "the detail"))
    assert type(back) is not IndexerError
    assert isinstance(back, (ServerError, InvalidArgumentError, OutOfPagesError, UnknownSequenceError))


def test_what_a_caller_tells_apart_has_a_class_of_its_own() -> None:
    assert isinstance(told(ProblemError(401, "unauthorized", "no valid token")), AuthError)
    assert isinstance(told(ProblemError(403, "forbidden-origin", "")), AuthError)
    assert isinstance(told(ProblemError(409, "too-many-sequences", "")), TooManySequencesError)
    assert isinstance(told(ProblemError(409, "too-many-keys", "")), TooManyKeysError)
    assert isinstance(told(ProblemError(503, "crowded", "")), BusyError)
    too_large = told(ProblemError(413, "too-large", "", argument="body", value=9, limit=8))
    assert isinstance(too_large, InvalidArgumentError)
    assert "8 bytes" in too_large.limit
    plain = told(ProblemError(500, "internal", "the server failed"))
    assert type(plain) is ServerError
    assert "request r1" in str(plain)
    assert told(invalid("topk", 65, "must be 1 to 64", "correct it")).__class__ is InvalidArgumentError


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/html", b"<h1>502</h1>"),
        ("application/problem+json", b"{"),
        ("application/problem+json", b"[" * 100_000),
        ("application/problem+json", b"[1]"),
        ("application/problem+json", b'{"type": 5}'),
        ("application/problem+json", b'{"type": "about:blank"}'),
        ("", b"\xff\xfe" * 100_000),
    ],
)
def test_an_answer_of_someone_else_is_a_short_line(content_type: str, body: bytes) -> None:
    error = error_of(502, {"content-type": content_type}, body)
    assert type(error) is ServerError
    assert len(str(error)) < 300
    assert "\n" not in str(error)


def test_a_hostile_problem_is_still_an_error() -> None:
    for kind in TITLES:
        values: tuple[Any, ...] = (None, [], {"a": 1}, True, "x" * 10_000)
        for value in values:
            members = ("detail", "request_id", "argument", "value", "limit", "free_pages", "length")
            content = {"type": f"urn:nvfp4-indexer:problem:{kind}", **dict.fromkeys(members, value)}
            body = json.dumps(content).encode()
            assert isinstance(error_of(422, {"content-type": PROBLEM}, body), IndexerError)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"nonsense", b'{"id": 5, "length": 1, "blocks": 1}', b'{"id": "aa", "length": 1}'],
)
def test_json_of_another_shape_is_a_bad_reply(body: bytes) -> None:
    script = Script(answer(200, body, "application/json"))
    with Client(URL, transport=script) as client, pytest.raises(BadReplyError):
        client.add_sequence()


def test_scores_of_another_call_are_a_bad_reply() -> None:
    case = random_case(((300, 3),), heads=2)
    right = {"block_ids": (2, 3, 3), "num_blocks": (3,), "scores": (2, 3, 3)}
    for name, shape in (("block_ids", (2, 4, 3)), ("block_ids", (1, 3, 3)), ("block_ids", (2, 3, 5))):
        shapes = {**right, name: shape, "num_blocks": (shape[1],)}
        reply = ScoreReply(
            block_ids=np.zeros(shapes["block_ids"], np.int32),
            num_blocks=np.zeros(shapes["num_blocks"], np.int32),
            scores=None,
            backend="cpu",
            precision="exact",
            order="score",
        )
        script = Script(answer(200, b"".join(encode_reply(reply))))
        with Client(URL, transport=script) as client, pytest.raises(BadReplyError, match="was asked for"):
            client.score_case(case)
    script = Script(answer(200, b"\x08"))
    with Client(URL, transport=script) as client, pytest.raises(BadReplyError, match="no scores"):
        client.score_case(case)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("url", {"url": "localhost:8421"}),
        ("url", {"url": "ftp://localhost"}),
        ("url", {"url": "http://"}),
        ("url", {"url": "http://host/?a=1"}),
        ("url", {"url": "http://user:secret@host"}),
        ("url", {"url": "http://[::1"}),
        ("url", {"url": "http://127.0.0.1:99999"}),
        ("url", {"url": "http://127.0.0.1:0"}),
        ("token", {"token": ""}),
        ("token", {"token": "two words"}),
        ("token", {"token": b"bytes-break"}),
        ("token", {"token": 5}),
        ("token", {"token": "line\nbreak"}),
        ("timeout", {"timeout": 0}),
        ("timeout", {"timeout": float("nan")}),
        ("timeout", {"timeout": "5"}),
        ("timeout", {"timeout": True}),
        ("timeout", {"timeout": float("inf")}),
        ("retry_seconds", {"retry_seconds": -1}),
        ("retry_seconds", {"retry_seconds": None}),
        ("retry_seconds", {"retry_seconds": float("nan")}),
    ],
)
def test_what_a_client_cannot_use_is_named(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Client(**options)
    assert caught.value.argument == name
    assert "secret" not in str(caught.value)
    assert "break" not in str(caught.value)


@pytest.mark.parametrize(
    "sequence", ["", "a/b", "../info", "a,b", "\N{LATIN SMALL LETTER E WITH ACUTE}", "a" * 65, 5, None]
)
def test_an_id_that_is_none_is_not_sent(sequence: Any) -> None:
    with Client(URL, transport=Script()) as client:
        with pytest.raises(InvalidArgumentError, match="sequence"):
            client.fork_sequence(sequence)
        with pytest.raises(InvalidArgumentError, match="sequence"):
            client.score(np.zeros((1, 4, 128), np.float32), [sequence])


@pytest.mark.parametrize(
    "k", [None, [[1.0] * 128], "keys", np.zeros((1, 128)), np.ma.zeros((1, 128), np.float32)]
)
def test_what_is_no_tensor_is_not_sent(k: Any) -> None:
    with Client(URL, transport=Script()) as client, pytest.raises(InvalidArgumentError):
        client.append_keys("aa", k)


@pytest.mark.parametrize("case", ["call.safetensors", b"bytes of a file", None])
def test_what_is_no_case_is_not_sent(case: Any) -> None:
    """The name of its file, most likely."""
    with Client(URL, transport=Script()) as client:
        for send in (client.score_case, client.profile):
            with pytest.raises(InvalidArgumentError, match=r"^case = .*: must be a Case; .*read_case$"):
                send(case)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, np.complex64, object, ">f4"])
def test_a_dtype_that_the_server_does_not_take_is_named(dtype: Any) -> None:
    with Client(URL, transport=Script()) as client:
        with pytest.raises(InvalidArgumentError) as caught:
            client.append_keys("aa", np.zeros((1, 128), dtype))
        assert caught.value.argument == "k.dtype"
        assert caught.value.limit == "must be one of bfloat16, float16, float32"
        with pytest.raises(InvalidArgumentError) as caught:
            client.score(np.zeros((1, 4, 128), dtype), ["aa"])
        assert caught.value.argument == "q.dtype"
        assert caught.value.limit == "must be one of bfloat16, float16, float32, float8_e4m3fn"


Q = np.zeros((2, 4, 128), np.float32)
REFUSED: dict[str, list[Callable[[Any], Any]]] = {
    "sequences": [
        lambda client: client.score(Q, "aa"),
        lambda client: client.score(Q, None),
        lambda client: client.score(Q, iter(["aa"])),
    ],
    "query_lens": [
        lambda client: client.score(Q, ["aa"], 2),
        lambda client: client.score(Q, ["aa"], "2"),
        lambda client: client.score(Q, ["aa"], np.zeros((1, 1), np.int32)),
        lambda client: client.score(Q, ["aa"], np.ma.array([2], mask=[True])),
    ],
    "query_lens[1]": [
        lambda client: client.score(Q, ["aa", "bb"], [1, 2**40]),
        lambda client: client.score(Q, ["aa", "bb"], [1, -1]),
        lambda client: client.score(Q, ["aa", "bb"], [1, 1.0]),
        lambda client: client.score(Q, ["aa", "bb"], (1, True)),
        lambda client: client.score(Q, ["aa", "bb"], (1, "1")),
        lambda client: client.score(Q, ["aa", "bb"], np.array([1, 2**40])),
        lambda client: client.score(Q, ["aa", "bb"], [1, None]),
    ],
    "query_lens[0]": [lambda client: client.score(Q, ["aa"], np.array([2.0]))],
    "topk": [
        lambda client: client.score(Q, ["aa"], topk=2.5),
        lambda client: client.score(Q, ["aa"], topk=True),
    ],
    "init_blocks": [lambda client: client.score(Q, ["aa"], init_blocks="1")],
    "local_blocks": [lambda client: client.score_case(random_case(((5, 1),)), local_blocks=1.0)],
    "return_scores": [lambda client: client.score(Q, ["aa"], return_scores="no")],
    "start": [lambda client: client.append_keys("aa", np.zeros((1, 128), np.float32), start=1.5)],
    "repeats": [lambda client: client.profile(random_case(((5, 1),)), repeats=2.0)],
    "trace": [lambda client: client.profile(random_case(((5, 1),)), trace=1)],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_misread_is_named_and_not_sent(name: str) -> None:
    for use in REFUSED[name]:
        with Client(URL, transport=Script()) as client, pytest.raises(InvalidArgumentError) as caught:
            use(client)
        assert caught.value.argument == name

    async def main() -> None:
        async with AsyncClient(URL, transport=Script()) as client:
            for use in REFUSED[name]:
                with pytest.raises(InvalidArgumentError):
                    await use(client)

    asyncio.run(main())


def test_numpys_integers_are_integers() -> None:
    script = Script(answer(503, b"", "text/plain"))
    with Client(URL, transport=script) as client, pytest.raises(ServerError):
        client.score(Q, ["aa", "bb"], np.array([1, 1], np.uint8), topk=np.int64(3))  # type: ignore[arg-type]
    assert decode_sequences_call(script.bodies[0]).query_lens == (1, 1)
    assert dict(script.requests[0].url.params) == {"topk": "3", "scores": "true"}


def test_a_closed_client_is_named() -> None:
    client = Client(URL, transport=Script())
    client.close()
    with pytest.raises(InvalidArgumentError, match="client = closed"):
        client.info()

    async def main() -> None:
        async with AsyncClient(URL, transport=Script()) as client:
            pass
        with pytest.raises(InvalidArgumentError, match="client = closed"):
            await client.info()

    asyncio.run(main())


def test_every_public_name_is_there() -> None:
    assert set(client_package.__all__) <= set(dir(client_package))
    for name in client_package.__all__:
        assert getattr(client_package, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Session'"):
        client_package.Session  # noqa: B018


# ---- Retries: never where a call could be executed twice, never without end ----

SEQUENCE = {"id": "aa", "length": 3, "blocks": 1}
KEYS = normals(3, 128)

Use = Callable[[Any], Any]
RISKY: dict[str, Use] = {
    "add": lambda client: client.add_sequence(),
    "fork": lambda client: client.fork_sequence("aa"),
    "append": lambda client: client.append_keys("aa", KEYS),
}
SAFE: dict[str, Use] = {
    "length": lambda client: client.sequence_length("aa"),
    "free": lambda client: client.free_sequence("aa"),
    "append at start": lambda client: client.append_keys("aa", KEYS, start=0),
}


def run(
    use: Use,
    *steps: Step,
    script: Script | None = None,
    seconds: float = 5.0,
    asynchronous: bool = False,
) -> tuple[Any, Script]:
    """Use a client whose server follows a script."""
    script = script or Script(*steps)
    if not asynchronous:
        with Client(URL, retry_seconds=seconds, transport=script) as client:
            return use(client), script

    async def main() -> Any:
        async with AsyncClient(URL, retry_seconds=seconds, transport=script) as client:
            return await use(client)

    return asyncio.run(main()), script


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("use", [*RISKY.values(), *SAFE.values()], ids=[*RISKY, *SAFE])
def test_a_refusal_is_waited_out_for_any_call(use: Use, asynchronous: bool) -> None:
    steps = (
        problem(429, "busy", retry_after_seconds=0.01),
        problem(503, "warming", {"Retry-After": "0"}),
        answer(200, SEQUENCE),
    )
    _, script = run(use, *steps, asynchronous=asynchronous)
    assert len(script.requests) == 3
    assert script.bodies[0] == script.bodies[1] == script.bodies[2]


def test_the_servers_hint_is_kept() -> None:
    began = time.perf_counter()
    run(
        RISKY["add"],
        problem(429, "busy", {"Retry-After": "1"}, retry_after_seconds=0.4),
        answer(200, SEQUENCE),
    )
    assert 0.4 <= time.perf_counter() - began < 0.9
    began = time.perf_counter()
    run(RISKY["add"], problem(503, "warming", {"Retry-After": "1"}), answer(200, SEQUENCE))
    assert 1.0 <= time.perf_counter() - began < 2.0


@pytest.mark.parametrize("hint", ["Wed, 21 Oct 2026 07:28:00 GMT", "-5", "soon"])
def test_a_hint_that_is_no_number_is_not_trusted(hint: str) -> None:
    _, script = run(RISKY["add"], problem(429, "busy", {"Retry-After": hint}), answer(200, SEQUENCE))
    assert len(script.requests) == 2


def test_waiting_ends_and_a_hint_beyond_it_is_not_waited_for(asynchronous: bool) -> None:
    began = time.perf_counter()
    refusals = (problem(429, "busy", retry_after_seconds=0.01) for _ in range(99))
    with pytest.raises(BusyError) as caught:
        run(RISKY["add"], *refusals, seconds=0.3, asynchronous=asynchronous)
    assert caught.value.status == 429
    with pytest.raises(NotReadyError):
        run(RISKY["add"], problem(503, "warming", {"Retry-After": "3600"}), asynchronous=asynchronous)
    with pytest.raises(BusyError):
        run(RISKY["add"], problem(429, "busy"), seconds=0, asynchronous=asynchronous)
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(("status", "error"), [(429, BusyError), (503, NotReadyError)])
@pytest.mark.parametrize("use", [*RISKY.values(), *SAFE.values()], ids=[*RISKY, *SAFE])
def test_a_proxys_refusal_with_retry_after_is_waited_out(
    use: Use, status: int, error: type[ServerError], asynchronous: bool
) -> None:
    refusal = answer(status, b"<h1>Slow down</h1>", "text/html", {"Retry-After": "0"})
    _, script = run(use, refusal, refusal, answer(200, SEQUENCE), asynchronous=asynchronous)
    assert len(script.requests) == 3
    with pytest.raises(error, match="Slow down") as caught:
        run(use, refusal, seconds=0, asynchronous=asynchronous)
    assert caught.value.status == status


def test_a_refusal_of_someone_else_without_a_hint_is_not_waited_out() -> None:
    # A proxy's 503 does not say whether the call was executed; with Retry-After it went no further.
    for status in (429, 502, 503):
        with pytest.raises(ServerError, match="Bad gateway") as caught:
            run(RISKY["append"], answer(status, b"<h1>Bad\n gateway</h1>", "text/html"))
        assert caught.value.status == status


@pytest.mark.parametrize("use", RISKY.values(), ids=RISKY)
@pytest.mark.parametrize("error", [httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError])
def test_a_lost_answer_ends_a_call_that_would_do_it_twice(
    use: Use, error: type[httpx.TransportError], asynchronous: bool
) -> None:
    with pytest.raises(ServerConnectionError, match="may have been executed"):
        run(use, breaks(error), asynchronous=asynchronous)


@pytest.mark.parametrize("use", SAFE.values(), ids=SAFE)
def test_a_lost_answer_is_asked_for_again_where_that_is_safe(use: Use, asynchronous: bool) -> None:
    _, script = run(use, breaks(), breaks(), answer(200, SEQUENCE), asynchronous=asynchronous)
    assert len(script.requests) == 3


def test_a_server_that_drops_every_connection_is_not_given_the_call_for_ever(asynchronous: bool) -> None:
    case = random_case(((5, 1),))
    uses: tuple[Use, ...] = (SAFE["length"], lambda client: client.score_case(case))
    for use in uses:
        script = Script(*(breaks() for _ in range(99)))
        with pytest.raises(ServerConnectionError, match="may have been executed"):
            run(use, script=script, seconds=30, asynchronous=asynchronous)
        assert len(script.requests) == 1 + MAX_RESENT
    refusals = [problem(429, "busy", retry_after_seconds=0.001)] * MAX_RESENT
    run(SAFE["length"], *refusals, breaks(), answer(200, SEQUENCE), seconds=30)


def test_keys_that_had_arrived_are_not_appended_again(asynchronous: bool) -> None:
    arrived = answer(200, {"id": "aa", "length": 3, "blocks": 1})
    length, script = run(SAFE["append at start"], breaks(), arrived, asynchronous=asynchronous)
    assert length == 3
    assert [request.url.params["start"] for request in script.requests] == ["0", "0"]
    for steps in ((), (breaks(),)):  # someone else's keys, as many or not, whatever was lost
        for length in (3, 7):
            conflict = problem(409, "length-conflict", length=length)
            with pytest.raises(LengthConflictError) as caught:
                run(SAFE["append at start"], *steps, conflict, asynchronous=asynchronous)
            assert caught.value.length == length


def test_a_sequence_that_was_freed_is_freed() -> None:
    gone = problem(404, "unknown-sequence", value="aa")
    run(SAFE["free"], breaks(), gone)
    with pytest.raises(UnknownSequenceError):
        run(SAFE["free"], gone)
    with pytest.raises(UnknownSequenceError):
        run(SAFE["length"], breaks(), gone)


@pytest.mark.parametrize("error", [httpx.ReadTimeout, httpx.WriteTimeout])
def test_a_timeout_is_not_tried_again(error: type[httpx.TransportError], asynchronous: bool) -> None:
    with pytest.raises(ServerTimeoutError) as caught:
        run(SAFE["length"], breaks(error), asynchronous=asynchronous)
    assert isinstance(caught.value, TimeoutError)


def test_a_deadline_is_not_tried_again() -> None:
    with pytest.raises(DeadlineError):
        run(SAFE["length"], problem(504, "deadline"))


def test_no_connection_is_told_at_once() -> None:
    for error in (httpx.ConnectError, httpx.ConnectTimeout):
        with pytest.raises(ServerConnectionError, match="cannot be reached") as caught:
            run(SAFE["length"], breaks(error))
        assert isinstance(caught.value, ConnectionError)
