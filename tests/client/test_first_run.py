"""``kernel first-run``: a part that fails, hangs or ends costs nothing but itself, and all is packed."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from client.cli import app
from client.commands import first_run as command
from client.first_run import PARTS, checks, speed
from client.first_run import record as record_of_run
from client.first_run.__main__ import OWN_PARTS
from client.first_run.record import ARCHIVE, OWN_NAMES, RECORD, TEXT, Record, part_lines
from client.first_run.run_part import PartResult, run_part
from client.first_run.setting import Setting
from client.first_run.speed import StepTimes, counters, faster_layout, floor_fields, host_fields
from indexer.case.codec import write_atomically
from indexer.case.container import Buffer
from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.backend import FlydslBackend
from tests.support.cases import CUT
from tests.support.process import ForkedProcess, call, spawn

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
        (("--out", tmp_path, file, "--part", "doctor", *sim), f"CASE = {file}: is read by the part verify"),
        (("--out", file / "under", *sim), f"--out = {file / 'under'}: cannot be written: Not a directory"),
        (
            ("--out", file, *sim),
            f"--out = {file}: cannot be written: File exists; make room, or name another",
        ),
    ):
        result = call("kernel", "first-run", *words)
        assert result.exit_code == 2, words
        assert said in result.stderr
    assert list(tmp_path.iterdir()) == [file]


def test_a_disk_that_fills_up_is_named_and_what_was_found_before_stays(
    programs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[Path] = []

    def filling(buffers: Iterable[Buffer], path: Path) -> None:
        writes.append(path)
        if len(writes) == 3:  # after the second part
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(buffers, path)

    monkeypatch.setattr(record_of_run, "write_atomically", filling)
    words = ("--backend", "flydsl-sim", "--part", "doctor", "--part", "check-topk")
    result = call("kernel", "first-run", "--out", tmp_path, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    remedy = "make room, or name another folder with --out"
    full = f"error: --out = {tmp_path}: cannot be written: No space left on device; {remedy}\n"
    assert result.stderr == full
    assert [part["name"] for part in json.loads((tmp_path / RECORD).read_text())["parts"]] == ["doctor"]


@pytest.mark.parametrize("name", OWN_NAMES)
def test_the_folder_of_an_earlier_run_is_refused(name: str, programs: dict[str, str], tmp_path: Path) -> None:
    """Its text and archive would be taken for the new run's, and its rocprof files packed with them."""
    (tmp_path / name).write_text("earlier")
    result = call("kernel", "first-run", "--out", tmp_path, "--backend", "flydsl-sim", "--json")
    assert result.exit_code == 2
    error = json.loads(result.stderr)
    assert (error["error"], error["argument"], error["value"]) == (
        "InvalidArgumentError",
        "--out",
        str(tmp_path),
    )
    assert name in error["limit"]
    assert "another folder" in error["remedy"]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "earlier")]


@pytest.mark.parametrize(
    ("backend", "environment", "said"),
    [
        ("flydsl", {}, "PyTorch"),
        (
            "flydsl-sim",
            {geometry.VARIABLE: "sideways"},
            f"{geometry.VARIABLE}=sideways is no layout",
        ),
    ],
)
def test_a_backend_that_cannot_run_is_recorded_with_what_the_machine_has(
    backend: str, environment: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = call("kernel", "first-run", "--out", tmp_path, "--backend", backend)
    assert result.exit_code == 1
    record = json.loads((tmp_path / RECORD).read_text())
    assert (record["ok"], record["finished"], record["planned"]) == (False, False, list(PARTS))
    assert said in record["stopped"]
    (doctor,) = record["parts"]
    assert doctor["ok"]
    assert any(backend == found["name"] for found in doctor["items"][0]["backends"])
    with tarfile.open(tmp_path / ARCHIVE) as archive:
        assert archive.getnames() == [TEXT, RECORD]
    text = (tmp_path / TEXT).read_text()
    assert said in text
    assert "parts that did not run: verify, check-cases" in text


HANGING = """import pathlib, subprocess; child = subprocess.Popen(["sleep", "60"])
pathlib.Path(sys.argv[1], "new").write_text(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + "/new", sys.argv[1] + "/pids"); time.sleep(60)
"""


def run_until_stopped(folder: str, ignored: Sequence[signal.Signals]) -> None:
    """The command with parts that hang."""
    # the tests may run under nohup, or in a script's background, where a shell ignores SIGINT
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    command.command_of = lambda *_: [*python(ITEM + HANGING), folder]  # type: ignore[attr-defined]
    parts = ("--part", "doctor", "--part", "counters")
    app(["kernel", "first-run", "--out", f"{folder}/out", "--backend", "flydsl-sim", *parts])


def hanging(folder: Path, ignored: Sequence[signal.Signals] = ()) -> tuple[ForkedProcess, list[int]]:
    """The command while a part of it runs, and the processes of the part."""
    process = ForkedProcess(run_until_stopped, str(folder), ignored)
    deadline = time.monotonic() + 60
    while not (folder / "pids").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, list(map(int, (folder / "pids").read_text().split()))


def runs(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_stopped_kills_its_part_and_packs_what_it_found(
    number: signal.Signals, tmp_path: Path
) -> None:
    process, pids = hanging(tmp_path)
    earlier = json.loads((tmp_path / "out" / RECORD).read_text())
    assert (earlier["ok"], earlier["finished"]) == (False, False)
    assert earlier["planned"] == ["doctor", "counters"]
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not any(map(runs, pids))
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert (record["ok"], record["finished"]) == (False, False)
    assert record["stopped"] == f"interrupted by {number.name}"
    (part,) = record["parts"]
    assert (part["ok"], part["exit_code"], part["error"]) == (False, None, f"interrupted by {number.name}")
    assert part["items"] == [{"name": "one", "ok": True}]
    with tarfile.open(tmp_path / "out" / ARCHIVE) as archive:
        packed = archive.extractfile(RECORD)
        assert packed is not None
        assert json.load(packed) == record
    text = (tmp_path / "out" / TEXT).read_text()
    assert f"NOT FINISHED: interrupted by {number.name}; parts that did not run: counters." in text


def test_a_signal_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    process, pids = hanging(tmp_path, ignored=[signal.SIGHUP])
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert runs(pids[0])
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM


def test_the_text_has_a_line_of_each_error() -> None:
    items: list[dict[str, Any]] = [
        {"name": "good", "ok": True},
        {"name": "one", "ok": False, "error": "RuntimeError: a\nfault"},
        {"name": "two", "ok": False, "rows": 9, "wrong_rows": 3},
    ]
    errors = json.dumps({"error": "CaseFileError", "message": "a.safetensors: garbled", "remedy": "none"})
    assert part_lines(PartResult("check", False, 1.0, 1, items, "a traceback")) == [
        "check: WRONG (2 items), 3 items, 1 s",
        "  one: RuntimeError: a fault",
        "  two: wrong_rows 3",
    ]
    assert part_lines(PartResult("verify", False, 1.0, 2, [], f"{errors}\n{errors.replace('a.', 'b.')}")) == [
        "verify: FAILED, 0 items, 1 s",
        "  a.safetensors: garbled",
        "  b.safetensors: garbled",
    ]
    assert part_lines(PartResult("speed", False, 9.0, None, [], "stopped after 9 s\nx\nthe last")) == [
        "speed: FAILED, 0 items, 9 s",
        "  stopped after 9 s",
        "  the last",
    ]


def test_the_layouts_differ_only_beyond_the_spread() -> None:
    alike = faster_layout(
        [
            StepTimes("1 x 1 x 8", {"registers": 100.0, "staged": 150.0}),
            StepTimes("1 x 4 x 8", {"registers": 200.0, "staged": 147.0}),
        ]
    )
    assert (alike["layout"], "set" in alike, alike["percent"]) == (None, False, pytest.approx(1.0))
    assert [step["layout"] for step in alike["steps"]] == ["registers", "staged"]
    assert [step["percent"] for step in alike["steps"]] == pytest.approx([100 / 3, 26.5])
    apart = faster_layout([StepTimes("1 x 1 x 8", {"registers": 100.0, "staged": 97.0})])
    assert (apart["layout"], apart["set"]) == ("staged", "NVFP4_INDEXER_DECODE_LAYOUT=staged")
    part = PartResult("speed-decode", True, 1.0, 0, [{"name": "the faster layout", "ok": True, **apart}])
    record = Record("flydsl", {}, {}, ["speed-decode"], [part])
    assert "Decode takes 3.0 % less time with NVFP4_INDEXER_DECODE_LAYOUT=staged" in record.text()
    assert "  1 x 1 x 8: registers 100.0 us, staged 97.0 us: staged is faster (3.0 %)" in record.text()
    part.items[0].update(alike)
    assert "Decode: no difference between the layouts (1.0 %)" in record.text()


def test_a_floor_is_that_of_fp8_products_or_none() -> None:
    assert floor_fields(2e-6, 8e6, 2e12) == {"memory_us": 2.0, "floor_us": 4.0, "bound_by": "compute"}
    assert floor_fields(2e-6, 8e6, 8e12) == {"memory_us": 2.0, "floor_us": 2.0, "bound_by": "memory"}
    assert floor_fields(2e-6, 8e6, None) == {"memory_us": 2.0}
    assert floor_fields(2e-6, 0.0, None) == {"memory_us": 2.0, "floor_us": 2.0, "bound_by": "memory"}


def test_a_host_that_is_behind_is_told() -> None:
    assert host_fields([]) == {}
    ahead = host_fields([(1e-4, 4e-4), (9e-4, 4e-4), (2e-4, 4e-4)])
    assert (ahead["enqueue_us"], ahead["wait_us"]) == (pytest.approx(200), pytest.approx(400))
    assert not ahead["host_bound"]
    assert host_fields([(5e-4, 4e-4)])["host_bound"]


def test_commands_of_a_part_end_before_it_does() -> None:
    """Four of them, and time to make their cases."""
    assert 4 * speed._COMMAND_TIMEOUT_S <= 0.9 * command.PART_TIMEOUT_S


def test_a_command_that_takes_too_long_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a process of its own outlives it, and holds what it prints to."""
    monkeypatch.setattr(speed, "_COMMAND_TIMEOUT_S", 1)
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        speed._run(["sh", "-c", "sleep 5 & sleep 5"])
    assert time.monotonic() - began < 4


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
        assert item["memory_us"] > 0
        assert not {"floor_us", "bound_by"} & item.keys()  # no rate of an fp8 product on a CPU
        assert "times_floor" not in item["cold"]
    last = found["the faster layout"]
    cold = {
        layout: sum(item["cold"]["median_us"] for item in timed if item["layout"] == layout)
        for layout in geometry.LAYOUTS
    }
    assert last["cold_us"] == pytest.approx(cold)
    assert [step["shape"] for step in last["steps"]] == ["2 x 1 x 300", "2 x 1 x 300, maxima"]
    assert not any(item["measured"] for item in found.values())


def test_counters_are_kept_kernel_by_kernel_and_a_missing_one_costs_no_trace(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (missing,) = counters(setting)
    assert missing["ok"] is None
    assert "rocprofv3 is not on the path" in missing["skipped"]
    again = f"nvfp4-indexer kernel first-run --out {tmp_path}/counters --backend flydsl-sim --part counters"
    assert again in missing["skipped"]
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
