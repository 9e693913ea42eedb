"""``verify`` of a file that holds an engine's result: exit code, JSON, and words for people."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.engine_report import kind_counts, shown_of, some_of_each_kind
from indexer.case import Case, EngineRecord, write_case
from tests.support.faulty_engine import Engine, engine_case, judged, recorded, right_case, with_result
from tests.support.planted import FAULTS
from tests.support.process import VERIFY_KEYS, call

LENGTHS = [(900, 12), (700, 3)]


@pytest.fixture
def right(tmp_path: Path) -> Path:
    path = tmp_path / "right.safetensors"
    write_case(Engine(engine_case(LENGTHS)).run(), path)
    return path


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.safetensors"
    write_case(FAULTS["NibblesSwapped"].run(engine_case(LENGTHS)), path)
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
    assert max(map(len, result.stdout.splitlines())) <= 240


def strict(text: str) -> Any:
    """JSON as those read it who do not take NaN for a number."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def spoilt(case: Case, path: Path) -> Path:
    """One id of a row out of range, one score NaN, one query not finite."""
    scores, ids = recorded(case)
    ids[0, 4, 3] = 777
    scores[1, 3, 7] = np.nan
    queries = case.index_q.copy()
    queries[2, 0, 9] = np.nan
    write_case(dataclasses.replace(with_result(case, scores, ids), index_q=queries), path)
    return path


def test_each_entry_that_breaks_a_rule_is_told_everywhere(tmp_path: Path) -> None:
    path = spoilt(right_case(), tmp_path / "c.safetensors")
    result = call("verify", path, "--backend", "cpu", "--json")
    assert result.exit_code == 1
    line = strict(result.stdout)
    assert (line["unjudged_rows"], line["rows"]) == (1, 9)
    assert line["not_finite"][0] == {
        "request": 1,
        "head": 0,
        "token": 2,
        "position": 2597,
        "dim": 9,
        "value": "nan",
    }
    engine = line["engine"]
    assert engine["unmeasured_cells"] == {"NaN": 1}
    found = {finding["kind"]: finding for finding in engine["findings"]}
    assert found["score"]["got"] == "nan"
    entry = found["id"]
    assert (entry["request"], entry["head"], entry["token"], entry["position"]) == (1, 0, 4, 2599)
    assert (entry["place"], entry["id"]) == (3, 777)
    rule = "request 1 has blocks 0 to 20 only; of the right blocks the row lacks "
    assert entry["rule"].startswith(rule)

    people = call("verify", path, "--backend", "cpu").stdout
    told = re.sub(r"\s+", " ", people)
    assert "1 0 4 2,599 id 3 777 " in told
    assert rule in told
    assert "NaN where a number must be" in told
    assert "none can be stated in 1 wrong cell (NaN: 1)" in told
    assert "request 1, head 0, token 2 (position 2,597): index_q[2, 0, 9] = nan" in told
    assert "9 rows: 7 right" in told
    assert "1 row not judged" in told

    out = tmp_path / "r.html"
    assert call("report", path, "--backend", "cpu", "--repeats", "1", "--out", out).exit_code == 1
    page = html.unescape(re.sub(r"(<[^>]*>)+", " ", out.read_text(encoding="utf-8")))
    assert "1 0 4 2,599 id 3 777 " in re.sub(r"\s+", " ", page)
    for words in (rule, "NaN where a number must be", "NaN: 1", "index_q[2, 0, 9] = nan", "1 row not judged"):
        assert words in page


def test_what_is_shown_of_how_many(wrong: Path) -> None:
    result = call("verify", wrong, "--backend", "cpu", "--findings", "2")
    told = re.sub(r"\s+", " ", result.stdout)
    held = strict(call("verify", wrong, "--backend", "cpu", "--findings", "2", "--json").stdout)["engine"]
    total = held["total_findings"]
    assert total == sum(sum(counts.values()) for counts in held["differences"].values())
    assert f"2 of {total:,} differences" in told
    assert f"--json has the first 2 of {total:,}; a larger --findings tells more" in told
    shown = re.findall(r"(\w+) ([\d,]+) faults? \((\d) shown\)", told)
    assert {kind: int(count.replace(",", "")) for kind, count, _ in shown} == {
        kind: counts["fault"] for kind, counts in held["differences"].items()
    }
    assert sum(int(count) for *_, count in shown) == 2
    everything = re.sub(r"\s+", " ", call("verify", wrong, "--backend", "cpu").stdout)
    assert "(0 shown)" not in everything, "a row of many wrong scores hides no other kind"
    assert not call("verify", wrong, "--backend", "cpu", "--findings", "0").stdout.count("place")


@pytest.mark.parametrize("columns", ["80", "300"])
def test_a_narrow_terminal_is_told_the_same(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.commands.verify.WIDE", int(columns))
    path = spoilt(right_case(), tmp_path / "c.safetensors")
    told = re.sub(r"\s+", " ", call("verify", path, "--backend", "cpu").stdout)
    assert "request 1 has blocks 0 to 20 only" in told
    assert ("place 3, id 777" in told) is (columns == "80")


def test_only_what_was_recorded_is_called_right(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    write_case(dataclasses.replace(right_case(), engine=EngineRecord(layer=3)), path)
    result = call("verify", path, "--backend", "cpu")
    assert result.exit_code == 0
    assert "engine recorded NO RESULT" in result.stdout
    assert "right" not in result.stdout
    assert strict(call("verify", path, "--backend", "cpu", "--json").stdout)["engine"]["rows"] == 0


# Which differences people are shown.


def test_rows_of_many_wrong_scores_hide_no_other_kind() -> None:
    case = right_case()
    scores, ids = recorded(case)
    scores[scores < 1e28] += 1
    ids[1, 4, 2] = -5  # of the last row
    verdict = judged(with_result(case, scores, ids))
    assert verdict.differences["score"]["fault"] > 60
    shown = some_of_each_kind(verdict, 12)
    assert len(shown) == 12
    assert shown[-1].kind == "id"
    assert shown == sorted(shown, key=verdict.findings.index)
    assert {kind: told for kind, _, told in kind_counts(verdict, shown)} == {"id": "1", "score": "11"}
    assert shown_of(verdict, shown).startswith(f"12 of {verdict.total_findings} differences")
    assert some_of_each_kind(verdict, 10_000) == list(verdict.findings)
