"""``verify``: compare a backend with the oracle and with what the cases expect."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from client.failure import FAILURE, MISMATCH, printable, report
from client.options import BackendOption, JsonOption, Precision, PrecisionOption

WIDE = 240
"""Columns that hold a row with a long file name, where no terminal sets the width."""

if TYPE_CHECKING:
    from indexer.verify import Verification


def verify(
    cases: Annotated[list[str], typer.Argument(metavar="CASE...", help="Case files.")],
    backend: BackendOption = "auto",
    precision: PrecisionOption = Precision.exact,
    as_json: JsonOption = False,
) -> None:
    """Compare a backend with the oracle, and with a case's expected outputs where it has them.

    With --json, one object a line and case: case, backend, ok, rows, max_score_error, score_tolerance,
    topk_mismatches, seconds. Score errors are in units of the cell's sum of |q_i k_i|; a mismatch is a row
    with other block ids than the right ones; seconds are the backend's own, cold. A case that cannot be read
    is reported on stderr and does not stop the others; the exit code is then 2.
    """
    from client.terminal import output, progress
    from indexer.case import read_case
    from kernel.errors import IndexerError

    done, failed = [], False
    with progress() as bar:
        task = bar.add_task("verify", total=len(cases))
        for name in cases:
            bar.update(task, description=printable(name))
            try:
                case = read_case(name)  # a bad file is told before torch is loaded
                from indexer.verify import verify_case

                result = verify_case(case, name, backend, precision=precision.value)
            except IndexerError as error:
                report(error, as_json, name)
                failed = True
            else:
                done.append(result)
                if as_json:
                    print(json.dumps(dataclasses.asdict(result)), flush=True)
            bar.advance(task)
    if done and not as_json:
        output(pipe_width=WIDE).print(_table(done))
    if failed:
        raise typer.Exit(FAILURE)
    if not all(result.ok for result in done):
        raise typer.Exit(MISMATCH)


def _table(done: list[Verification]) -> object:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("case", overflow="fold")
    table.add_column("backend")
    for column in ("rows", "error / allowed", "wrong rows", "seconds"):
        table.add_column(column, justify="right")
    for result in done:
        table.add_row(
            Text("ok", "green") if result.ok else Text("WRONG", "bold red"),
            Text(printable(result.case)),
            result.backend,
            str(result.rows),
            f"{result.max_score_error:.2g} / {result.score_tolerance:.2g}",
            str(result.topk_mismatches),
            f"{result.seconds:.2f}",
        )
    return table
