"""What a client may do wrong, slowly or not at all must not take the server from the others."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import ml_dtypes
import numpy as np
import psutil
import pytest
from structlog.testing import capture_logs

from indexer import IndexerConfig, IndexScorer
from indexer.case import Case, encode_case
from indexer.profile import profile_case
from indexer.replay import CaseScorer
from indexer.wire import encode_keys
from server.app import _on_loop_error, create_app, new_state
from server.engine import Engine
from server.logs import LogStream
from server.serve import _within_open_files
from server.settings import Settings
from tests.support.http import BINARY, assert_problem, binary, make_sequence, normals, random_case
from tests.support.live_server import LiveServer, until
from tests.support.process import ForkedProcess, python

PLACES, CONNECTIONS, DEADLINE = 4, 12, 1.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def short() -> Iterator[LiveServer]:
    """A server with four places, twelve connections and a deadline of a second."""
    flags = (f"--queue-places={PLACES}", f"--max-connections={CONNECTIONS}", f"--deadline-seconds={DEADLINE}")
    limits = (f"--queue-bytes={8 * MIB}", f"--max-body-bytes={64 * MIB}")
    with LiveServer("--backend=cpu", "--num-pages=16", *flags, *limits, forked=True) as live:
        yield live


def connect(server: LiveServer, receive_bytes: int | None = None) -> socket.socket:
    """A connection, whose receive buffer may be small."""
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(30)
    parts = urlsplit(server.url)
    connection.connect((str(parts.hostname), int(parts.port or 0)))
    return connection


def head(line: str, *headers: str) -> bytes:
    """The head of a request."""
    return "\r\n".join([f"{line} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def all_of(connection: socket.socket) -> bytes:
    """What arrives until the server ends the connection."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


# ---- Answers that nobody reads ----


def call_with_a_long_answer(queries: int) -> bytes:
    """A whole request, cheap to score, whose answer takes a kilobyte for each query."""
    case = Case(
        index_q=np.zeros((queries, 4, 128), dtype=ml_dtypes.float8_e4m3fn),
        pages=np.zeros((1, 9216), dtype=np.uint8),
        block_table=np.zeros((queries // 100, 1), dtype=np.int32),
        cu_seqlens_q=np.arange(queries // 100 + 1, dtype=np.int32) * 100,
        seq_lens=np.full(queries // 100, 100, dtype=np.int32),
        topk=64,
    )
    body = encode_case(case)
    return head("POST /v1/score", f"Content-Type: {BINARY}", f"Content-Length: {len(body)}") + body


@pytest.mark.parametrize("kind", ["calls", "open pages"])
def test_answers_that_nobody_reads_hold_no_place_and_their_connections_end(
    short: LiveServer, kind: str
) -> None:
    request = call_with_a_long_answer(900) * 8 if kind == "calls" else head("GET /openapi.json") * 300
    with ExitStack() as stack, short.client() as client:
        for _ in range(PLACES + 1):
            connection = stack.enter_context(connect(short, 2048))
            connection.settimeout(0.05)
            with suppress(TimeoutError):
                connection.sendall(request)
        until(lambda: client.get("/v1/activity").json()["places_taken"] == 0, 10)
        assert client.post("/v1/sequences").status_code == 201
        process = psutil.Process(short.process.pid)
        until(lambda: len(process.net_connections()) <= 3, 15)  # the client's, and the listener


def test_a_trickling_reader_does_not_outlive_the_deadline(short: LiveServer) -> None:
    with connect(short, 2048) as connection:
        connection.sendall(call_with_a_long_answer(7000))
        began = time.monotonic()
        with suppress(ConnectionResetError):
            while connection.recv(4096):
                time.sleep(0.02)
                assert time.monotonic() - began < 20
        assert time.monotonic() - began > DEADLINE / 2


def test_answers_that_wait_take_bounded_memory(short: LiveServer) -> None:
    request = call_with_a_long_answer(7000)  # 7 MB beside a limit of 8: the newest has room, the others go
    with ExitStack() as stack, short.client() as client:
        began = time.monotonic()
        for _ in range(3):
            connection = stack.enter_context(connect(short, 2048))
            connection.sendall(request)
            assert connection.recv(12) == b"HTTP/1.1 200"
        aborted = [event for event in short.events() if event["event"] == "answer makes room"]
        assert len(aborted) >= 2 or time.monotonic() - began > DEADLINE
        assert client.get("/healthz").status_code == 200


def test_a_long_answer_may_be_read_at_leisure_within_the_deadline(short: LiveServer) -> None:
    with connect(short, 65536) as connection:
        connection.sendall(call_with_a_long_answer(7000).replace(b"Host", b"Connection: close\r\nHost", 1))
        first = connection.recv(12)
        time.sleep(0.3)
        answer = first + all_of(connection)
    fields, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in fields
    assert len(body) > 7000 * 1024


# ---- Long calls ----


def test_traces_of_many_requests_are_refused(short: LiveServer) -> None:
    def profile(requests: int) -> httpx.Response:
        case = random_case(((1, 1),) * requests, heads=1)
        with short.client() as client:
            path = "/v1/profile?repeats=1&trace=true&cache=warm"
            return client.post(path, **binary(encode_case(case)))

    assert_problem(profile(513), 422, "invalid-argument", "trace")
    assert profile(10).json()["trace"]["traceEvents"]


def test_runs_of_a_profile_are_announced_with_their_time() -> None:
    announced: list[float] = []
    scorer = CaseScorer(IndexScorer(IndexerConfig(num_index_heads=1, num_pages=1, backend="cpu")))
    case = random_case(((200, 5),), heads=1)
    profile_case(scorer, case, cache="warm", repeats=2, trace=True, before_run=announced.append)
    assert len(announced) == 4
    assert announced[0] == 0
    assert all(seconds > 0 for seconds in announced[1:])


# ---- Bodies ----


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("1.1", ("Content-Length: {more}", "Transfer-Encoding: chunked")),
        ("1.1", ("Transfer-Encoding: chunked", "Content-Length: 0")),
        ("1.1", ("Transfer-Encoding: Chunked", "content-length: {all}")),
        ("1.0", ("Transfer-Encoding: chunked",)),
    ],
)
def test_two_framings_at_once_are_refused(short: LiveServer, version: str, headers: tuple[str, ...]) -> None:
    body = b"".join(encode_keys(normals(2, 128)))
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with short.client() as client:
        sequence = make_sequence(client)
        fields = [header.format(more=len(body) + 512, all=len(body)) for header in headers]
        asked = head(f"POST /v1/sequences/{sequence}/keys", f"Content-Type: {BINARY}", *fields)
        with connect(short) as connection:
            connection.sendall(asked.replace(b"HTTP/1.1", f"HTTP/{version}".encode()) + chunks)
            connection.sendall(head("POST /v1/sequences", "Content-Length: 0"))
            answer = all_of(connection)
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1, "what follows is no second request"
        problem = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert "Transfer-Encoding" in problem["detail"]
        assert client.get(f"/v1/sequences/{sequence}").json()["length"] == 0


def test_announced_bytes_cost_no_memory_and_no_room(short: LiveServer) -> None:
    process = psutil.Process(short.process.pid)
    with ExitStack() as stack, short.client() as client:
        before = process.memory_info().rss
        for length in (60 * MIB, 7 * MIB, 7 * MIB):  # 8 MiB may be in the server at once
            stalled = stack.enter_context(connect(short))
            stalled.sendall(head("POST /v1/score", f"Content-Type: {BINARY}", f"Content-Length: {length}"))
        until(lambda: client.get("/v1/activity").json()["places_taken"] == 3, 10)
        assert process.memory_info().rss - before < 20 * MIB
        reply = client.post("/v1/score", **binary(encode_case(random_case(((300, 40),)))))
        assert reply.status_code == 200
    with short.client() as client:
        until(lambda: "body_bytes 0.0" in client.get("/metrics").text, 10)


def test_a_chunked_body_is_not_refused_for_its_own_bytes(short: LiveServer) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield bytes(MIB)

    with short.client() as client:  # alone it may exceed what all may take together
        kept = {"Content-Type": BINARY}
        assert_problem(client.post("/v1/score", content=chunks(), headers=kept), 422, "invalid-argument")
        assert_problem(client.post("/v1/score", **binary(bytes(20 * MIB))), 422, "invalid-argument")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Content-Encoding", ("identity", "gzip")),
        ("Content-Encoding", ("gzip", "identity")),
        ("Content-Type", (BINARY, "application/json")),
    ],
)
def test_repeated_headers_are_read_together(short: LiveServer, name: str, values: tuple[str, ...]) -> None:
    headers = [("Content-Type", BINARY)] if name != "Content-Type" else []
    headers += [(name, value) for value in values]
    with short.client() as client:
        reply = client.post("/v1/score", content=b"", headers=headers)
        assert_problem(reply, 415, "unsupported-media-type", name)


# ---- Labels, logs ----


def test_invented_methods_are_one_label(short: LiveServer) -> None:
    with short.client() as client:
        for number in range(50):
            for path in ("/healthz", "/v1/sequences/a", f"/nothing{number}"):
                assert client.request(f"M{number}", path).status_code in (404, 405)
        text = client.get("/metrics").text
    assert "M49" not in text
    assert 'method="other",route="/healthz",status="405"' in text


def test_what_clients_send_is_bounded_in_the_log(short: LiveServer) -> None:
    with short.client() as client:
        client.request("M" * 9000, "/" + "p" * 6000, headers={"X-Request-Id": "long-fields"})
    until(lambda: any(event.get("request_id") == "long-fields" for event in short.events()), 10)
    line = next(line for line in short.log_text().splitlines() if "long-fields" in line)
    assert len(line) < 3000


HOSTILE = "/%1b[31mred%0a2026 [info] forged%c2%9b31m%e2%80%ae"


def test_nothing_that_a_client_sends_steers_a_terminal() -> None:
    flags = ("--backend=cpu", "--num-pages=8", "--log-format=console", "--port=0")
    with tempfile.TemporaryFile() as stream, serving(flags, stream.fileno()) as url:
        with httpx.Client(base_url=url) as client:
            assert client.get(HOSTILE).status_code == 404
            assert client.request("A~'^`|", "/healthz").status_code == 405
        time.sleep(0.2)
        stream.seek(0)
        text = stream.read().decode()
    assert "red" in text
    assert all(char.isprintable() or char == "\n" for char in text), text
    assert not [line for line in text.splitlines() if line.startswith("2026 [info] forged")]


def test_a_failure_shows_no_values_of_its_variables() -> None:
    program = (
        "import structlog; from server.logs import configure_logs; configure_logs('info', {form!r})\n"
        "def fail():\n secret = 'what a client ' + 'sent'\n raise ValueError('reason \\x1b[31m')\n"
        "try: fail()\n"
        "except ValueError: structlog.get_logger('server').exception('failed')\n"
    )
    for form in ("json", "console"):
        done = python("-c", program.format(form=form))
        assert "reason" in done.stderr
        assert "fail" in done.stderr
        assert "what a client sent" not in done.stderr
        assert "\x1b" not in done.stderr


@contextmanager
def serving(flags: tuple[str, ...], stderr: int) -> Iterator[str]:
    """A server whose stderr is given; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        url_file = Path(folder) / "url"
        process = ForkedProcess.of_module(
            "server", [*flags, f"--url-file={url_file}"], dict(os.environ), None, stderr
        )
        try:
            until(lambda: url_file.exists() and url_file.read_text().endswith("\n"))
            url = url_file.read_text().strip()
            with httpx.Client(base_url=url) as client:
                until(lambda: client.get("/readyz").status_code == 200)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


@pytest.mark.parametrize(
    "fault",
    ["not read", *(pytest.param(fault, marks=pytest.mark.nightly) for fault in ("reader gone", "full disk"))],
)
def test_a_log_that_cannot_be_written_stops_nothing(fault: str) -> None:
    reader, writer = os.pipe()
    if fault == "full disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    flags = ("--backend=cpu", "--num-pages=8", "--port=0", "--sequence-ttl-seconds=0.5")
    try:
        with serving(flags, writer) as url, httpx.Client(base_url=url, timeout=10) as client:
            if fault == "reader gone":
                os.close(reader)
            if fault == "not read":
                os.set_blocking(writer, False)
                with suppress(BlockingIOError):
                    while True:
                        os.write(writer, b"x" * 4096)
                os.set_blocking(writer, True)
            for _ in range(30):
                assert client.get("/v1/nothing").status_code == 404
            make_sequence(client, normals(5, 128))
            until(lambda: client.get("/v1/cache").json()["total_sequences"] == 0, 10)
            assert client.get("/healthz").status_code == 200
    finally:
        os.close(writer)
        if fault != "reader gone":
            os.close(reader)


def test_a_log_says_how_many_lines_it_dropped() -> None:
    reader, writer = os.pipe()
    stream = LogStream(writer)
    line = "x" * 99 + "\n"
    for _ in range(1000):
        stream.write(line)  # 100 KB into a pipe of 64
    text = b""
    os.set_blocking(reader, False)
    with suppress(BlockingIOError):
        while part := os.read(reader, 65536):
            text += part
    stream.write(line)
    text += os.read(reader, 65536)
    lines = text.decode().splitlines()
    os.close(reader)
    os.close(writer)
    note = next(text for text in lines if text.startswith("{"))
    count = 1000 - lines.index(note)
    assert json.loads(note) == {"count": count, "event": "lines dropped", "level": "warning"}
    assert {text for text in lines if text != note} == {"x" * 99}


def test_a_stream_without_reader_or_room_drops_lines() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor in (writer, full):
        stream = LogStream(descriptor)
        for _ in range(3):
            stream.write("line\n")
        os.close(descriptor)


# ---- Open files ----


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "raised"),
    [
        (1 << 20, 1 << 20, 512, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 512, None),
        (64, resource.RLIM_INFINITY, 512, 1120),
        (1024, 4096, 512, 1120),
        (256, 256, 80, 256),
        (1, 100, 2, 100),
    ],
)
def test_connections_leave_room_among_the_open_files(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, connections: int, raised: int | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    settings, further, backlog = _within_open_files(Settings(backend="cpu"))
    assert settings.max_connections == connections
    assert limits == ([] if raised is None else [(raised, hard)])
    if raised not in (None, 100):
        assert connections + further + backlog + 96 <= raised


def test_a_lack_of_files_is_one_line_not_one_for_each_connection(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            _on_loop_error(loop, {"message": "accept", "exception": OSError(errno.EMFILE, "Too many files")})

    asyncio.run(main())
    assert capsys.readouterr().out.count("no connection can be accepted") <= 1


@pytest.mark.nightly
def test_a_flood_of_connections_leaves_liveness_and_a_short_log() -> None:
    with LiveServer("--backend=cpu", "--num-pages=8", forked=True) as live:
        resource.prlimit(live.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        with ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(connect(live))
            time.sleep(5)
            assert len(live.log_text()) < 20_000
        with live.client() as client:
            until(lambda: client.get("/readyz").status_code == 200, 30)


# ---- Every error is a problem ----


@pytest.mark.parametrize(
    ("query", "name"),
    [
        *(
            (f"topk={value}", "topk")
            for value in ("1_6", "4.0", "%2B4", "%204", "4e0", "04", "", "9" * 4301, "true")
        ),
        *((f"scores={value}", "scores") for value in ("1", "0", "yes", "off", "True", "")),
        ("order=Score", "order"),
    ],
)
def test_options_are_as_strict_as_json(short: LiveServer, query: str, name: str) -> None:
    with short.client() as client:
        reply = client.post(f"/v1/score?{query}", **binary(encode_case(random_case(((5, 1),)))))
        assert_problem(reply, 422, "invalid-argument", name)
        right = client.post(
            "/v1/score?topk=4&scores=false&order=block", **binary(encode_case(random_case(((5, 1),))))
        )
        assert right.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "argument"),
    [
        ("/v1/score", '{"index_q":[],"index_k":[],"topk":70,"topk":1}', "topk"),
        ("/v1/score", '{"index_q":[],"index_k":[],"\\u0074opk":1,"topk":1}', "topk"),
        ("/v1/score", f'{{"index_q":[],"index_k":[],"topk":{"9" * 4300}}}', "topk"),
        ("/v1/score", f'{{"index_q":[[[{"9" * 4300}]]],"index_k":[]}}', "index_q[0, 0, 0]"),
        ("/v1/score", f'{{"index_q":[],"index_k":[],"seq_lens":[{"9" * 4300}]}}', "seq_lens[0]"),
        ("/v1/score", f'{{"index_q":[],"index_k":[],"seq_lens":[{"9" * 4301}]}}', "body"),
        (
            "/v1/sequences/score",
            f'{{"sequences":[],"index_q":[],"query_lens":[{"9" * 4300},{"9" * 4300}]}}',
            "query_lens[0]",
        ),
    ],
)
def test_json_that_says_two_things_or_too_much_names_its_member(
    short: LiveServer, path: str, body: str, argument: str
) -> None:
    with short.client() as client:
        reply = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert_problem(reply, 422, "invalid-argument", argument)


def test_every_path_that_can_be_read_has_a_head(short: LiveServer) -> None:
    with short.client() as client:
        sequence = make_sequence(client)
        for path in ("/", "/healthz", "/v1/info", "/v1/cache", "/openapi.json", f"/v1/sequences/{sequence}"):
            found = client.head(path)
            assert (found.status_code, found.content) == (200, b"")
        assert client.head("/v1/nothing").status_code == 404
        assert client.head("/v1/score").status_code == 405
        assert client.put("/v1/info").headers["allow"] == "GET, HEAD"


def test_targets_in_absolute_form_and_slashes_at_the_end(short: LiveServer) -> None:
    for target, host, status in (
        ("http://127.0.0.1:8421/healthz", "localhost", 200),
        ("HTTP://localhost", "localhost", 200),
        ("http://127.0.0.1/v1/info?", "elsewhere.example", 200),
        ("http://elsewhere.example/v1/info", "localhost", 403),
        ("http:///v1/info", "localhost", 403),
        ("http://localhost@elsewhere.example/v1/info", "localhost", 403),
        ("http://localhost/v1/info/", "localhost", 404),
        ("/v1/info/", "localhost", 404),
        ("//elsewhere.example/v1/info", "localhost", 404),
        ("/v1/sequences/", "localhost", 404),
        ("*", "localhost", 404),
    ):
        with connect(short) as connection:
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = all_of(connection).decode()
        assert answer.startswith(f"HTTP/1.1 {status}"), (target, answer)
        assert "location:" not in answer.lower()
        assert status == 200 or "application/problem+json" in answer


FAILURES = {
    "memory": (MemoryError(), 503, "out-of-memory"),
    "torch": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 503, "out-of-memory"),
    "disk": (OSError(errno.ENOSPC, "No space left on device"), 500, "internal"),
    "folder": (FileNotFoundError("No usable temporary directory found"), 500, "internal"),
    "other": (ZeroDivisionError(), 500, "internal"),
    "body": (MemoryError(), 503, "out-of-memory"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_what_fails_inside_is_a_problem_and_keeps_the_connection(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, status, problem = FAILURES[kind]

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("server.routes.case_of_body" if kind != "body" else "server.routes.read_body", fail)

    async def main() -> None:
        state = new_state(Settings(backend="cpu", num_pages=8))
        state.worker.start()
        state.engine = Engine(state.settings)
        # It would raise here what it raised towards the web server, which then ends the connection.
        transport = httpx.ASGITransport(create_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert_problem(await client.post("/v1/profile", **binary(b"")), status, problem)
        assert await state.worker.stop(5)

    with capture_logs() as logs:
        asyncio.run(main())
    assert [entry["exc_info"] for entry in logs if entry["event"] == "failed"] == [True]


# ---- Peers that end their side ----


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_half_closed_connection_gets_its_answers(short: LiveServer, version: str) -> None:
    body = encode_case(random_case(((300, 200),)))
    call = head("POST /v1/score", f"Content-Type: {BINARY}", f"Content-Length: {len(body)}") + body
    requests = [call] if version == "1.0" else [call, head("GET /healthz"), call[:-5]]
    with connect(short) as connection:
        connection.sendall(b"".join(requests).replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        connection.shutdown(socket.SHUT_WR)
        answer = all_of(connection)
    finals = [part for part in answer.split(b"HTTP/1.1 ")[1:] if not part.startswith(b"100")]
    assert [part[:3] for part in finals] == [b"200", b"200"][: len(requests)]
    assert version == "1.1" or b"100 Continue" not in answer
    with short.client() as client:
        until(lambda: client.get("/v1/activity").json()["places_taken"] == 0, 10)


# ---- Several tokens ----

TOKENS = ("alice-0123456789", "bob-9876543210")


def test_one_tokens_slow_bodies_leave_places_and_sequences_to_another() -> None:
    environment = {"NVFP4_INDEXER_TOKENS": ",".join(TOKENS)}
    flags = ("--backend=cpu", "--num-pages=8", "--queue-places=8", "--deadline-seconds=3")
    with (
        LiveServer(*flags, "--sequence-ttl-seconds=1", environment=environment, forked=True) as live,
        live.client(TOKENS[0]) as alice,
        live.client(TOKENS[1]) as bob,
        ExitStack() as stack,
    ):
        sequence = make_sequence(bob, normals(5, 128))
        keys = b"".join(encode_keys(normals(3, 128)))
        for token, path, body in (
            *((TOKENS[0], "/v1/score", b"slow") for _ in range(5)),
            (TOKENS[1], f"/v1/sequences/{sequence}/keys", keys[:-1]),
        ):
            slow = stack.enter_context(connect(live))
            length = len(keys) if token == TOKENS[1] else 1000
            slow.sendall(
                head(
                    f"POST {path}",
                    f"Content-Type: {BINARY}",
                    f"Content-Length: {length}",
                    f"Authorization: Bearer {token}",
                )
                + body
            )
        until(lambda: bob.get("/v1/activity").json()["places_taken"] == 5, 10)
        assert_problem(alice.post("/v1/sequences"), 429, "busy", "queue_places")
        reply = bob.post("/v1/score", **binary(encode_case(random_case(((5, 1),)))))
        assert reply.status_code == 200
        time.sleep(1.7)
        slow.sendall(keys[-1:])
        answer = slow.recv(12)
        assert answer == b"HTTP/1.1 200", "a call whose body was on its way kept its sequence"
