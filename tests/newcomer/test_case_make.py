"""``case make``: a file, its description, and refusals of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from indexer.case import read_case
from tests.support.command import call


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
