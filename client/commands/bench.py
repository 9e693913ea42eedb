"""``bench``: how many calls a second, and how long each takes; or what the GPU benchmark measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from client.commands.profile import case_scorer
from client.output import (
    MISMATCH,
    BackendOption,
    Cells,
    JsonOption,
    Precision,
    PrecisionOption,
    TokenOption,
    UrlOption,
    one_line_errors,
    output,
    printable,
    status,
)
from indexer.case import read_case
from kernel.errors import InvalidArgumentError


def bench(
    case: Annotated[str | None, typer.Argument(metavar="[CASE]", help="A case file.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show the table of this report of the GPU benchmark instead."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Length of the measurement.")] = 5.0,
    clients: Annotated[
        int, typer.Option(min=1, max=256, help="Callers at a time; more than one needs --url.")
    ] = 1,
    scores: Annotated[bool, typer.Option("--scores", help="Ask for the scores, too.")] = False,
    backend: BackendOption = "auto",
    precision: PrecisionOption = Precision.exact,
    url: UrlOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a recorded call over and over: calls a second, and their latencies.

    Here a call is insert, score and select; with --url it is the whole request, from the file's arrays to the
    answer's. Calls that a busy sidecar refuses are waited out, and count with the wait. Exit code 1 if a call
    failed.

    With --report, nothing is measured: the table of a file that the benchmark of the GPU kernels
    (tests/benchmarks/bench_gpu.py) wrote is shown.
    """
    if report is not None:
        with one_line_errors(as_json):
            found = read_report(report)
        if as_json:
            print(json.dumps(dataclasses.asdict(found)))
        else:
            print_report(found, output())
        return
    with one_line_errors(as_json, case), contextlib.ExitStack() as stack:
        if case is None:
            raise InvalidArgumentError(
                "CASE", None, "is missing", "name a case file, or a --report to be shown"
            )
        on_step = stack.enter_context(status())
        call = dataclasses.replace(
            read_case(case), expected_scores=None, expected_block_ids=None, engine=None
        )
        if url is None:
            if clients > 1:
                limit = "one caller at a time runs here"
                raise InvalidArgumentError(
                    "--clients", clients, limit, "leave out --clients, or name a --url"
                )
            scorer = case_scorer(call, backend, precision.value)
            where = scorer.backend

            def score() -> object:
                return scorer.score(call, return_scores=scores)

        else:
            from client.client import remote_client

            client = stack.enter_context(remote_client(url, token, backend, precision.value))
            where = client.info().backend

            def score() -> object:
                return client.score_case(call, return_scores=scores)

        on_step("warming up")
        score()
        on_step(f"measuring for {seconds:g} s")
        load = run_load(score, clients, seconds)
    if as_json:
        fields = {
            "case": case,
            "backend": where,
            "clients": clients,
            "rows": call.rows,
            "calls_per_second": load.calls_per_second,
            "rows_per_second": load.calls_per_second * call.rows,
            **dataclasses.asdict(load),
        }
        print(json.dumps(fields))
    else:
        output().print(
            f"{printable(case)} ({printable(where)}, {clients} at a time): {load.calls} calls in "
            f"{load.seconds:.1f} s, {load.calls_per_second:,.1f} calls/s, "
            f"{load.calls_per_second * call.rows:,.0f} rows/s; "
            f"p50 {load.p50_ms:.2f} ms, p90 {load.p90_ms:.2f} ms, p99 {load.p99_ms:.2f} ms; "
            f"{load.errors} failed{': ' if load.errors else ''}{printable(load.first_error)}"
        )
    if load.errors:
        raise typer.Exit(MISMATCH)


# ---- Load: one call over and over, from several threads ----


@dataclass(frozen=True)
class Load:
    """The outcome of a load.

    Attributes:
        calls: calls that succeeded.
        errors: calls that failed.
        seconds: from the first call's start to the last one's end.
        p50_ms: median latency.
        p90_ms: 90th percentile.
        p99_ms: 99th percentile.
        first_error: message of the first failure; empty if there was none.
    """

    calls: int
    errors: int
    seconds: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    first_error: str

    @property
    def calls_per_second(self) -> float:
        """Calls that succeeded, a second."""
        return self.calls / self.seconds if self.seconds else 0.0


def run_load(score: Callable[[], object], threads: int, seconds: float) -> Load:
    """Calls ``score`` in a loop from each of some threads.

    Args:
        score: one call; may raise.
        threads: callers at a time.
        seconds: time after which no further call starts.
    """
    latencies: list[float] = []
    failures: list[Exception] = []
    began = time.perf_counter()

    def work() -> None:
        # A failure does not end the load, but a server that is gone must not get a million calls.
        failed = 0
        while (started := time.perf_counter()) - began < seconds and failed < 10:
            try:
                score()
            except Exception as error:
                failures.append(error)
                failed += 1
            else:
                latencies.append(time.perf_counter() - started)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed = time.perf_counter() - began
    latencies.sort()
    p50, p90, p99 = (1e3 * _quantile(latencies, part) for part in (0.5, 0.9, 0.99))
    first_error = str(failures[0]) if failures else ""
    return Load(len(latencies), len(failures), elapsed, p50, p90, p99, first_error)


def _quantile(ordered: list[float], part: float) -> float:
    """Returns the least value that a share ``part`` of all do not exceed; 0 of none."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


# ---- Report of the GPU benchmark ----


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
    """The measurements of a GPU benchmark."""

    device: str
    torch: str
    rounds: int
    measured: list[Measured]
    peers: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By a line's name: milliseconds of other kernels for its work, with bfloat16 and with fp8 keys."""

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
    """Prints times, rates and the speedup over the peers."""
    rows = []
    for line in report.measured:
        speedups = [f"{peer / line.milliseconds:.2f}" for peer in report.peers.get(line.name, ())]
        rate = f"{line.rate:.0f} {line.unit}" if line.rate > 10 else f"{line.rate:.2f} {line.unit}"
        rows.append((line.name, line.precision, f"{line.milliseconds:.4f}", rate, *speedups))
    cells = Cells(("what", "precision", "ms", "rate", "x bf16 peer", "x fp8 peer"), rows, words=(0, 1))
    title = f"triton on {report.device} (torch {report.torch}), medians of {report.rounds}, cold"
    console.print(cells.table(title))
