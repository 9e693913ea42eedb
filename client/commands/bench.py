"""``bench``: how many calls a second, and how long each takes; or what the GPU benchmark measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.failure import MISMATCH, one_line_errors, printable
from client.options import BackendOption, JsonOption, Precision, PrecisionOption, TokenOption, UrlOption

if TYPE_CHECKING:
    from indexer.case import Case


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
    from client.load import run_load
    from client.terminal import output, status
    from indexer.case import read_case
    from kernel.errors import InvalidArgumentError

    if report is not None:
        _show(report, as_json)
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
                raise InvalidArgumentError(
                    "--clients",
                    clients,
                    "one caller at a time runs here",
                    "leave out --clients, or name a --url",
                )
            where, score = _scorer(call, backend, precision, scores)
        else:
            from client.remote import remote_client

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
            f"{load.errors} failed{': ' if load.errors else ''}{printable(load.first_error)}",
            markup=False,
        )
    if load.errors:
        raise typer.Exit(MISMATCH)


def _show(path: Path, as_json: bool) -> None:
    from client.benchmark_report import print_report, read_report
    from client.terminal import output

    with one_line_errors(as_json):
        report = read_report(path)
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        print_report(report, output())


def _scorer(call: Case, backend: str, precision: Precision, scores: bool) -> tuple[str, Callable[[], object]]:
    from indexer.case_scorer import CaseScorer
    from indexer.config import IndexerConfig
    from indexer.scorer import IndexScorer

    config = IndexerConfig(
        num_index_heads=call.num_heads, num_pages=0, backend=backend, precision=precision.value
    )
    scorer = CaseScorer(IndexScorer(config))
    return scorer.backend, lambda: scorer.score(call, return_scores=scores)
