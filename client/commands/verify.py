"""``verify``: compare a backend with the oracle and with what the cases expect."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from client.output import (
    FAILURE,
    MISMATCH,
    BackendOption,
    Cells,
    JsonOption,
    Precision,
    PrecisionOption,
    TokenOption,
    UrlOption,
    dumps,
    fits,
    one_line_errors,
    out_of_memory,
    output,
    printable,
    progress,
    report_failure,
)
from indexer.case import Case, read_case
from kernel.errors import IndexerError

if TYPE_CHECKING:
    from client.client import Client
    from indexer.verify import Verification
    from kernel.backends.base import Precision as PrecisionName

WIDE = 240
"""Columns that hold a row with a long file name, where no terminal sets the width."""


def verify(
    cases: Annotated[list[str], typer.Argument(metavar="CASE...", help="Case files.")],
    backend: BackendOption = "auto",
    precision: PrecisionOption = Precision.exact,
    findings: Annotated[
        int,
        typer.Option(
            min=0,
            help="Differences of an engine's result that --json tells, faults first; people are shown 12.",
        ),
    ] = 1000,
    url: UrlOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a backend with the oracle, and with a case's expected outputs where it has them.

    What an engine made of the call, where the case holds it, is judged as well: each difference is a legal
    tie, rounding, or a fault, and the fault that explains the engine's result is named.

    With --url the sidecar scores, and the oracle of this machine judges its answer.

    With --json, one object a line and case: case, backend, ok, rows, max_score_error, score_tolerance,
    topk_mismatches, seconds, unjudged_rows, not_finite, engine. ok is of all; engine is null for a case
    without an engine's result. Rows whose queries are not finite are not judged, but named, and ok is false.
    Score errors are in units of the cell's sum of |q_i k_i|; a mismatch is a row with other block ids than
    the right ones; a number that is not finite is a string; seconds are the backend's own, cold, or with
    --url those until the answer was here. A case that cannot be read is reported on stderr and does not stop
    the others; the exit code is then 2.
    """
    done, failed = [], False
    with contextlib.ExitStack() as stack:
        client = None
        if url is not None:
            from client.client import remote_client

            with one_line_errors(as_json):
                client = stack.enter_context(remote_client(url, token, backend, precision.value))
        bar = stack.enter_context(progress())
        task = bar.add_task("verify", total=len(cases))
        for name in cases:
            bar.update(task, description=printable(name))
            try:
                case = read_case(name)  # before torch is loaded, to refuse a bad file early
                if client is None:
                    from indexer.verify import verify_case

                    result = verify_case(
                        case, name, backend, precision=precision.value, max_findings=findings
                    )
                else:
                    result = _verify_remote(client, case, name, findings)
            except Exception as error:
                if not isinstance(error, IndexerError) and not out_of_memory(error):
                    raise
                report_failure(error, as_json, name)
                failed = True
            else:
                done.append(result)
                if as_json:
                    print(dumps(dataclasses.asdict(result)), flush=True)
            bar.advance(task)
    if done and not as_json:
        console, table = output(pipe_width=WIDE), _cells(done).table()
        console.print(table if fits(console, table) else _sentences(done))
        from client.engine_report import print_engine, print_not_judged

        for result in done:
            if result.unjudged_rows:
                print_not_judged(console, result.case, result.unjudged_rows, result.not_finite)
            if result.engine is not None:
                print_engine(console, result.case, result.engine)
    if failed:
        raise typer.Exit(FAILURE)
    if not all(result.ok for result in done):
        raise typer.Exit(MISMATCH)


def _verify_remote(client: Client, case: Case, name: str, findings: int) -> Verification:
    from client.errors import BadReplyError
    from indexer.verify import finite_rows, with_finite_queries

    asked = with_finite_queries(case, finite_rows(case))
    began = time.perf_counter()
    reply = client.score_case(asked, order="score")
    seconds = time.perf_counter() - began
    if reply.scores is None or reply.precision not in [known.value for known in Precision]:
        raise BadReplyError(f"precision = {reply.precision!r}: no scores of a known precision came back")
    from indexer.verify import Answer, judge

    answer = Answer(
        scores=reply.scores,
        block_ids=reply.block_ids,
        num_blocks=reply.num_blocks,
        backend=reply.backend,
        precision=cast("PrecisionName", reply.precision),
    )
    return judge(case, name, answer, seconds, findings)


def _cells(done: list[Verification]) -> Cells:
    rows = [
        (
            Text("ok", "green") if result.backend_ok else Text("WRONG", "bold red"),
            printable(result.case),
            printable(result.backend),
            str(result.rows),
            f"{result.max_score_error:.2g} / {result.score_tolerance:.2g}",
            str(result.topk_mismatches),
            f"{result.seconds:.2f}",
        )
        for result in done
    ]
    columns = ("", "case", "backend", "rows", "error / allowed", "wrong rows", "seconds")
    return Cells(columns, rows, words=(0, 1, 2))


def _sentences(done: list[Verification]) -> Group:
    """The rows of a table that is too wide: a name alone on its line is not cut into pieces."""
    parts: list[Text | Padding] = []
    for result in done:
        word = Text("ok ", "green") if result.backend_ok else Text("WRONG ", "bold red")
        word.overflow = "fold"
        parts.append(word.append(printable(result.case), "default not bold"))
        facts = (
            f"{printable(result.backend)}, {result.rows} rows, {result.topk_mismatches} wrong, error "
            f"{result.max_score_error:.2g} of {result.score_tolerance:.2g} allowed, {result.seconds:.2f} s"
        )
        parts.append(Padding(Text(facts), (0, 0, 0, 3)))
    return Group(*parts)
