"""``demo`` and ``doctor`` as a newcomer meets them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from indexer.case import write_case
from tests.support.command import VERIFY_KEYS, call, spawn, wrong_expectation
from tests.support.raw_case import paged_case, small_case
from tests.support.real_cases import CUT


@pytest.fixture
def wrong_case(tmp_path: Path) -> Path:
    return wrong_expectation(tmp_path)


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
