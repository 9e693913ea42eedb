"""Tokens, other sites, and which addresses may be bound."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import ValidationError

from indexer.case import encode_case
from server.http import Access
from server.problems import ProblemError
from server.serve import main
from server.settings import Settings, is_loopback
from tests.support.http import assert_problem, binary, make_sequence, normals, random_case, sequences_body
from tests.support.live_server import LiveServer, until

ALICE, BOB = "alice-0123456789", "bob-9876543210"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with one token from the environment and one from a file."""
    path: Path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(f"{BOB}\n", encoding="utf-8")
    environment = {"NVFP4_INDEXER_TOKENS": ALICE, "NVFP4_INDEXER_NUM_PAGES": "16"}
    with LiveServer("--backend=cpu", "--token-file", str(path), environment=environment, forked=True) as live:
        yield live


def test_a_token_is_needed(guarded: LiveServer) -> None:
    with guarded.client() as client:
        for path in ("/v1/info", "/v1/cache", "/v1/activity", "/metrics", "/v1/nothing"):
            reply = client.get(path)
            assert_problem(reply, 401, "unauthorized", "Authorization")
            assert reply.headers["www-authenticate"] == "Bearer"
        for path in ("/", "/healthz", "/readyz", "/openapi.json"):
            assert client.get(path).status_code == 200
        for value in (ALICE, f"Basic {ALICE}", f"Bearer {ALICE}x", "Bearer", f"Bearer {ALICE[:-1]}"):
            reply = client.post("/v1/sequences", headers={"Authorization": value})
            assert_problem(reply, 401, "unauthorized")
        assert client.post("/v1/sequences", headers={"Authorization": f"bearer {ALICE}"}).status_code == 201


def test_sequences_and_calls_of_another_token_are_invisible(guarded: LiveServer) -> None:
    with guarded.client(ALICE) as alice, guarded.client(BOB) as bob:
        sequence = make_sequence(alice, normals(300, 128))
        assert_problem(bob.get(f"/v1/sequences/{sequence}"), 404, "unknown-sequence")
        assert_problem(bob.delete(f"/v1/sequences/{sequence}"), 404, "unknown-sequence")
        assert_problem(bob.post(f"/v1/sequences/{sequence}/fork"), 404, "unknown-sequence")
        keys = random_case(((1, 1),)).index_k
        assert keys is not None
        reply = bob.post("/v1/sequences/score", **sequences_body(normals(1, 4, 128), [sequence]))
        assert_problem(reply, 404, "unknown-sequence", "id")
        assert bob.get("/v1/cache").json()["sequences"] == []
        assert bob.get("/v1/cache").json()["used_pages"] == 3
        alice.post("/v1/score", **binary(encode_case(random_case(((200, 3),)))))
        assert alice.get("/v1/activity").json()["last_call"]["tokens"] == [0, 1, 2]
        assert bob.get("/v1/activity").json()["last_call"] is None
        assert alice.get(f"/v1/sequences/{sequence}").json()["length"] == 300
        assert alice.delete(f"/v1/sequences/{sequence}").status_code == 204


def test_tokens_are_nowhere_in_the_log(guarded: LiveServer) -> None:
    with guarded.client(ALICE) as client:
        client.get("/v1/info")
    log = guarded.log_text()
    assert ALICE not in log
    assert BOB not in log


def test_other_sites_and_other_names_are_refused_without_a_token(client: httpx.Client) -> None:
    reply = client.post("/v1/sequences", headers={"Sec-Fetch-Site": "cross-site"})
    assert_problem(reply, 403, "forbidden-origin")
    for host in ("rebound.example:8421", "127.0.0.1.rebound.example", "192.0.2.1", "[::2]:80", "[", ""):
        reply = client.get("/v1/info", headers={"Host": host})
        assert_problem(reply, 403, "forbidden-origin", "Host")
    own = str(client.base_url).rstrip("/")
    for origin in (
        "https://example.org",
        "null",
        "",
        "http://localhost:3000",
        own.replace("127.0.0.1", "localhost"),
    ):
        for method, path in (
            ("POST", "/v1/sequences"),
            ("POST", "/v1/score"),
            ("DELETE", "/v1/sequences/aa"),
        ):
            reply = client.request(method, path, headers={"Origin": origin})
            assert_problem(reply, 403, "forbidden-origin")
    assert client.get("/", headers={"Origin": "https://example.org"}).status_code == 200
    reply = client.post("/v1/sequences", headers={"Origin": own})
    assert reply.status_code == 201, "the server's own page"
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:80", "127.8.8.8:80"):
        assert client.get("/v1/info", headers={"Host": host}).status_code == 200
    assert client.get("/v1/info", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_settings_that_cannot_be_used_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("NVFP4_INDEXER_")]:
        monkeypatch.delenv(name)
    refused = (
        ("--host=0.0.0.0", "--insecure"),
        ("--queue-places=0", "queue_places"),
        ("--rank-seconds=86400", "rank_seconds"),
    )
    for flag, named in refused:
        assert main(["--port", "0", flag]) == 2
        assert named in capsys.readouterr().err
    monkeypatch.setenv("NVFP4_INDEXER_TOKENS", "short")
    assert main(["--port", "0", "--host=0.0.0.0"]) == 2
    assert "tokens" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["inf", "nan", "-inf", "0", "86401", "1e300"])
@pytest.mark.parametrize(
    "name", ["deadline_seconds", "rank_seconds", "sequence_ttl_seconds", "drain_seconds"]
)
def test_times_are_finite(name: str, value: str) -> None:
    if (name, value) in (("sequence_ttl_seconds", "86401"), ("drain_seconds", "0")):
        return  # these two may
    with pytest.raises(ValidationError, match=name):
        Settings(**{name: value})  # type: ignore[arg-type]


def test_no_address_but_loopback_without_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):  # noqa: S104
        with pytest.raises(ValidationError, match="--insecure"):
            Settings(host=host)
        assert Settings(host=host, insecure=True).host == host
        assert Settings(host=host, tokens=(ALICE,)).host == host  # type: ignore[arg-type]
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert is_loopback(Settings(host=host).host)
    with pytest.raises(ValidationError, match="num_index_heads"):
        Settings(num_index_heads=3)
    with pytest.raises(ValidationError, match="no such backend"):
        Settings(backend="none")


# ---- The token file ----


def test_a_token_file_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("NVFP4_INDEXER_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "tokens"
    for content in (
        b"",
        b"\n \n",
        b"two words-of-a-line\n",
        b"\xff\xfe\n",
        ALICE.encode() + b"\0\0",
        b"cut\n",
    ):
        path.write_bytes(content)
        path.chmod(0o600)
        assert main(["--port", "0", f"--token-file={path}"]) == 2
        assert "token" in capsys.readouterr().err
        with pytest.raises(ValidationError):
            Settings(token_file=path, tokens=(BOB,))  # type: ignore[arg-type]
    reader, writer = os.pipe()
    os.write(writer, ALICE.encode())
    os.mkfifo(tmp_path / "fifo")
    for other in (
        f"/dev/fd/{reader}",
        str(tmp_path / "fifo"),
        "/dev/null",
        str(tmp_path),
        str(tmp_path / "none"),
    ):
        assert main(["--port", "0", f"--token-file={other}"]) == 2
        assert other in capsys.readouterr().err
    os.close(reader)
    os.close(writer)


def test_the_token_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f" {ALICE} \r\n\n{BOB}", encoding="utf-8")
    settings = Settings(token_file=path)
    path.write_text("", encoding="utf-8")
    assert settings.all_tokens() == (ALICE, BOB)
    assert Access(settings).owner(
        {"path": "/v1/info", "headers": [(b"authorization", f"Bearer {BOB}".encode())]}
    )
    with pytest.raises(ProblemError, match="no valid token"):
        Access(settings).owner({"path": "/v1/info", "headers": []})


def test_a_token_is_revoked_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{ALICE}\n{BOB}\n", encoding="utf-8")
    path.chmod(0o644)
    flags = ("--backend=cpu", "--num-pages=8", f"--token-file={path}")
    with LiveServer(*flags, forked=True) as live, live.client(ALICE) as alice, live.client(BOB) as bob:
        assert [event["file"] for event in live.events() if event["level"] == "warning"] == [str(path)]
        make_sequence(bob, normals(5, 128))
        path.chmod(0o600)

        def hang_up(content: str, event: str) -> None:
            seen = len(live.events())
            path.write_text(content, encoding="utf-8")
            live.process.send_signal(signal.SIGHUP)
            until(lambda: any(found["event"] == event for found in live.events()[seen:]), 10)

        hang_up("", "tokens not reread")
        assert bob.get("/v1/cache").status_code == 200, "the old tokens stay"
        hang_up(f"{ALICE}\n", "tokens reread")
        assert_problem(bob.get("/v1/cache"), 401, "unauthorized")
        until(lambda: alice.get("/v1/cache").json()["used_pages"] == 0, 10)
        hang_up(f"{ALICE}\n{BOB}\n", "tokens reread")
        assert bob.get("/v1/cache").json()["sequences"] == []
        assert len([event for event in live.events() if event["level"] == "warning"]) == 1


# ---- Connection limit, header timeout, and bytes that are not HTTP ----

LIMIT = 5


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """A server with five connections."""
    with LiveServer("--backend=cpu", "--num-pages=8", f"--max-connections={LIMIT}", forked=True) as live:
        yield live


def connect(server: LiveServer) -> socket.socket:
    """A connection."""
    parts = urlsplit(server.url)
    return socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=30)


def all_of(connection: socket.socket) -> bytes:
    """What arrives until the server closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def is_ready(connection: socket.socket) -> bool:
    """Whether a connection that is kept is answered so."""
    connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(65536)
    return answer.startswith(b"HTTP/1.1 200")


def problem_of(answer: bytes) -> tuple[str, dict[str, object]]:
    """The head and the problem of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head.lower()
    problem: dict[str, object] = json.loads(body)
    assert str(problem["request_id"]).encode() in head
    return head.decode().lower(), problem


def test_a_connection_beyond_the_limit_is_refused_and_closed(small: LiveServer) -> None:
    with ExitStack() as stack:
        kept = [stack.enter_context(connect(small)) for _ in range(LIMIT)]
        for connection in kept:
            assert is_ready(connection)
        with connect(small) as further:
            further.sendall(b"POST /v1/sequences HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
            head, problem = problem_of(all_of(further))
            assert head.startswith("http/1.1 503")
            assert "retry-after: 1" in head
            assert "connection: close" in head
            assert problem["type"] == "urn:nvfp4-indexer:problem:crowded"
            assert problem["argument"] == "max_connections"
            assert (problem["value"], problem["limit"]) == (LIMIT + 1, LIMIT)
        with connect(small) as probe:
            probe.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = all_of(probe)
            assert answer.startswith(b"HTTP/1.1 200"), "it lives, and the connection is closed all the same"
        with connect(small) as silent:
            began = time.monotonic()
            assert all_of(silent) == b""
            assert time.monotonic() - began < 15, "one that is refused anyway need not be waited for"
        for connection in kept:
            assert is_ready(connection)
    with small.client() as client:
        end = time.monotonic() + 30
        while client.get("/v1/cache").status_code != 200:
            assert time.monotonic() < end
        assert client.get("/v1/cache").json()["total_sequences"] == 0
        assert 'status="503"' in client.get("/metrics").text


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS greeting \r\n\r\n",
    ],
    ids=["line", "no host", "length", "lengths", "long head", "tls"],
)
def test_what_is_not_http_is_a_problem(small: LiveServer, sent: bytes) -> None:
    with connect(small) as connection:
        connection.sendall(sent)
        head, problem = problem_of(all_of(connection))
    assert head.startswith("http/1.1 400")
    assert problem["type"] == "urn:nvfp4-indexer:problem:malformed"
    assert problem["status"] == 400


def test_a_body_that_is_not_http_is_a_problem_and_frees_its_place(small: LiveServer) -> None:
    with connect(small) as connection:
        head = "POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\nno chunk\r\n".encode())
        answered, _ = problem_of(all_of(connection))
    assert answered.startswith("http/1.1 400")
    with small.client() as client:
        end = time.monotonic() + 30
        while client.get("/v1/activity").json()["places_taken"]:
            assert time.monotonic() < end
    assert not [event for event in small.events() if event.get("level") == "error"]


@pytest.fixture(scope="module")
def hasty() -> Iterator[LiveServer]:
    """A server with a token that waits a second for what a connection owes."""
    tokens = {"NVFP4_INDEXER_TOKENS": "token-of-this-test"}
    flags = ("--backend=cpu", "--num-pages=8", "--deadline-seconds=1", "--max-json-bytes=100")
    with LiveServer(*flags, environment=tokens, forked=True) as live:
        yield live


OWING = {
    "401": ("POST /v1/score", "Content-Length: 1000", b"401"),
    "413": ("POST /v1/score", "Authorization: Bearer token-of-this-test\r\nContent-Length: 1000", b"413"),
    "200": ("GET /healthz", "Content-Length: 1000", b"200"),
    "chunked": ("GET /healthz", "Transfer-Encoding: chunked", b"200"),
}
"""Requests that are answered before their body is complete: method and path, headers, status."""


def owing(server: LiveServer, kind: str) -> socket.socket:
    """A connection whose request was answered before its body came."""
    line, headers, status = OWING[kind]
    connection = connect(server)
    connection.sendall(
        f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}\r\n\r\n".encode()
    )
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(65536)
    assert answer[9:12] == status
    return connection


@pytest.mark.parametrize("kind", OWING)
def test_the_rest_of_a_body_that_was_answered_early_must_come_in_time(hasty: LiveServer, kind: str) -> None:
    with owing(hasty, kind) as connection:
        connection.settimeout(0.2)
        began = time.monotonic()
        part = b"5\r\nbytes\r\n" if kind == "chunked" else b"x"
        while True:  # however the bytes trickle in
            assert time.monotonic() - began < 15
            try:
                connection.sendall(part)
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() - began > 0.5


def test_one_byte_of_the_rest_does_not_keep_the_place(hasty: LiveServer) -> None:
    with owing(hasty, "401") as connection:
        connection.sendall(b"x")
        connection.settimeout(15)
        assert all_of(connection) == b""


def test_a_connection_whose_rest_comes_in_time_is_kept(hasty: LiveServer) -> None:
    with owing(hasty, "401") as connection:
        connection.sendall(b"x" * 400)
        time.sleep(0.1)
        connection.sendall(b"x" * 600)
        for _ in range(2):
            assert is_ready(connection)
