"""``fidelity``: tables, JSON, pictures, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import call
from tests.support.real_cases import CODE


def test_json_has_every_figure(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "f.svg"
    result = call("fidelity", CODE, "--backend", "cpu", "--picture", picture, "--json")
    assert result.exit_code == 0
    fields = json.loads(result.stdout)
    assert [found["name"] for found in fields["formats"]] == ["fp8", "nvfp4"]
    assert fields["formats"][1]["mean"] == pytest.approx(0.9348, abs=5e-5)
    assert len(fields["formats"][1]["heads"]) == 2
    assert len(fields["worst_rows"]) == 10
    text = picture.read_text()
    assert text.lstrip().startswith("<?xml")


def test_people_get_tables_and_several_cases_one_picture(tmp_path: Path) -> None:
    made = tmp_path / "made.safetensors"
    call("case", "make", "low-contrast", "--out", made, "--context", "5000", "--queries", "4")
    picture = tmp_path / "f.png"
    result = call("fidelity", CODE, made, "--backend", "cpu", "--picture", picture)
    assert result.exit_code == 0
    assert "recall mean" in result.stdout
    assert "Rows that NVFP4 keys cost most" in result.stdout
    assert " ".join(result.stdout.split()).count("rows have a choice") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    result = call("fidelity", CODE, "--picture", tmp_path / "f.jpg")
    assert result.exit_code == 2
    assert "--picture" in result.stderr
    assert list(tmp_path.iterdir()) == []
