"""``bench --report``: the table of what the GPU benchmark measured, on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from client.cli import app
from client.commands.bench import BenchmarkReport, Measured, read_report

REPORT = BenchmarkReport(
    device="a GPU",
    torch="2.11.0",
    rounds=15,
    measured=[
        Measured("score H=4 131072", "fast", 0.952, 1117.6, "TFLOP/s"),
        Measured("copy of 1 GiB", "", 0.5, 4.25, "TB/s"),
    ],
    peers={"score H=4 131072": (2.77, 1.29)},
)


def test_a_written_report_is_read_and_shown(tmp_path: Path) -> None:
    """Every line, its rate, and how many times the peers' speed it has."""
    path = tmp_path / "report.json"
    REPORT.write(path)
    assert read_report(path) == REPORT
    shown = CliRunner().invoke(app, ["bench", "--report", str(path)])
    assert shown.exit_code == 0
    for word in ("a GPU", "score H=4 131072", "1118 TFLOP/s", "4.25 TB/s", "2.91", "1.36"):
        assert word in shown.stdout
    as_json = CliRunner().invoke(app, ["bench", "--report", str(path), "--json"])
    assert json.loads(as_json.stdout)["measured"][1]["milliseconds"] == 0.5


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    """Other JSON, no JSON, no file, and neither a case nor a report: exit code 2 and the remedy."""
    for name, text in (("other.json", '{"measured": [1]}'), ("list.json", "[]"), ("text.json", "no JSON")):
        path = tmp_path / name
        path.write_text(text)
        refused = CliRunner().invoke(app, ["bench", "--report", str(path)])
        assert refused.exit_code == 2
        assert "bench_gpu" in refused.stderr
    assert CliRunner().invoke(app, ["bench", "--report", str(tmp_path / "none")]).exit_code == 2
    refused = CliRunner().invoke(app, ["bench"])
    assert refused.exit_code == 2
    assert "--report" in refused.stderr
