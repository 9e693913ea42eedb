"""When a call is sent again: never where that could do something twice, never for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from client import (
    AsyncClient,
    BusyError,
    Client,
    DeadlineError,
    LengthConflictError,
    NotReadyError,
    ServerConnectionError,
    ServerError,
    ServerTimeoutError,
)
from client.transport import MAX_RESENT
from kernel.errors import UnknownSequenceError
from tests.support.http_calls import normals, random_case
from tests.support.scripted_server import Script, Step, answer, breaks, problem

URL = "http://sidecar.test"
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
    conflict = problem(409, "length-conflict", length=3)
    length, script = run(SAFE["append at start"], breaks(), conflict, asynchronous=asynchronous)
    assert length == 3
    assert [request.url.params["start"] for request in script.requests] == ["0", "0"]
    with pytest.raises(LengthConflictError) as caught:  # no answer was lost: someone else's tokens
        run(SAFE["append at start"], conflict)
    assert caught.value.length == 3
    with pytest.raises(LengthConflictError):  # someone else's, whatever was lost
        run(SAFE["append at start"], breaks(), problem(409, "length-conflict", length=7))


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
