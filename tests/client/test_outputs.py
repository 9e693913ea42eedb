"""``--out`` and ``--picture``: refused by name before the work, and never what they should not replace."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load
from typer.testing import CliRunner

import client.demonstration
import indexer.replay
from client.cli import app
from client.commands.bench import BenchmarkReport, Measured, read_report
from indexer.case import read_case, write_case
from tests.support.cases import CODE, CUT, paged_case, small_case
from tests.support.process import VERIFY_KEYS, call, spawn


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
    words = ("demo", case, "--picture", tmp_path / "x" / "y.png")
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda _: spawn(*words), range(2)))
    assert [(done.stderr, done.returncode) for done in both] == [("", 0)] * 2
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


# ``demo`` and ``doctor`` as a newcomer meets them.


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_demo_shows_selection_fidelity_timings_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "deep" / "demo.png"
    done = spawn("demo", "--picture", picture)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    text = " ".join(done.stdout.split())
    for words in (
        "0.9348 mean",
        "0.733",
        "62:local",
        "keys/s",
        "FLOP/s",
        "rows/s",
        "cold",
        "warm",
        "RIGHT: 512 of 512",
    ):
        assert words in text
    assert done.stdout.splitlines()[-1].startswith("RIGHT")
    width, height = png_size(picture)
    assert width > 1200
    assert height > 700
    assert [entry.name for entry in picture.parent.iterdir()] == [picture.name]


def test_demo_as_json_is_one_object(tmp_path: Path) -> None:
    result = call("demo", CUT, "--picture", tmp_path / "x.png", "--json")
    assert result.exit_code == 0
    fields = json.loads(result.stdout)
    assert fields["ok"] is True
    assert (fields["rows"], fields["rows_equal_expected"], fields["topk_mismatches"]) == (108, 108, 0)
    assert fields["recall"]["rows"] == 48
    assert {stage["unit"] for stage in fields["stages"]} == {"key", "row", "FLOP"}
    assert all(stage["cold_seconds"] > 0 and stage["warm_seconds"] > 0 for stage in fields["stages"])
    assert len(fields["picks"]) == 4
    assert Path(fields["picture"]).is_file()


def test_demo_of_pages_says_what_it_cannot_know(tmp_path: Path) -> None:
    path = tmp_path / "pages.safetensors"
    write_case(paged_case(), path)
    result = call("demo", path, "--picture", tmp_path / "x.png")
    assert result.exit_code == 0
    assert "Not known" in result.stdout
    assert "the oracle agrees" in result.stdout


def test_demo_of_no_rows_has_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "padding.safetensors"
    write_case(
        small_case(index_q=np.zeros((0, 2, 128), np.float32), cu_seqlens_q=np.zeros(3, np.int32)), path
    )
    result = call("demo", path, "--picture", tmp_path / "x.png")
    assert result.exit_code == 0
    assert not (tmp_path / "x.png").exists()


def test_demo_of_a_wrong_result_is_1(wrong_case: Path, tmp_path: Path) -> None:
    result = call("demo", wrong_case, "--picture", tmp_path / "x.png")
    assert result.exit_code == 1
    assert "WRONG: 1 of 108 rows" in result.stdout


def test_demo_without_matplotlib_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "client.plots"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("demo", CUT, "--picture", tmp_path / "x.png")
    assert result.exit_code == 0
    assert "pip install 'nvfp4-indexer[plot]'" in result.stdout
    assert not (tmp_path / "x.png").exists()


def test_doctor_says_what_runs_and_tests_it() -> None:
    result = call("doctor", "--json")
    assert result.exit_code == 0
    fields = json.loads(result.stdout)
    assert list(fields) == ["versions", "devices", "backends", "backend", "selftest"]
    assert fields["versions"]["python"] == sys.version.split()[0]
    assert {backend["name"] for backend in fields["backends"]} >= {"cpu", "reference"}
    assert all(backend["reason"] for backend in fields["backends"])
    backends = {backend["name"]: backend for backend in fields["backends"]}
    assert any(words in backends["flydsl"]["reason"] for words in ("ROCm", "AMD GPU", "gfx950"))
    if backends["flydsl-sim"]["usable"]:
        for tool in ("linker", "stand-in HIP", "disassembler"):
            assert tool in backends["flydsl-sim"]["reason"]
    assert list(fields["selftest"]) == VERIFY_KEYS
    assert fields["selftest"]["ok"] is True
    people = call("doctor", "--backend", "reference")
    assert people.exit_code == 0
    assert "RIGHT: reference agrees" in people.stdout


def test_text_of_a_hostile_case_does_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "markup.safetensors"
    write_case(small_case(source="[bold red]x[/] [link=file:///]y"), path)
    result = call("demo", path, "--picture", tmp_path / "x.png")
    assert result.exit_code == 0
    assert "[bold red]x[/] [link=file:///]y" in " ".join(result.stdout.split())


# ``case make``: a file, its description, and refusals of one line.


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 2), (4, 1)])
def test_heads_are_those_of_the_rank(tmp_path: Path, tp: int, heads: int) -> None:
    path = tmp_path / "new" / "c.safetensors"
    result = call("case", "make", "needle", "--out", path, "--context", "700", "--tp", str(tp), "--json")
    assert result.exit_code == 0
    fields = json.loads(result.stdout)
    case = read_case(path)
    assert (case.num_heads, case.total_k, case.total_q) == (heads, 700, 64)
    assert fields["bytes"] == path.stat().st_size
    assert fields["source"] == case.source
    assert "needle at position" in case.source


def test_people_are_told_what_was_written(tmp_path: Path) -> None:
    result = call("case", "make", "ragged", "--out", tmp_path / "c.safetensors", "--context", "300")
    assert result.exit_code == 0
    assert "10 requests" in result.stdout
    assert call("verify", tmp_path / "c.safetensors").exit_code == 0


def test_sizes_and_counts_read_as_they_are(tmp_path: Path) -> None:
    words = ("--out", tmp_path / "c.safetensors", "--context", "1", "--queries", "1", "--tp", "4")
    text = " ".join(call("case", "make", "m3", *words).stdout.split())
    assert "1 request, 1 query, 1 head, 1 key, " in text
    assert " 0.0 " not in text


def test_a_place_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.made_cases.make_case", lambda *_: pytest.fail("made"))
    for place in (tmp_path, tmp_path / "file" / "c.safetensors"):
        (tmp_path / "file").write_text("no folder")
        result = call("case", "make", "m3", "--out", place)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: --out = ")


@pytest.mark.parametrize(
    "words", [("m3", "--tp", "3"), ("m3", "--queries", "0"), ("sparse",), ("m3", "--seed", "-1")]
)
def test_refusals_are_one_line_and_write_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = call("case", "make", *words, "--out", tmp_path / "c.safetensors")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# Tables on a terminal of 40 columns: its lines wrap, and no figure is cut.


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize(
    "words",
    [("fidelity", CODE), ("profile", CUT, "--repeats", "1")],
)
def test_no_figure_is_cut(
    words: tuple[str | Path, ...], columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    text = call(*words, "--backend", "cpu").stdout
    assert "…" not in text
    if "profile" in words:
        rows = [line for line in text.splitlines() if "select" in line]
        assert [len(re.findall(r"\d\.\d{3}\b", row)) for row in rows] == [6]
    assert max(len(line) for line in text.splitlines()) > 60


# ``bench --report``: the table of what the GPU benchmark measured, on a machine without a GPU.

REPORT = BenchmarkReport(
    device="a GPU",
    torch="2.11.0",
    rounds=15,
    measured=[
        Measured("score H=4 131072", "fast", 0.952, 1117.6, "TFLOP/s"),
        Measured("copy of 1 GiB", "", 0.5, 4.25, "TB/s"),
    ],
    peers={"score H=4 131072": (2.77, 1.29)},
)


def test_a_written_report_is_read_and_shown(tmp_path: Path) -> None:
    """Every line, its rate, and how many times the peers' speed it has."""
    path = tmp_path / "report.json"
    REPORT.write(path)
    assert read_report(path) == REPORT
    shown = CliRunner().invoke(app, ["bench", "--report", str(path)])
    assert shown.exit_code == 0
    for word in ("a GPU", "score H=4 131072", "1118 TFLOP/s", "4.25 TB/s", "2.91", "1.36"):
        assert word in shown.stdout
    as_json = CliRunner().invoke(app, ["bench", "--report", str(path), "--json"])
    assert json.loads(as_json.stdout)["measured"][1]["milliseconds"] == 0.5


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    """Other JSON, no JSON, no file, and neither a case nor a report: exit code 2 and the remedy."""
    for name, text in (("other.json", '{"measured": [1]}'), ("list.json", "[]"), ("text.json", "no JSON")):
        path = tmp_path / name
        path.write_text(text)
        refused = CliRunner().invoke(app, ["bench", "--report", str(path)])
        assert refused.exit_code == 2
        assert "bench_gpu" in refused.stderr
    assert CliRunner().invoke(app, ["bench", "--report", str(tmp_path / "none")]).exit_code == 2
    refused = CliRunner().invoke(app, ["bench"])
    assert refused.exit_code == 2
    assert "--report" in refused.stderr
