"""``verify`` of a file that holds an engine's result: exit code, JSON, and words for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from indexer.case import write_case
from tests.support.command import VERIFY_KEYS, call
from tests.support.faulty_engine import Bytes, Engine, engine_case

LENGTHS = [(900, 12), (700, 3)]


class Swapped(Engine):
    def codes(self, page: Bytes) -> Bytes:
        return super().codes((page >> 4 | page << 4).astype("u1"))


@pytest.fixture
def right(tmp_path: Path) -> Path:
    path = tmp_path / "right.safetensors"
    write_case(Engine(engine_case(LENGTHS)).run(), path)
    return path


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.safetensors"
    write_case(Swapped(engine_case(LENGTHS)).run(), path)
    return path


def test_exit_codes_and_json(right: Path, wrong: Path) -> None:
    result = call("verify", right, "--backend", "cpu", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["engine"]["ok"] is True
    result = call("verify", right, wrong, "--backend", "cpu", "--json", "--findings", "5")
    assert result.exit_code == 1
    line = json.loads(result.stdout.splitlines()[1])
    assert list(line) == VERIFY_KEYS
    assert line["ok"] is False
    assert line["topk_mismatches"] == 0, "the backend is right"
    engine = line["engine"]
    assert len(engine["findings"]) == 5 < engine["total_findings"]
    assert [cause["name"] for cause in engine["causes"]] == ["nibbles are swapped"]
    assert set(engine["findings"][0]) == {
        "request",
        "head",
        "token",
        "position",
        "block",
        "kind",
        "verdict",
        "expected",
        "got",
        "margin",
        "allowed",
        "place",
        "id",
        "against",
        "rule",
    }


def test_people_are_told_what_is_wrong_and_why(right: Path, wrong: Path) -> None:
    text = call("verify", right, "--backend", "cpu").stdout
    assert "engine RIGHT" in text
    assert "30 rows: 30 right" in text
    result = call("verify", wrong, "--backend", "cpu")
    assert result.exit_code == 1
    assert "engine WRONG" in result.stdout
    assert "Cause: nibbles are swapped (nibble order)" in result.stdout
    assert "fault" in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 200
