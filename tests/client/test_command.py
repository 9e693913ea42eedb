"""The command as scripts and people use it: output, exit codes, JSON, errors of one line."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import indexer.replay
from client.client import Client
from client.commands.bench import run_load
from indexer.case import encode_case, read_case, write_case
from kernel.backends.cpu.backend import agreeing_shapes
from tests.client.conftest import TOKEN
from tests.support.cases import CODE, CUT, ROOT, small_case
from tests.support.live_server import LiveServer
from tests.support.process import (
    VERIFY_KEYS,
    ForkedProcess,
    call,
    printed_by,
    spawn,
    spawn_onto,
    wrong_expectation,
)


@pytest.fixture
def broken_case(tmp_path: Path) -> Path:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(encode_case(small_case())[:-7])
    return path


def leave_unless_preloaded() -> None:
    sys.exit(0 if "tests.support.preloaded" in sys.modules and agreeing_shapes.cache_info().currsize else 1)


def test_forks_begin_with_all_imported() -> None:
    """A forkserver passes over a module that cannot be imported; each fork would then do it all again."""
    assert ForkedProcess(leave_unless_preloaded).wait(60) == 0


def test_help_names_every_command_and_the_exit_codes_and_imports_no_torch() -> None:
    program = (
        "import sys; from client.cli import app; app(['--help'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    printed = printed_by("-c", program)
    for word in ("demo", "doctor", "score", "verify", "profile", "bench", "serve", "Exit codes"):
        assert word in printed
    assert printed.rstrip().endswith("False")


@pytest.mark.parametrize("command", ["demo", "doctor", "score", "verify", "profile", "bench"])
def test_every_command_takes_backend_and_json(command: str) -> None:
    text = call(command, "--help").stdout
    assert "--backend" in text
    assert "--json" in text


def test_verify_prints_one_object_a_case() -> None:
    done = spawn("verify", CODE, CUT, "--backend", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(line) for line in lines] == [VERIFY_KEYS] * 2
    assert [line["case"] for line in lines] == [str(CODE), str(CUT)]
    assert [line["rows"] for line in lines] == [512, 108]
    for line in lines:
        assert line["backend"] == "cpu"
        assert line["ok"] is True
        assert 0 <= line["max_score_error"] <= line["score_tolerance"] == 2.0**-16
        assert line["topk_mismatches"] == 0
        assert line["seconds"] > 0


def test_verify_at_fast_precision_has_its_tolerance() -> None:
    line = json.loads(call("verify", CUT, "--backend", "cpu", "--precision", "fast", "--json").stdout)
    assert line["score_tolerance"] == 2.0**-9


def test_verify_of_a_wrong_result_is_1(wrong_case: Path) -> None:
    result = call("verify", wrong_case, CUT, "--json")
    assert result.exit_code == 1
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["ok"], first["topk_mismatches"]) == (False, 1)
    assert second["ok"] is True
    people = call("verify", wrong_case)
    assert people.exit_code == 1
    assert "WRONG" in people.stdout


def test_verify_goes_on_after_a_broken_case(broken_case: Path, wrong_case: Path) -> None:
    result = call("verify", broken_case, CUT, wrong_case, "--json")
    assert result.exit_code == 2
    assert [json.loads(line)["case"] for line in result.stdout.splitlines()] == [str(CUT), str(wrong_case)]
    (line,) = result.stderr.splitlines()
    error = json.loads(line)
    assert error["error"] == "CaseFileError"
    assert error["case"] == str(broken_case)
    assert error["argument"].endswith("data_offsets")
    assert error["remedy"]
    people = call("verify", broken_case, CUT)
    assert people.exit_code == 2
    (line,) = people.stderr.splitlines()
    assert line.startswith(f"error: {broken_case}: ")
    assert "ok" in people.stdout


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    case = small_case()
    assert case.index_k is not None
    case.index_k[3, 5] = np.nan
    path = tmp_path / "nan.safetensors"
    write_case(case, path)
    result = call("verify", path)
    assert result.exit_code == 2
    assert "index_k[3, 5] = nan" in result.stderr
    assert str(path) in result.stderr


@pytest.mark.parametrize("command", ["demo", "score", "verify"])
@pytest.mark.parametrize("as_json", [False, True])
def test_missing_file_is_one_line_and_2(command: str, as_json: bool, tmp_path: Path) -> None:
    done = spawn(command, tmp_path / "none.safetensors", *(["--json"] if as_json else []))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "none.safetensors" in line
    assert "Traceback" not in line
    if as_json:
        assert json.loads(line)["argument"] == "path"


@pytest.mark.parametrize("words", [["demo"], ["doctor"], ["score", CUT], ["verify", CUT]])
def test_unknown_backend_is_named_with_the_known_ones(words: list[str]) -> None:
    result = call(*words, "--backend", "abacus")
    assert result.exit_code == 2
    for word in ("abacus", "cpu", "reference"):
        assert word in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["verify"],
        ["score"],
        ["abacus"],
        ["verify", CUT, "--nope"],
        ["score", CUT, "--order", "random"],
        ["score", CUT, "--topk", "many"],
        ["score", CUT, "--topk", "65"],
        ["score", CUT, "--topk", "0"],
        ["score", CUT, "--init-blocks", "-1"],
        ["verify", CUT, "--precision", "lax"],
    ],
)
def test_bad_usage_is_2(words: list[str]) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert result.stderr or result.stdout


def test_score_writes_what_the_case_expects(tmp_path: Path) -> None:
    out = tmp_path / "new" / "scores.safetensors"
    result = call("score", CODE, "--out", out, "--json")
    assert result.exit_code == 0
    fields = json.loads(result.stdout)
    assert (fields["rows"], fields["blocks"], fields["topk"], fields["out"]) == (512, 64, 16, str(out))
    tensors, case = load_file(out), read_case(CODE)
    assert sorted(tensors) == ["block_ids", "num_blocks", "scores"]
    assert case.expected_scores is not None
    assert case.expected_block_ids is not None
    assert (tensors["block_ids"] == case.expected_block_ids).all()
    assert (tensors["num_blocks"] == case.num_blocks_per_query()).all()
    np.testing.assert_allclose(tensors["scores"], case.expected_scores, rtol=1e-4, atol=1e-3)
    assert [entry.name for entry in out.parent.iterdir()] == [out.name]


def test_score_takes_other_options_than_the_cases(tmp_path: Path) -> None:
    def ids(*options: str) -> Any:
        out = tmp_path / "out.safetensors"
        assert call("score", CUT, "--out", out, *options).exit_code == 0
        return load_file(out)["block_ids"]

    case = read_case(CUT)
    last_block = case.num_blocks_per_query() - 1
    best, first = ids(), ids("--topk", "1")
    assert first.shape == (4, 27, 1)
    assert (first[..., 0] == best[..., 0]).all()
    assert (ids("--local-blocks", "1", "--topk", "1")[..., 0] == last_block).all()
    assert (ids("--init-blocks", "1", "--topk", "1") == 0).all()
    ascending = ids("--order", "block")
    assert (np.sort(np.where(best < 0, 99, best), axis=2) == np.where(ascending < 0, 99, ascending)).all()


def test_score_that_cannot_write_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for out in (tmp_path / "file" / "x.safetensors", tmp_path / "folder"):
        result = call("score", CUT, "--out", out)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]
    assert not list((tmp_path / "folder").iterdir())


def test_score_without_a_file_says_what_it_did() -> None:
    result = call("score", CUT)
    assert result.exit_code == 0
    assert "108 rows" in result.stdout


def test_file_name_of_any_bytes_does_not_steer_the_terminal(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/a\x1b[2J\nb\xff.safetensors")
    write_case(small_case(), path)
    done = spawn("verify", path, path + "x", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["case"] == path
    assert json.loads(done.stderr)["case"] == path + "x"
    people = spawn("verify", path, path + "x")
    assert people.returncode == 2
    assert "\x1b" not in people.stdout + people.stderr
    assert len(people.stderr.splitlines()) == 1
    assert "Traceback" not in people.stderr


# Every way the command can end: one line that names the fault, the right exit code, and no traceback.

USAGE = [
    (["score", "--topk", "x", CUT], "--topk", "score"),
    (["score", CUT, "--order", "random"], "--order", "score"),
    (["verify"], "CASE", "verify"),
    (["verify", CUT, "--nope"], "--nope", "verify"),
    (["verify", CUT, "--backend"], "--backend", ""),
    (["abacus"], "abacus", ""),
]


@pytest.mark.parametrize(("words", "named", "command"), USAGE)
def test_usage_error_is_one_line(words: list[str | Path], named: str, command: str) -> None:
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert f"see nvfp4-indexer {command}".rstrip() in line


@pytest.mark.parametrize(("words", "named", "command"), USAGE)
def test_usage_error_is_one_object_with_json(words: list[str | Path], named: str, command: str) -> None:
    result = call(words[0], "--json", *words[1:]) if command else call(*words[:2], "--json", *words[2:])
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    fields = json.loads(line)
    assert fields["error"]
    assert named in fields["message"]
    assert "--help" in fields["remedy"]


def test_json_after_two_dashes_is_a_file() -> None:
    result = call("verify", "--nope", "--", "--json")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_version_is_one_line() -> None:
    result = call("--version")
    assert (result.exit_code, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    assert line.startswith("nvfp4-indexer")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        None,  # numpy's own
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
    ids=["python", "numpy", "torch", "loader"],
)
@pytest.mark.parametrize(
    "words", [["score", CUT], ["verify", CUT], ["demo", CUT]], ids=lambda words: words[0]
)
def test_out_of_memory_is_one_line(
    error: Exception | None, words: list[str | Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def exhausted(*args: Any, **options: Any) -> None:
        if error is None:
            np.empty(1 << 60, np.uint8)
        else:
            raise error

    import client.demonstration
    import indexer.verify

    for module in (indexer.replay, indexer.verify, client.demonstration):
        monkeypatch.setattr(module, "load_case", exhausted)
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {CUT}: out of memory: ")
    assert "smaller case" in line
    assert json.loads(call(*words, "--json").stderr)["case"] == str(CUT)


def test_defect_is_no_wrong_result_and_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(indexer.replay, "load_case", broken)
    result = call("score", CUT)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert lines[-1] == "error: a defect of this program, please report it: ZeroDivisionError: a bug"
    assert any("in broken" in line for line in lines)


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(indexer.replay, "load_case", interrupted)
    result = call("score", CUT)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


def _run(words: list[str | Path], stdout: int | IO[bytes]) -> subprocess.CompletedProcess[str]:
    if words != ["--help"]:
        return spawn_onto(stdout, *words)
    # Python starts here, because it flushes stdout once more when it shuts down.
    return subprocess.run(
        [sys.executable, "-m", "client.cli", "--help"],
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("words", [["--help"], ["verify", CUT], ["verify", CUT, "--json"]])
def test_full_stdout_is_one_line_and_2(words: list[str | Path]) -> None:
    with Path("/dev/full").open("wb", buffering=0) as stdout:
        done = _run(words, stdout)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "stdout: No space left on device" in line
    assert line.startswith("{" if "--json" in words else "error: ")


@pytest.mark.parametrize("words", [["--help"], ["verify", CUT], ["verify", CUT, "--json"]])
def test_reader_that_has_gone_is_141_and_quiet(words: list[str | Path]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = _run(words, writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_text_that_the_locale_cannot_write_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "x.st"
    write_case(small_case(source="漢字"), path)
    done = spawn("demo", path, "--picture", tmp_path / "x.png", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u6f22\\u5b57" in done.stdout


def test_verify_keeps_names_whole_in_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a_case_with_a_name_of_36_letters.st"
    write_case(small_case(), path)
    monkeypatch.setattr("client.commands.verify.WIDE", 40)
    monkeypatch.chdir(tmp_path)
    result = call("verify", path.name, path.name)
    assert result.exit_code == 0
    assert result.stdout.count(f"ok {path.name}\n") == 2
    assert all(len(line) <= 40 for line in result.stdout.splitlines())
    assert "10 rows" in result.stdout
    monkeypatch.setattr("client.commands.verify.WIDE", 120)
    (row,) = [line for line in call("verify", path.name).stdout.splitlines() if path.name in line]
    assert row.split()[:3] == ["ok", path.name, "cpu"]


# The command's remote half: the same results, exit codes and one-line errors as without --url.


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
    server = LiveServer("--backend=cpu", "--num-pages=8", module="client.cli serve", forked=True)
    with Client(server.url) as client:
        assert client.info().num_pages == 8
    assert server.stop() == 0
