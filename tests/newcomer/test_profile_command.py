"""``profile``: cold beside warm, the plan, pictures, rocprofv3's files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from indexer.case import Case, write_case
from tests.support.command import call, spawn
from tests.support.real_cases import CODE, CUT
from tests.unit.test_rocprof import TRACE


def test_cold_and_warm_stand_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "x_kernel_trace.csv").write_text(TRACE)
    words = ("profile", CUT, "--backend", "cpu", "--repeats", "1", "--rocprof", tmp_path)
    fields = json.loads(call(*words, "--json").stdout)
    assert (fields["cache"], fields["warm"]["cache"]) == ("cold", "warm")
    assert fields["rocprof"][0]["total_us"] == 10.0
    assert fields["plan"] is None, "no request has more than 16 queries"
    text = call(*words).stdout
    for word in ("cold: median ms", "warm: median ms", "times the floor", "score_prefill_h4"):
        assert word in text
    fields = json.loads(call(*words[:-2], "--cache", "warm", "--json").stdout)
    assert (fields["cache"], fields["warm"], fields["rocprof"]) == ("warm", None, None)


def test_the_picture_has_roofline_and_plan(tmp_path: Path) -> None:
    picture = tmp_path / "p.svg"
    words = ("profile", CODE, "--backend", "cpu", "--repeats", "1", "--picture", picture)
    result = call(*words)
    assert result.exit_code == 0
    assert "gfx950 plan: " in result.stdout
    assert picture.read_text().lstrip().startswith("<?xml")
    assert call(*words[:-1], tmp_path / "p.gif").exit_code == 2


def test_a_trace_does_not_overwrite_the_case_and_says_nothing_of_its_own(tmp_path: Path) -> None:
    case = tmp_path / "c.safetensors"
    case.write_bytes(CUT.read_bytes())
    words = ("profile", case, "--backend", "cpu", "--repeats", "1", "--cache", "warm")
    for path in (case, tmp_path):
        refused = call(*words, "--trace", path)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: --trace = ")
    assert case.read_bytes() == CUT.read_bytes()
    done = spawn(*words, "--trace", tmp_path / "new" / "t.json", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "new" / "t.json").read_text())["traceEvents"]


def test_a_call_without_queries_is_compared_with_nothing(tmp_path: Path) -> None:
    case = Case(
        index_q=np.zeros((0, 1, 128), np.float32),
        index_k=np.zeros((0, 128), np.float32),
        cu_seqlens_q=np.zeros(1, np.int32),
        seq_lens=np.zeros(0, np.int32),
    )
    write_case(case, tmp_path / "c.safetensors")
    words = ("profile", tmp_path / "c.safetensors", "--backend", "cpu", "--repeats", "1")
    result = call(*words, "--picture", tmp_path / "p.png")
    assert result.exit_code == 0
    assert "no query" in result.stdout
    assert "times the floor" not in result.stdout


def test_one_thing_is_not_called_things() -> None:
    words = ("profile", CUT, "--backend", "cpu", "--repeats", "1", "--cache", "cold")
    assert "heads, up to" in call(*words).stdout
    assert "1 run\n" in call(*words).stdout
