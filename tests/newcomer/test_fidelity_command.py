"""``fidelity``: tables, JSON, pictures, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from indexer.case import Case, write_case
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


def test_no_case_is_drawn_over(tmp_path: Path) -> None:
    case = tmp_path / "case.png"
    case.write_bytes(CODE.read_bytes())
    result = call("fidelity", CODE, case, "--picture", case)
    assert result.exit_code == 2
    assert "is the case itself" in result.stderr
    assert case.read_bytes() == CODE.read_bytes()


def flat_case(path: Path, query: float, key: float) -> Path:
    case = Case(
        index_q=np.full((4, 1, 128), query, np.float32),
        index_k=np.full((3000, 128), key, np.float32),
        cu_seqlens_q=np.array([0, 4], np.int32),
        seq_lens=np.array([3000], np.int32),
    )
    write_case(case, path)
    return path


def test_rows_that_miss_nothing_are_not_shown_as_the_worst(tmp_path: Path) -> None:
    path = flat_case(tmp_path / "c.safetensors", 1.0, 1.0)
    assert "No row misses a block" in call("fidelity", path, "--backend", "cpu").stdout
    assert json.loads(call("fidelity", path, "--backend", "cpu", "--json").stdout)["worst_rows"] == []


@pytest.mark.parametrize(
    ("query", "key", "argument"),
    [
        (1e30, 1e30, "index_q . index_k [head 0, token 0, block 0] = inf"),
        (-1e30, 1e30, "index_q . index_k [head 0, token 0, block 0] = -inf"),
        (float("nan"), 1.0, "index_q[0, 0, 0] = nan"),
        (1.0, float("inf"), "index_k[0, 0] = inf"),
    ],
)
def test_what_is_not_finite_is_refused_by_name(
    tmp_path: Path, query: float, key: float, argument: str
) -> None:
    result = call("fidelity", flat_case(tmp_path / "c.safetensors", query, key), "--backend", "cpu")
    assert result.exit_code == 2
    assert argument in result.stderr
    assert len(result.stderr.splitlines()) == 1
