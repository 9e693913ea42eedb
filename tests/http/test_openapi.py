"""The OpenAPI document, and random requests made from it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import httpx
import numpy as np
import pytest

from indexer import IndexerConfig, IndexScorer, OutOfPagesError
from indexer.case import encode_case
from indexer.replay import as_tensor
from indexer.wire import decode_reply, encode_keys
from server.routes import _PAGE
from tests.http.conftest import NUM_PAGES
from tests.support.http import binary, make_sequence, normals, random_case, sequences_body
from tests.support.live_server import LiveServer

ROUTES = {
    ("/healthz", "get"),
    ("/readyz", "get"),
    ("/v1/info", "get"),
    ("/v1/score", "post"),
    ("/v1/sequences", "post"),
    ("/v1/sequences/score", "post"),
    ("/v1/sequences/{id}", "get"),
    ("/v1/sequences/{id}", "delete"),
    ("/v1/sequences/{id}/keys", "post"),
    ("/v1/sequences/{id}/fork", "post"),
    ("/v1/cache", "get"),
    ("/v1/activity", "get"),
    ("/v1/profile", "post"),
    ("/metrics", "get"),
    ("/", "get"),
}


def test_every_route_and_error_is_documented(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    operations = {(path, verb): op for path, verbs in document["paths"].items() for verb, op in verbs.items()}
    assert set(operations) == ROUTES
    for (path, verb), operation in operations.items():
        assert operation["summary"]
        assert operation["description"]
        for status, reply in operation["responses"].items():
            if int(status) >= 400:
                assert list(reply["content"]) == ["application/problem+json"], (path, verb, status)
    for path in ("/v1/score", "/v1/sequences/score", "/v1/sequences/{id}/keys", "/v1/profile"):
        operation = operations[path, "post"]
        assert {"413", "415", "422", "429", "503", "504"} <= set(operation["responses"])
        content = operation["requestBody"]["content"]
        assert content["application/octet-stream"]["schema"] == {"type": "string", "format": "binary"}
        assert content["application/json"]["examples"]
    assert {"404", "409"} <= set(operations["/v1/sequences/{id}/keys", "post"]["responses"])


def test_the_examples_are_accepted(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for path in ("/v1/score", "/v1/profile?repeats=1"):
        content = document["paths"][path.partition("?")[0]]["post"]["requestBody"]["content"]
        example = content["application/json"]["examples"]["small"]["value"]
        reply = client.post(path, json=example)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("examples", [3, pytest.param(12, marks=pytest.mark.nightly)])
def test_schemathesis_finds_nothing(server: LiveServer, tmp_path: Path, examples: int) -> None:
    command = Path(sysconfig.get_path("scripts")) / "schemathesis"
    assert command.exists(), "the test extra installs schemathesis"
    (tmp_path / "schemathesis.toml").write_text("", encoding="utf-8")
    done = subprocess.run(
        [
            str(command),
            "run",
            f"{server.url}/openapi.json",
            "--checks=not_a_server_error,status_code_conformance,content_type_conformance,"
            "response_headers_conformance,response_schema_conformance,negative_data_rejection,unsupported_method",
            f"--max-examples={examples}",
            "--request-timeout=120",
            "--phases=examples,coverage,fuzzing",
            "--seed=7",
            "--generation-database=none",
            "--no-color",
        ],
        cwd=tmp_path,
        env={**os.environ, "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert server.process.poll() is None


# ---- The page in a real browser ----

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def _chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium on this machine: `apt-get install chromium` has this test run")
    return found


def _dom(url: str, profile: Path) -> str:
    done = subprocess.run(
        [
            _chromium(),
            *FLAGS,
            f"--user-data-dir={profile}",
            "--window-size=1200,1200",
            "--virtual-time-budget=6000",
            "--dump-dom",
            url,
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    return done.stdout


def test_the_page_asks_nobody_else() -> None:
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", _PAGE)
    assert "@import" not in _PAGE
    assert not re.search(r"url\(", _PAGE)


def test_the_page_forbids_what_it_does_not_need(client: httpx.Client) -> None:
    reply = client.get("/")
    assert reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


def test_the_map_of_the_last_call_is_drawn(server: LiveServer, client: httpx.Client, tmp_path: Path) -> None:
    sequence = make_sequence(client, normals(300, 128))
    case = random_case(((2000, 40),), 4, topk=5)
    assert client.post("/v1/score?local_blocks=1", **binary(encode_case(case))).status_code == 200
    dom = _dom(f"{server.url}/", tmp_path / "profile")
    canvases = re.findall(r"<canvas [^>]*>", dom)
    assert len(canvases) == 4, "one map for each head"
    for head, canvas in enumerate(canvases):
        shown = dict(re.findall(r'data-(\w+)="(\d+)"', canvas))
        assert shown["rows"] == "40"
        assert shown["columns"] == "16"
        assert shown["picked"] == str(5 * 40), "every selected block of every row is marked"
        assert int(shown["colours"]) > 50
        assert f"Scores of head {head}: 40 tokens by 16 blocks" in canvas
    for text in (
        "ready",
        "cpu",
        "3 of 64 pages",
        "/v1/score",
        "40 query tokens, the first at the top",
        "blocks of 128 tokens",
        "4 heads, 40 queries, top 5",
        "insert",
        "topk",
    ):
        assert text in dom, text
    client.delete(f"/v1/sequences/{sequence}")


def test_a_call_without_scores_shows_its_selection(
    server: LiveServer, client: httpx.Client, tmp_path: Path
) -> None:
    case = random_case(((700, 9),), 1, topk=2)
    assert client.post("/v1/score?scores=false", **binary(encode_case(case))).status_code == 200
    canvases = re.findall(r"<canvas [^>]*>", _dom(f"{server.url}/", tmp_path / "profile"))
    assert len(canvases) == 1
    assert 'data-picked="18"' in canvases[0]


# ---- A random mix of calls leaves the same state, bit for bit, as in an in-process scorer ----

HEADS = 4


class Mirror:
    """The same sequences here and there."""

    def __init__(self, client: httpx.Client, seed: int) -> None:
        self.client = client
        self.random = np.random.default_rng(seed)
        self.scorer = IndexScorer(IndexerConfig(num_index_heads=HEADS, num_pages=NUM_PAGES, backend="cpu"))
        self.pairs: list[tuple[int, str]] = []

    def step(self) -> str:
        """One random call on both sides."""
        choice = str(self.random.choice(["add", "append", "append", "fork", "score", "score", "free"]))
        if not self.pairs:
            choice = "add"
        getattr(self, f"_{choice}")()
        used = NUM_PAGES - self.scorer.num_free_pages
        cache = self.client.get("/v1/cache").json()
        assert cache["used_pages"] == used
        lengths = {sequence["id"]: sequence["length"] for sequence in cache["sequences"]}
        assert lengths == {there: self.scorer.sequence_length(here) for here, there in self.pairs}
        return choice

    def _pick(self) -> int:
        return int(self.random.integers(len(self.pairs)))

    def _add(self) -> None:
        if len(self.pairs) < 8:
            self.pairs.append((self.scorer.add_sequence(), make_sequence(self.client)))

    def _append(self) -> None:
        here, there = self.pairs[self._pick()]
        tokens = int(self.random.choice([0, 1, 5, 127, 128, 300, 2500]))
        keys = self.random.standard_normal((tokens, 128)).astype(str(self.random.choice(["f4", "f2"])))
        if tokens and self.random.random() < 0.15:
            keys[-1, 3] = np.nan
        reply = self.client.post(f"/v1/sequences/{there}/keys", **binary(encode_keys(keys)))
        failed: Exception | None = None
        try:
            self.scorer.append_keys(here, as_tensor(keys))
        except (OutOfPagesError, ValueError) as error:
            failed = error
        if failed is None:
            assert reply.json()["length"] == self.scorer.sequence_length(here)
        elif isinstance(failed, OutOfPagesError):
            assert reply.status_code == 409
            assert reply.json()["missing_pages"] == failed.missing
        else:
            assert reply.status_code == 422

    def _fork(self) -> None:
        if len(self.pairs) < 8:
            here, there = self.pairs[self._pick()]
            fork = self.client.post(f"/v1/sequences/{there}/fork").json()["id"]
            self.pairs.append((self.scorer.fork_sequence(here), fork))

    def _free(self) -> None:
        here, there = self.pairs.pop(self._pick())
        self.scorer.free_sequence(here)
        assert self.client.delete(f"/v1/sequences/{there}").status_code == 204

    def _score(self) -> None:
        picked = [self.pairs[self._pick()] for _ in range(int(self.random.integers(1, 4)))]
        lens = [min(int(self.random.integers(0, 40)), self.scorer.sequence_length(h)) for h, _ in picked]
        query = self.random.standard_normal((sum(lens), HEADS, 128), dtype=np.float32)
        topk, local = int(self.random.integers(1, 20)), int(self.random.integers(0, 3))
        want = self.scorer.score(
            as_tensor(query), [here for here, _ in picked], lens, topk=topk, local_blocks=local
        )
        reply = self.client.post(
            f"/v1/sequences/score?topk={topk}&local_blocks={local}",
            **sequences_body(query, [there for _, there in picked], lens),
        )
        assert reply.status_code == 200, reply.text
        found = decode_reply(reply.content)
        assert want.scores is not None
        assert found.scores is not None
        assert found.scores.tobytes() == want.scores.numpy().tobytes()
        assert found.block_ids.tobytes() == want.block_ids.numpy().tobytes()

    def clear(self) -> None:
        """Drop everything."""
        while self.pairs:
            self._free()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_random_mix_of_calls(client: httpx.Client, seed: int) -> None:
    mirror = Mirror(client, seed)
    taken = [mirror.step() for _ in range(60)]
    mirror.clear()
    assert {"append", "fork", "score", "free"} <= set(taken)
    assert client.get("/v1/cache").json()["used_pages"] == 0
