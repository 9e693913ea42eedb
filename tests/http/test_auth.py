"""Tokens, other sites, and which addresses may be bound."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from indexer.case import encode_case
from server.settings import Settings
from tests.support.http_calls import (
    assert_problem,
    binary,
    make_sequence,
    normals,
    random_case,
    sequences_body,
)
from tests.support.live_server import LiveServer
from tests.support.real_cases import ROOT

ALICE, BOB = "alice-0123456789", "bob-9876543210"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with one token from the environment and one from a file."""
    path: Path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(f"{BOB}\n", encoding="utf-8")
    environment = {"NVFP4_INDEXER_TOKENS": ALICE, "NVFP4_INDEXER_NUM_PAGES": "16"}
    with LiveServer("--backend=cpu", "--token-file", str(path), environment=environment) as live:
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


def _refused(*flags: str, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NVFP4_INDEXER_")}
    done = subprocess.run(
        [sys.executable, "-m", "server", "--port", "0", *flags],
        env={**inherited, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_settings_that_cannot_be_used_are_named() -> None:
    assert "--insecure" in _refused("--host=0.0.0.0")
    assert "tokens" in _refused("--host=0.0.0.0", NVFP4_INDEXER_TOKENS="short")
    assert "queue_places" in _refused("--queue-places=0")
    assert "rank_seconds" in _refused("--rank-seconds=86400")


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
        assert Settings(host=host).is_loopback
    with pytest.raises(ValidationError, match="num_index_heads"):
        Settings(num_index_heads=3)
    with pytest.raises(ValidationError, match="no such backend"):
        Settings(backend="none")
