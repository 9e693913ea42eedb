"""The page in a real browser: everything on it, and the score map with its selection."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from indexer.case import encode_case
from server.routes import _HTML
from tests.support.http_calls import binary, make_sequence, normals, random_case
from tests.support.live_server import LiveServer

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
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", _HTML)
    assert "@import" not in _HTML
    assert not re.search(r"url\(", _HTML)


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
