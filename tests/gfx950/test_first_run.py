"""``kernel first-run``: a part that fails, hangs or ends costs nothing but itself, and all is packed."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from client.commands import first_run as command
from client.first_run.parts import PARTS
from client.first_run.record import ARCHIVE, RECORD, TEXT
from client.first_run.run_part import run_part
from indexer.first_run import checks, speed
from indexer.first_run.__main__ import PARTS as OWN_PARTS
from indexer.first_run.counters import counters
from indexer.first_run.setting import Setting
from kernel.backends.flydsl import decode_layout
from kernel.backends.flydsl.backend import FlydslBackend
from tests.support.command import call, spawn
from tests.support.real_cases import CUT

ITEM = 'import json, os, sys, time; print(json.dumps({"name": "one", "ok": True}), flush=True); '
KERNEL_TRACE = "Kernel_Name,Start_Timestamp,End_Timestamp\ntopk_scan_k16,1000,3000\n"
ROCPROF = f"""#!{sys.executable}
import pathlib, subprocess, sys
words = sys.argv[1:]
own, run = words[: words.index("--")], words[words.index("--") + 1 :]
folder = pathlib.Path(own[own.index("--output-directory") + 1])
folder.mkdir(parents=True, exist_ok=True)
if "--kernel-trace" in own:
    (folder / "1_kernel_trace.csv").write_text({KERNEL_TRACE!r})
else:
    sys.exit("no such counter")
"""
"""Stands for rocprofv3: it traces, and knows none of the counters."""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.mark.parametrize(
    ("program", "exit_code", "error"),
    [
        (ITEM + "os.abort()", -6, "exit code -6"),
        (ITEM + "print('half an ite'); sys.exit('the GPU is gone')", 1, "the GPU is gone"),
        (ITEM + "time.sleep(60)", None, "stopped after 2 s"),
    ],
)
def test_what_a_part_printed_is_kept(program: str, exit_code: int | None, error: str) -> None:
    found = run_part("part", python(program), 2)
    assert not found.ok
    assert (found.exit_code, found.error) == (exit_code, error)
    assert found.items == [{"name": "one", "ok": True}]


def test_a_part_that_is_right() -> None:
    found = run_part("part", python(ITEM + "sys.stderr.write('a warning')"), 60)
    assert found.ok
    assert (found.exit_code, found.error, len(found.items)) == (0, None, 1)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What parts run in place of their own commands."""
    found: dict[str, str] = dict.fromkeys(PARTS, ITEM)
    monkeypatch.setattr(command, "command_of", lambda part, *_: python(found[part]))
    return found


def test_the_parts_around_one_that_fails_are_recorded_and_packed(
    programs: dict[str, str], tmp_path: Path
) -> None:
    programs["doctor"] = ITEM + "os.abort()"
    programs["check-topk"] = 'print(\'{"name": "topk_scan_k16", "ok": false}\'); raise SystemExit(1)'
    out = tmp_path / "new" / "folder"
    result = call("kernel", "first-run", "--out", out, "--backend", "flydsl-sim", CUT)
    assert result.exit_code == 1
    record = json.loads((out / RECORD).read_text())
    assert [part["name"] for part in record["parts"]] == list(PARTS)
    assert [part["name"] for part in record["parts"] if not part["ok"]] == ["doctor", "check-topk"]
    assert (record["ok"], record["simulated"]) == (False, True)
    assert "No time here is a measurement" in record["note"]
    text = (out / TEXT).read_text()
    assert text.startswith("SIMULATED")
    assert "doctor: FAILED, 1 items" in text
    assert "check-topk: WRONG (1 items), 1 items" in text
    assert "topk_scan_k16" in text
    assert "SIMULATED" in result.stdout
    assert ARCHIVE in result.stdout
    with tarfile.open(out / ARCHIVE) as archive:
        assert archive.getnames() == [TEXT, RECORD]
        packed = archive.extractfile(RECORD)
        assert packed is not None
        assert json.load(packed) == record
    assert sorted(path.name for path in out.iterdir()) == sorted([TEXT, RECORD, ARCHIVE])


def test_what_was_found_is_on_the_disk_before_the_next_part(programs: dict[str, str], tmp_path: Path) -> None:
    """A machine that has to be switched off loses the part that hung it."""
    seen = tmp_path / "seen"
    programs["verify"] = f"import shutil; shutil.copy({str(tmp_path / RECORD)!r}, {str(seen)!r})"
    words = ["--backend", "flydsl-sim", "--part", "doctor", "--part", "verify", str(CUT)]
    assert call("kernel", "first-run", "--out", tmp_path, *words).exit_code == 0
    assert [part["name"] for part in json.loads(seen.read_text())["parts"]] == ["doctor"]


def test_json_is_the_record(programs: dict[str, str], tmp_path: Path) -> None:
    words = ["--backend", "flydsl-sim", "--part", "verify", "--json"]
    result = call("kernel", "first-run", "--out", tmp_path, *words)
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert record == json.loads((tmp_path / RECORD).read_text())
    assert "too large to be interpreted" in record["parts"][0]["skipped"]


def test_what_cannot_run_is_said_before_any_work(programs: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    sim = ("--backend", "flydsl-sim")
    for words, said in (
        (("--out", tmp_path, "--part", "speed", *sim), "--part = speed: must be one of doctor, verify"),
        (("--out", file / "under", *sim), "Not a directory"),
        (("--out", file, *sim), "File exists"),
        (("--out", tmp_path), "backend = 'flydsl': PyTorch"),
    ):
        result = call("kernel", "first-run", *words)
        assert result.exit_code == 2, words
        assert said in result.stderr
    assert list(tmp_path.iterdir()) == [file]


def test_every_part_is_one_that_there_is() -> None:
    assert PARTS[2:] == tuple(OWN_PARTS)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("flydsl-sim", tmp_path)


def by_name(items: Iterator[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in items}


def test_a_check_tells_wrong_pages_and_goes_on(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    insert = FlydslBackend.insert

    def wrong(self: FlydslBackend, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        if keys.dtype == torch.float16:
            raise RuntimeError("a fault")
        insert(self, keys, pages, slots)
        if keys.dtype == torch.float32:
            pages[0, 0] ^= 1

    assert all(item["ok"] for item in checks.insert(setting))
    monkeypatch.setattr(FlydslBackend, "insert", wrong)
    found = by_name(checks.insert(setting))
    assert [item["ok"] for item in found.values()] == [True, False, False]
    assert found["float16"]["error"] == "RuntimeError: a fault"
    assert found["float32"]["wrong_bytes"] == 1


def test_both_layouts_are_timed_and_the_faster_one_is_named(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = by_name(speed.decode(setting))
    assert all(item["ok"] for item in found.values()), found
    assert found["device"]["copy_tbps"] > 0
    timed = [item for item in found.values() if "cold" in item]
    assert [item["layout"] for item in timed] == ["registers", "staged"] * 2
    for item in timed:
        assert item["warm"]["median_us"] > 0
        assert item["floor_us"] > 0
    last = found["the faster layout"]
    cold = {
        layout: sum(item["cold"]["median_us"] for item in timed if item["layout"] == layout)
        for layout in decode_layout.LAYOUTS
    }
    assert last["layout"] == min(cold, key=lambda layout: cold[layout])
    assert last["set"] == f"NVFP4_INDEXER_DECODE_LAYOUT={last['layout']}"
    assert last["measured"] is False


def test_counters_are_kept_kernel_by_kernel_and_a_missing_one_costs_no_trace(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (missing,) = counters(setting)
    assert missing["ok"] is None
    assert "rocprofv3 is not on the path" in missing["skipped"]
    program = tmp_path / "rocprofv3"
    program.write_text(ROCPROF)
    program.chmod(0o755)
    found = by_name(counters(setting))
    assert found["prefill, trace"]["ok"]
    assert "no such counter" in found["decode, counters"]["error"]
    assert found["decode, kernels"]["kernels"][0]["name"] == "topk_scan_k16"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_of_it_on_the_simulated_device(tmp_path: Path) -> None:
    """Every part as it is, through a rocprofv3 that runs what it is given."""
    program = tmp_path / "bin" / "rocprofv3"
    program.parent.mkdir()
    program.write_text(ROCPROF.replace('sys.exit("no such counter")', "subprocess.run(run, check=True)"))
    program.chmod(0o755)
    out = tmp_path / "out"
    path = f"{program.parent}:/usr/bin:/bin"
    done = spawn("kernel", "first-run", "--out", out, "--backend", "flydsl-sim", CUT, PATH=path)
    assert done.returncode == 0, done.stdout
    record = json.loads((out / RECORD).read_text())
    assert record["ok"]
    names = {item.get("name") for part in record["parts"] for item in part["items"]}
    assert {"topk_group_k16_b8192, order block", "staged, 4 heads", "float32", "prefill, kernels"} <= names
    with tarfile.open(out / ARCHIVE) as archive:
        assert "rocprof/prefill/1_kernel_trace.csv" in archive.getnames()
