"""Every way the command can end: one line that names the fault, the right exit code, and no traceback."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import indexer.replay
from indexer.case import write_case
from tests.support.command import call, spawn
from tests.support.raw_case import small_case
from tests.support.real_cases import CUT, ROOT

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


def _run(stdout: Any, words: list[str | Path], before: Callable[[], None] | None = None) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "client.cli", *map(str, words)],
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=before,
    )


def _no_file_may_grow() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize("words", [["--help"], ["verify", CUT], ["verify", CUT, "--json"]])
def test_full_stdout_is_one_line_and_2(words: list[str | Path], tmp_path: Path) -> None:
    with (tmp_path / "results").open("wb") as stdout:
        done = _run(stdout, words, _no_file_may_grow)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "stdout: File too large" in line
    assert line.startswith("{" if "--json" in words else "error: ")


@pytest.mark.parametrize("words", [["--help"], ["verify", CUT], ["verify", CUT, "--json"]])
def test_reader_that_has_gone_is_141_and_quiet(words: list[str | Path]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = _run(writing, words)
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
