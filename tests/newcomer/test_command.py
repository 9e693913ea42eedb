"""The command as scripts and people use it: output, exit codes, JSON, errors of one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from indexer.case import encode_case, read_case, write_case
from tests.support.command import VERIFY_KEYS, call, spawn, wrong_expectation
from tests.support.process import printed_by
from tests.support.raw_case import small_case
from tests.support.real_cases import CODE, CUT


@pytest.fixture
def wrong_case(tmp_path: Path) -> Path:
    return wrong_expectation(tmp_path)


@pytest.fixture
def broken_case(tmp_path: Path) -> Path:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(encode_case(small_case())[:-7])
    return path


def test_help_names_every_command_and_the_exit_codes_and_imports_no_torch() -> None:
    program = (
        "import sys; from client.cli import app; app(['--help'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    printed = printed_by("-c", program)
    for word in ("demo", "doctor", "score", "verify", "profile", "bench", "serve", "Exit codes"):
        assert word in printed
    assert printed.rstrip().endswith("False")


@pytest.mark.parametrize("command", ["demo", "doctor", "score", "verify", "profile", "bench"])
def test_every_command_takes_backend_and_json(command: str) -> None:
    text = call(command, "--help").stdout
    assert "--backend" in text
    assert "--json" in text


def test_verify_prints_one_object_a_case() -> None:
    done = spawn("verify", CODE, CUT, "--backend", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [list(line) for line in lines] == [VERIFY_KEYS] * 2
    assert [line["case"] for line in lines] == [str(CODE), str(CUT)]
    assert [line["rows"] for line in lines] == [512, 108]
    for line in lines:
        assert line["backend"] == "cpu"
        assert line["ok"] is True
        assert 0 <= line["max_score_error"] <= line["score_tolerance"] == 2.0**-16
        assert line["topk_mismatches"] == 0
        assert line["seconds"] > 0


def test_verify_at_fast_precision_has_its_tolerance() -> None:
    line = json.loads(call("verify", CUT, "--backend", "cpu", "--precision", "fast", "--json").stdout)
    assert line["score_tolerance"] == 2.0**-9


def test_verify_of_a_wrong_result_is_1(wrong_case: Path) -> None:
    result = call("verify", wrong_case, CUT, "--json")
    assert result.exit_code == 1
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["ok"], first["topk_mismatches"]) == (False, 1)
    assert second["ok"] is True
    people = call("verify", wrong_case)
    assert people.exit_code == 1
    assert "WRONG" in people.stdout


def test_verify_goes_on_after_a_broken_case(broken_case: Path, wrong_case: Path) -> None:
    result = call("verify", broken_case, CUT, wrong_case, "--json")
    assert result.exit_code == 2
    assert [json.loads(line)["case"] for line in result.stdout.splitlines()] == [str(CUT), str(wrong_case)]
    (line,) = result.stderr.splitlines()
    error = json.loads(line)
    assert error["error"] == "CaseFileError"
    assert error["case"] == str(broken_case)
    assert error["argument"].endswith("data_offsets")
    assert error["remedy"]
    people = call("verify", broken_case, CUT)
    assert people.exit_code == 2
    (line,) = people.stderr.splitlines()
    assert line.startswith(f"error: {broken_case}: ")
    assert "ok" in people.stdout


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    case = small_case()
    assert case.index_k is not None
    case.index_k[3, 5] = np.nan
    path = tmp_path / "nan.safetensors"
    write_case(case, path)
    result = call("verify", path)
    assert result.exit_code == 2
    assert "index_k[3, 5] = nan" in result.stderr
    assert str(path) in result.stderr


@pytest.mark.parametrize("command", ["demo", "score", "verify"])
@pytest.mark.parametrize("as_json", [False, True])
def test_missing_file_is_one_line_and_2(command: str, as_json: bool, tmp_path: Path) -> None:
    done = spawn(command, tmp_path / "none.safetensors", *(["--json"] if as_json else []))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "none.safetensors" in line
    assert "Traceback" not in line
    if as_json:
        assert json.loads(line)["argument"] == "path"


@pytest.mark.parametrize("words", [["demo"], ["doctor"], ["score", CUT], ["verify", CUT]])
def test_unknown_backend_is_named_with_the_known_ones(words: list[str]) -> None:
    result = call(*words, "--backend", "abacus")
    assert result.exit_code == 2
    for word in ("abacus", "cpu", "reference"):
        assert word in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["verify"],
        ["score"],
        ["abacus"],
        ["verify", CUT, "--nope"],
        ["score", CUT, "--order", "random"],
        ["score", CUT, "--topk", "many"],
        ["score", CUT, "--topk", "65"],
        ["score", CUT, "--topk", "0"],
        ["score", CUT, "--init-blocks", "-1"],
        ["verify", CUT, "--precision", "lax"],
    ],
)
def test_bad_usage_is_2(words: list[str]) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert result.stderr or result.stdout


def test_score_writes_what_the_case_expects(tmp_path: Path) -> None:
    out = tmp_path / "new" / "scores.safetensors"
    result = call("score", CODE, "--out", out, "--json")
    assert result.exit_code == 0
    fields = json.loads(result.stdout)
    assert (fields["rows"], fields["blocks"], fields["topk"], fields["out"]) == (512, 64, 16, str(out))
    tensors, case = load_file(out), read_case(CODE)
    assert sorted(tensors) == ["block_ids", "num_blocks", "scores"]
    assert case.expected_scores is not None
    assert case.expected_block_ids is not None
    assert (tensors["block_ids"] == case.expected_block_ids).all()
    assert (tensors["num_blocks"] == case.num_blocks_per_query()).all()
    np.testing.assert_allclose(tensors["scores"], case.expected_scores, rtol=1e-4, atol=1e-3)
    assert [entry.name for entry in out.parent.iterdir()] == [out.name]


def test_score_takes_other_options_than_the_cases(tmp_path: Path) -> None:
    def ids(*options: str) -> Any:
        out = tmp_path / "out.safetensors"
        assert call("score", CUT, "--out", out, *options).exit_code == 0
        return load_file(out)["block_ids"]

    case = read_case(CUT)
    last_block = case.num_blocks_per_query() - 1
    best, first = ids(), ids("--topk", "1")
    assert first.shape == (4, 27, 1)
    assert (first[..., 0] == best[..., 0]).all()
    assert (ids("--local-blocks", "1", "--topk", "1")[..., 0] == last_block).all()
    assert (ids("--init-blocks", "1", "--topk", "1") == 0).all()
    ascending = ids("--order", "block")
    assert (np.sort(np.where(best < 0, 99, best), axis=2) == np.where(ascending < 0, 99, ascending)).all()


def test_score_that_cannot_write_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for out in (tmp_path / "file" / "x.safetensors", tmp_path / "folder"):
        result = call("score", CUT, "--out", out)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]
    assert not list((tmp_path / "folder").iterdir())


def test_score_without_a_file_says_what_it_did() -> None:
    result = call("score", CUT)
    assert result.exit_code == 0
    assert "108 rows" in result.stdout


def test_file_name_of_any_bytes_does_not_steer_the_terminal(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/a\x1b[2J\nb\xff.safetensors")
    write_case(small_case(), path)
    done = spawn("verify", path, path + "x", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["case"] == path
    assert json.loads(done.stderr)["case"] == path + "x"
    people = spawn("verify", path, path + "x")
    assert people.returncode == 2
    assert "\x1b" not in people.stdout + people.stderr
    assert len(people.stderr.splitlines()) == 1
    assert "Traceback" not in people.stderr
