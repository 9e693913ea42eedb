"""rocprofv3 on a GPU machine: the command that traces a case, and what its CSV files say. Imports no torch.

The columns are found by their names, so files of several ROCm versions can be read: ``Kernel_Name``,
``Start_Timestamp`` and ``End_Timestamp`` (nanoseconds) of ``*_kernel_trace.csv``, and ``Counter_Name`` and
``Counter_Value`` of ``*_counter_collection.csv``.
"""

from __future__ import annotations

import csv
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel.errors import InvalidArgumentError

COUNTERS = ("SQ_WAVES", "SQ_BUSY_CYCLES", "SQ_INSTS_VALU", "SQ_INSTS_MFMA", "SQ_LDS_BANK_CONFLICT")
"""Counters that one pass can collect together and that the kernel's report predicts."""
_TIMES = ("Kernel_Name", "Start_Timestamp", "End_Timestamp")
_COUNTS = ("Kernel_Name", "Counter_Name", "Counter_Value")


@dataclass(frozen=True)
class TracedKernel:
    """A kernel over all its dispatches in a trace.

    Attributes:
        name: as the compiler named it.
        dispatches: launches.
        total_us: microseconds of all of them.
        median_us: of one.
        min_us: of the fastest.
        counters: mean of each counter over the dispatches that have it.
    """

    name: str
    dispatches: int
    total_us: float
    median_us: float
    min_us: float
    counters: dict[str, float]


def rocprof_command(case: str, folder: str = "rocprof") -> str:
    """The command line that traces a profile of a case and collects :data:`COUNTERS`."""
    run = ["nvfp4-indexer", "profile", case, "--backend", "flydsl", "--cache", "warm"]
    return " && ".join(map(shlex.join, rocprof_commands(run, folder)))


def rocprof_commands(run: list[str], folder: str) -> tuple[list[str], list[str]]:
    """The command that traces another one's kernels, and the one that collects :data:`COUNTERS`."""
    output = ["--output-format", "csv", "--output-directory", folder, "--", *run]
    return ["rocprofv3", "--kernel-trace", *output], ["rocprofv3", "--pmc", *COUNTERS, *output]


def read_rocprof(folder: Path) -> tuple[TracedKernel, ...]:
    """Read what rocprofv3 wrote to a folder, or one of its CSV files; kernels of most time first.

    Raises:
        InvalidArgumentError: there is no such file, or one that is not as rocprofv3 writes it.
    """
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.csv"))
    times: dict[str, list[float]] = {}
    counts: dict[str, dict[str, list[float]]] = {}
    for file in files:
        for row in _rows(file):
            name = row["Kernel_Name"]
            if "Counter_Name" in row:
                values = counts.setdefault(name, {}).setdefault(row["Counter_Name"], [])
                values.append(_number(file, row, "Counter_Value"))
            else:
                start, end = (_number(file, row, column) for column in _TIMES[1:])
                times.setdefault(name, []).append((end - start) / 1e3)
    if not times and not counts:
        limit = "holds no kernel trace or counters of rocprofv3"
        raise InvalidArgumentError("--rocprof", folder, limit, "pass its --output-directory")
    kernels = [_kernel(name, times.get(name, []), counts.get(name, {})) for name in {**times, **counts}]
    return tuple(sorted(kernels, key=lambda kernel: (-kernel.total_us, kernel.name)))


def _rows(file: Path) -> Iterator[dict[str, str]]:
    """Rows of a CSV file that has the columns of either kind; none of another one."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            columns = set(reader.fieldnames or ())
            if set(_COUNTS) <= columns or set(_TIMES) <= columns:
                yield from reader
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgumentError("--rocprof", file, f"cannot be read: {error}", "trace again") from error


def _number(file: Path, row: dict[str, str], column: str) -> float:
    try:
        return float(row[column])
    except (TypeError, ValueError) as error:
        limit = f"{column} must be a number in {file}"
        raise InvalidArgumentError("--rocprof", row[column], limit, "trace again") from error


def _kernel(name: str, times: list[float], counts: dict[str, list[float]]) -> TracedKernel:
    return TracedKernel(
        name=name,
        dispatches=len(times) or max(len(values) for values in counts.values()),
        total_us=sum(times),
        median_us=statistics.median(times) if times else 0.0,
        min_us=min(times, default=0.0),
        counters={counter: statistics.fmean(values) for counter, values in sorted(counts.items())},
    )
