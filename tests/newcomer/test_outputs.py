"""``--out`` and ``--picture``: refused by name before the work, and never what they should not replace."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

import client.demonstration
import indexer.replay
from indexer.case import read_case, write_case
from tests.support.command import call, spawn
from tests.support.raw_case import small_case
from tests.support.real_cases import CUT, ROOT


@pytest.fixture
def case(tmp_path: Path) -> Path:
    path = tmp_path / "case.st"
    write_case(small_case(), path)
    return path


def _must_not_run(*args: Any, **options: Any) -> None:
    raise AssertionError("the work was begun")


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer.replay, "load_case", _must_not_run)
    monkeypatch.setattr(client.demonstration, "demonstrate", _must_not_run)


def test_out_into_a_pipe(case: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    result = call("score", case, "--out", pipe)
    reader.join()
    assert result.exit_code == 0
    assert sorted(load(read[0])) == ["block_ids", "num_blocks", "scores"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("option", ["--out", "--picture"])
@pytest.mark.parametrize("as_json", [False, True])
def test_target_that_cannot_be_written_is_refused_before_the_work(
    option: str, as_json: bool, case: Path, tmp_path: Path
) -> None:
    (tmp_path / "linked").hardlink_to(case)
    before = case.read_bytes()
    command = "score" if option == "--out" else "demo"
    for target, reason in (
        ("", "is a folder"),
        (".", "is a folder"),
        ("/", "is a folder"),
        (tmp_path, "is a folder"),
        (case / "x.png", "Not a directory"),
        (case, "is the case itself"),
        (tmp_path / "linked", "is the case itself"),
    ):
        result = call(command, case, option, target, *(["--json"] if as_json else []))
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        message = json.loads(line)["message"] if as_json else line.removeprefix("error: ")
        assert message.startswith(f"{option} = {Path(target)}: ")
        assert reason in message
        assert f"with {option}" in message
    assert case.read_bytes() == before


@pytest.mark.usefixtures("no_work")
def test_picture_of_another_format_is_refused(case: Path, tmp_path: Path) -> None:
    result = call("demo", case, "--picture", tmp_path / "x.jpg")
    assert result.exit_code == 2
    assert (
        f"--picture = {tmp_path / 'x.jpg'}: is drawn as PNG, not .jpg; end its name in .png" in result.stderr
    )


def test_demo_where_the_default_picture_cannot_be_written(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").touch()
    result = call("demo", case)
    assert (result.exit_code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    assert "No picture: --picture = out/demo.png: cannot be written: Not a directory" in text
    assert "name another file with --picture" in text
    assert "RIGHT" in text
    fields = json.loads(call("demo", case, "--json").stdout)
    assert fields["picture"] is None
    assert "Not a directory" in fields["no_picture"]


@pytest.mark.parametrize("asked", [False, True])
def test_picture_whose_writing_fails_does_not_take_the_report_along(
    asked: bool, case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    monkeypatch.chdir(tmp_path)
    result = call("demo", case, *(["--picture", "x.png"] if asked else []))
    assert "RIGHT: 10 of 10 rows" in result.stdout
    assert "No space left on device; name another file with --picture" in " ".join(result.stdout.split())
    assert result.exit_code == (2 if asked else 0)
    assert len(result.stderr.splitlines()) == (1 if asked else 0)


def test_two_demos_at_once(case: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "client.cli",
        "demo",
        str(case),
        "--picture",
        str(tmp_path / "x" / "y.png"),
    ]
    both = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [(process.communicate()[1], process.returncode) for process in both]
    assert ends == [("", 0), ("", 0)]
    assert [entry.name for entry in (tmp_path / "x").iterdir()] == ["y.png"]


@pytest.mark.parametrize("name", [b"cost $\\frac 5$.st", b"\xff\xfe.st", "漢字 نص.st".encode()])
def test_name_of_any_kind_is_drawn(name: bytes, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    write_case(small_case(), path)
    done = spawn("demo", path, "--picture", tmp_path / "x.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_out_through_a_link_does_not_replace_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("scores.safetensors")
    assert call("score", CUT, "--out", tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    ids = load((tmp_path / "scores.safetensors").read_bytes())["block_ids"]
    assert ids.shape[:2] == (read_case(CUT).num_heads, read_case(CUT).total_q)
