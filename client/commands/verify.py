"""``verify``: compare a backend with the oracle and with what the cases expect."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from client.failure import FAILURE, MISMATCH, out_of_memory, printable, report
from client.options import BackendOption, JsonOption, Precision, PrecisionOption

WIDE = 240
"""Columns that hold a row with a long file name, where no terminal sets the width."""
MOST_COLUMNS = 1 << 16
"""Columns that hold any row."""

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

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
            except Exception as error:
                if not isinstance(error, IndexerError) and not out_of_memory(error):
                    raise
                report(error, as_json, name)
                failed = True
            else:
                done.append(result)
                if as_json:
                    print(json.dumps(dataclasses.asdict(result)), flush=True)
            bar.advance(task)
    if done and not as_json:
        console, table = output(pipe_width=WIDE), _table(done)
        unfolded = console.measure(table, options=console.options.update(max_width=MOST_COLUMNS))
        console.print(table if unfolded.maximum <= console.width else _sentences(done))
    if failed:
        raise typer.Exit(FAILURE)
    if not all(result.ok for result in done):
        raise typer.Exit(MISMATCH)


def _table(done: list[Verification]) -> Table:
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


def _sentences(done: list[Verification]) -> Group:
    """The table's rows where it is too wide: a name alone on its line is not cut into pieces."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[Text | Padding] = []
    for result in done:
        word = Text("ok ", "green") if result.ok else Text("WRONG ", "bold red")
        word.overflow = "fold"
        parts.append(word.append(printable(result.case), "default not bold"))
        facts = (
            f"{printable(result.backend)}, {result.rows} rows, {result.topk_mismatches} wrong, error "
            f"{result.max_score_error:.2g} of {result.score_tolerance:.2g} allowed, {result.seconds:.2f} s"
        )
        parts.append(Padding(Text(facts), (0, 0, 0, 3)))
    return Group(*parts)
