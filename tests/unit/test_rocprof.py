"""What rocprofv3 writes, read by its column names."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from client.rocprof import read_rocprof, rocprof_command
from kernel.errors import InvalidArgumentError

TRACE = (
    '"Kind","Agent_Id","Queue_Id","Kernel_Id","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp"\n'
    '"KERNEL_DISPATCH",1,1,16,"score_prefill_h4(float*, int)",1,1000,4000\n'
    '"KERNEL_DISPATCH",1,1,16,"score_prefill_h4(float*, int)",2,5000,12000\n'
    '"KERNEL_DISPATCH",1,1,17,"topk",3,12000,12500\n'
)
COUNTERS = (
    '"Dispatch_Id","Grid_Size","Kernel_Name","Counter_Name","Counter_Value"\n'
    '1,131072,"topk","SQ_WAVES",512\n2,131072,"topk","SQ_WAVES",514\n1,131072,"insert","SQ_BUSY_CYCLES",1e3\n'
)


def test_times_and_counters_meet_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "host" / "123"
    folder.mkdir(parents=True)
    (folder / "1_kernel_trace.csv").write_text(TRACE)
    (folder / "2_counter_collection.csv").write_text(COUNTERS)
    (folder / "agent_info.csv").write_text("Node_Id,Name\n0,gfx950\n")
    score, topk, insert = read_rocprof(tmp_path)
    assert (score.name, score.dispatches) == ("score_prefill_h4(float*, int)", 2)
    assert (score.total_us, score.median_us, score.min_us) == (10.0, 5.0, 3.0)
    assert (topk.total_us, topk.counters) == (0.5, {"SQ_WAVES": 513.0})
    assert (insert.dispatches, insert.counters) == (1, {"SQ_BUSY_CYCLES": 1000.0})


@pytest.mark.parametrize(
    "text", ["", "Name,Value\n1,2\n", TRACE.replace("4000", "soon"), TRACE.split("\n")[0] + "\n\x00\n"]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "kernel_trace.csv").write_text(text)
    with pytest.raises(InvalidArgumentError, match="--rocprof"):
        read_rocprof(tmp_path)
    with pytest.raises(InvalidArgumentError, match="--rocprof"):
        read_rocprof(tmp_path / "missing")


def test_the_command_is_one_line_for_a_shell() -> None:
    words = shlex.split(rocprof_command("a case.safetensors", "out folder"))
    assert words.count("rocprofv3") == 2
    assert words.count("a case.safetensors") == 2
    assert "out folder" in words
    assert words.count("--") == 2
