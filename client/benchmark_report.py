"""The report of a benchmark of the GPU kernels: its file, and the table that shows it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kernel.errors import InvalidArgumentError


@dataclass(frozen=True)
class Measured:
    """One line of the report."""

    name: str
    precision: str
    milliseconds: float
    rate: float
    unit: str
    """TFLOP/s of the visible blocks, or TB/s of the bytes that have to be moved."""


@dataclass(frozen=True)
class BenchmarkReport:
    """What a benchmark measured, on what."""

    device: str
    torch: str
    rounds: int
    measured: list[Measured]
    peers: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Milliseconds of other kernels for a line's work, with bfloat16 and with fp8 keys."""

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_report(path: Path) -> BenchmarkReport:
    """Read a report.

    Raises:
        InvalidArgumentError: the file holds no report.
        OSError: it cannot be read.
    """
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        lines = [Measured(**line) for line in fields.pop("measured")]
        peers = {name: (float(bf16), float(fp8)) for name, (bf16, fp8) in fields.pop("peers").items()}
        return BenchmarkReport(**fields, measured=lines, peers=peers)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidArgumentError(
            "--report",
            str(path),
            "holds no report of a benchmark",
            "name a file that `python -m tests.benchmarks.bench_gpu --json FILE` wrote",
        ) from error


def print_report(report: BenchmarkReport, console: Console) -> None:
    """One table: times, rates and how many times the peers' speed."""
    table = Table(title=f"triton on {report.device} (torch {report.torch}), medians of {report.rounds}, cold")
    for column in ("what", "precision", "ms", "rate", "x bf16 peer", "x fp8 peer"):
        table.add_column(column, justify="left" if column in ("what", "precision") else "right")
    for line in report.measured:
        peers = [f"{peer / line.milliseconds:.2f}" for peer in report.peers.get(line.name, ())] or ["", ""]
        rate = f"{line.rate:.0f} {line.unit}" if line.rate > 10 else f"{line.rate:.2f} {line.unit}"
        table.add_row(line.name, line.precision, f"{line.milliseconds:.4f}", rate, *peers)
    console.print(table)
