"""Answers of any kind become named errors, and never a traceback of something else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import client as client_package
from client import (
    AsyncClient,
    AuthError,
    BadReplyError,
    BusyError,
    Client,
    ServerError,
    TooManyKeysError,
    TooManySequencesError,
)
from client.errors import error_of
from indexer.wire import ScoreReply, decode_sequences_call, encode_reply
from kernel.errors import IndexerError, InvalidArgumentError, OutOfPagesError, UnknownSequenceError
from server.problems import TITLES, ProblemError, invalid, of_error
from tests.support.http_calls import PROBLEM, random_case
from tests.support.scripted_server import Script, answer

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


@pytest.mark.parametrize("sequence", ["", "a/b", "../info", "a,b", 5, None])
def test_an_id_that_is_none_is_not_sent(sequence: Any) -> None:
    with Client(URL, transport=Script()) as client:
        with pytest.raises(InvalidArgumentError, match="sequence"):
            client.fork_sequence(sequence)
        with pytest.raises(InvalidArgumentError, match="sequence"):
            client.score(np.zeros((1, 4, 128), np.float32), [sequence])


@pytest.mark.parametrize("k", [None, [[1.0] * 128], "keys", np.zeros((1, 128))])
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
