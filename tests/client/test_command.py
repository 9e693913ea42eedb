"""The command's remote half: the same results, exit codes and one-line errors as without --url."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from client.client import Client
from client.commands.bench import run_load
from indexer.case import write_case
from tests.client.conftest import TOKEN
from tests.support.command import VERIFY_KEYS, call, spawn, wrong_expectation
from tests.support.live_server import LiveServer
from tests.support.raw_case import small_case
from tests.support.real_cases import CODE, CUT


@pytest.fixture
def remote(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Options that name the live server; the token is in the environment."""
    monkeypatch.setenv("NVFP4_INDEXER_TOKEN", TOKEN)
    return "--url", server.url


def test_score_writes_what_this_machine_would(remote: tuple[str, str], tmp_path: Path) -> None:
    there, here = tmp_path / "there.safetensors", tmp_path / "here.safetensors"
    options = ("--topk", "2", "--init-blocks", "1", "--order", "block")
    result = call("score", CUT, "--out", there, *options, *remote, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["backend"] == "cpu"
    assert call("score", CUT, "--out", here, *options, "--backend", "cpu").exit_code == 0
    got, want = load_file(there), load_file(here)
    assert sorted(got) == sorted(want)
    for name in want:
        assert got[name].tobytes() == want[name].tobytes()


def test_verify_judges_the_sidecar_by_the_oracle_here(remote: tuple[str, str]) -> None:
    result = call("verify", CODE, CUT, *remote, "--json")
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [list(line) for line in lines] == [VERIFY_KEYS] * 2
    assert [line["rows"] for line in lines] == [512, 108]
    assert all(line["ok"] and line["backend"] == "cpu" for line in lines)


def test_verify_goes_on_after_a_case_that_the_sidecar_refuses(
    remote: tuple[str, str], tmp_path: Path
) -> None:
    case = small_case()
    assert case.index_k is not None
    case.index_k[3, 5] = np.nan
    path = tmp_path / "nan.safetensors"
    write_case(case, path)
    result = call("verify", path, wrong_expectation(tmp_path), CUT, *remote, "--json")
    assert result.exit_code == 2
    assert [json.loads(line)["ok"] for line in result.stdout.splitlines()] == [False, True]
    error = json.loads(result.stderr)
    assert (error["error"], error["argument"]) == ("InvalidArgumentError", "index_k[3, 5]")
    assert error["case"] == str(path)
    assert call("verify", wrong_expectation(tmp_path), *remote).exit_code == 1


def test_verify_leaves_rows_out_that_a_sidecar_would_refuse(remote: tuple[str, str], tmp_path: Path) -> None:
    case = small_case()
    case.index_q[1, 0, 3] = np.inf
    path = tmp_path / "inf.safetensors"
    write_case(case, path)
    result = call("verify", path, *remote, "--json")
    assert result.exit_code == 1
    line = json.loads(result.stdout)
    assert (line["unjudged_rows"], line["rows"], line["topk_mismatches"]) == (1, case.rows - 1, 0)
    assert [(row["token"], row["head"], row["value"]) for row in line["not_finite"]] == [(1, 0, "inf")]


@pytest.mark.parametrize("fault", ["scores", "block_ids", "num_blocks", "width", "precision"])
def test_verify_finds_every_fault_of_a_sidecar(
    fault: str, remote: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Client.score_case

    def faulty(client: Client, *arguments: Any, **options: Any) -> Any:
        reply = honest(client, *arguments, **options)
        assert reply.scores is not None
        if fault == "scores":
            reply.scores[1, 2, 0] += 1e-3 * abs(reply.scores[1, 2, 0])
        elif fault == "block_ids":
            reply.block_ids[0, 5] = reply.block_ids[0, 5, ::-1]
        elif fault == "num_blocks":
            reply.num_blocks[3] += 1
        elif fault == "width":
            return dataclasses.replace(reply, scores=reply.scores[:, :, :1])
        else:
            return dataclasses.replace(reply, precision="lax")
        return reply

    monkeypatch.setattr(Client, "score_case", faulty)
    result = call("verify", CUT, *remote)
    assert result.exit_code == (2 if fault == "precision" else 1), result.stdout + result.stderr


def test_profile_here_and_there(remote: tuple[str, str], tmp_path: Path) -> None:
    trace = tmp_path / "new" / "trace.json"
    fields = []
    for where in (remote, ("--backend", "cpu")):
        result = call("profile", CUT, "--repeats", "2", "--scores", "--trace", trace, *where, "--json")
        assert result.exit_code == 0, result.stderr
        fields.append(json.loads(result.stdout))
        assert fields[-1]["trace"] == str(trace)
        assert json.loads(trace.read_text())["traceEvents"]
    there, here = fields
    assert list(there) == list(here)
    for name in ("backend", "repeats", "cache", "total_q", "flop", "bytes"):
        assert there[name] == here[name]
    assert [stage["stage"] for stage in there["stages"]] == [stage["stage"] for stage in here["stages"]]
    people = call("profile", CUT, "--repeats", "1", "--cache", "warm", *remote)
    assert people.exit_code == 0
    for word in ("select", "TFLOP/s", "TB/s", "floor"):
        assert word in people.stdout


def test_bench_here_and_there(remote: tuple[str, str]) -> None:
    for where in ((*remote, "--clients", "3"), ("--backend", "cpu")):
        result = call("bench", CUT, "--seconds", "0.3", *where, "--json")
        assert result.exit_code == 0, result.stderr
        fields = json.loads(result.stdout)
        assert fields["calls"] > 0
        assert fields["errors"] == 0
        assert 0 < fields["p50_ms"] <= fields["p90_ms"] <= fields["p99_ms"]
        assert fields["calls_per_second"] == pytest.approx(fields["calls"] / fields["seconds"])
        assert fields["rows_per_second"] == pytest.approx(fields["calls_per_second"] * 108)
    assert "calls/s" in call("bench", CUT, "--seconds", "0.1", *remote).stdout
    assert call("bench", CUT, "--clients", "2").exit_code == 2


def test_a_load_counts_failures_and_ends() -> None:
    turns = iter(range(10**6))

    def score() -> None:
        if next(turns) % 2:
            raise ValueError("odd")

    load = run_load(score, 1, 60.0)
    assert (load.calls, load.errors, load.first_error) == (10, 10, "odd")
    assert load.seconds < 5
    none = run_load(lambda: None, 2, 0.0)
    assert (none.calls, none.errors, none.p99_ms) == (0, 0, 0.0)


@pytest.mark.parametrize("words", [["score", CUT], ["verify", CUT], ["profile", CUT], ["bench", CUT]])
def test_remote_faults_are_one_line_and_2(
    words: list[str], server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVFP4_INDEXER_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    faults = (
        (["--url", server.url], "token"),
        (["--url", server.url, "--token", "token-of-nobody"], "token"),
        (["--url", "localhost"], "url = localhost"),
        (["--url", f"http://127.0.0.1:{port}"], "cannot be reached"),
        (["--url", server.url, "--backend", "cpu"], "--backend = cpu"),
        (["--url", server.url, "--precision", "fast"], "--precision = fast"),
    )
    for options, expected in faults:
        result = call(*words, *options)
        assert result.exit_code == 2, (options, result.stdout)
        (line,) = result.stderr.splitlines()
        assert expected in line
    error = json.loads(call(*words, "--url", server.url, "--json").stderr)
    assert (error["error"], error["status"], error["kind"]) == ("AuthError", "401", "unauthorized")


def test_serve_takes_the_servers_settings() -> None:
    done = spawn("serve", "--help")
    assert done.returncode == 0
    for word in ("nvfp4-indexer serve", "--num-pages", "--token-file", "--insecure", "NVFP4_INDEXER_"):
        assert word in done.stdout
    refused = spawn("serve", "--host", "0.0.0.0")  # noqa: S104 - it must not be served
    assert refused.returncode == 2
    assert "token" in refused.stderr
    assert spawn("serve", "--num-pages", "many").returncode == 2


def test_serve_serves() -> None:
    server = LiveServer("--backend=cpu", "--num-pages=8", module="client.cli serve")
    with Client(server.url) as client:
        assert client.info().num_pages == 8
    assert server.stop() == 0
