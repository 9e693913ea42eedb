"""``bench``: how many calls a second, and how long each takes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from client.failure import MISMATCH, one_line_errors, printable
from client.options import BackendOption, JsonOption, Precision, PrecisionOption, TokenOption, UrlOption

if TYPE_CHECKING:
    from indexer.case import Case


def bench(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case file.")],
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
    """
    from client.load import run_load
    from client.terminal import output, status
    from indexer.case import read_case
    from kernel.errors import InvalidArgumentError

    with one_line_errors(as_json, case), contextlib.ExitStack() as stack:
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


def _scorer(call: Case, backend: str, precision: Precision, scores: bool) -> tuple[str, Callable[[], object]]:
    from indexer.case_scorer import CaseScorer
    from indexer.config import IndexerConfig
    from indexer.scorer import IndexScorer

    config = IndexerConfig(
        num_index_heads=call.num_heads, num_pages=0, backend=backend, precision=precision.value
    )
    scorer = CaseScorer(IndexScorer(config))
    return scorer.backend, lambda: scorer.score(call, return_scores=scores)
