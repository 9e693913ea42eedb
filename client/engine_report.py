"""What ``verify`` says about an engine's recorded result."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from client import engine_words as words
from client.failure import printable
from indexer.explain.engine_verdict import EngineVerdict, Finding
from indexer.finite_queries import NotFiniteRow

SHOWN_FINDINGS = 12
MOST_COLUMNS = 1 << 16
"""Columns that hold any finding."""


def print_not_judged(console: Console, case: str, count: int, rows: Sequence[NotFiniteRow]) -> None:
    """Name the rows of a case that were left out."""
    console.print(
        Text("NOT JUDGED ", "bold yellow", overflow="fold").append(printable(case), "default not bold")
    )
    shown = rows[: words.MAX_NAMED]
    lines = [f"{count:,} rows were left out: their queries are not finite, and no answer to them is right."]
    lines += [f"  {words.not_finite(row)}" for row in shown]
    if count > len(shown):
        lines.append(f"  and {count - len(shown):,} more; --json names the first {len(rows):,}.")
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))


def print_engine(console: Console, case: str, verdict: EngineVerdict) -> None:
    """Explain a verdict to a person."""
    headline, style = words.headline(verdict)
    word = Text(f"{headline} ", style, overflow="fold")
    console.print(word.append(printable(case), "default not bold"))
    for line in _counts(verdict):
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
    shown = words.some_of_each_kind(verdict, SHOWN_FINDINGS)
    if verdict.total_findings:
        _print_differences(console, verdict, shown)
    for cause in _causes(verdict):
        console.print(Padding(cause, (0, 0, 0, 2), expand=False))


def _counts(verdict: EngineVerdict) -> list[str]:
    lines = [words.row_counts(verdict)]
    error = words.score_error(verdict)
    if error is not None:
        lines.append(f"Largest score error, in units of sum|q k|: {error}.")
    at_fault = words.selection_faults(verdict)
    if at_fault is not None:
        lines.append(at_fault)
    if verdict.fault_rows:
        requests = words.by_number(verdict.fault_rows_by_request)
        heads = words.by_number(verdict.fault_rows_by_head)
        lines.append(f"Faulty rows by request: {requests}; by head: {heads}.")
    written = words.written_keys(verdict)
    if written is not None:
        lines.append(f"Keys of this step: {written}.")
    return lines


def _print_differences(console: Console, verdict: EngineVerdict, shown: Sequence[Finding]) -> None:
    """How many there are of each kind, the first of them, and where the others are."""
    kinds = [f"{kind} {count} ({told} shown)" for kind, count, told in words.kind_counts(verdict, shown)]
    lines = [Text("Differences by kind: " + "; ".join(kinds) + ".")]
    if shown:
        lines.append(Text(words.shown_of(verdict, shown) + ":"))
    for line in lines:
        console.print(Padding(line, (0, 0, 0, 2), expand=False))
    if shown:
        table = _table(shown)
        wanted = console.measure(table, options=console.options.update(max_width=MOST_COLUMNS)).maximum + 2
        if wanted <= console.width:
            console.print(Padding(table, (0, 0, 0, 2), expand=False))
        else:
            for finding in shown:
                text = _verdict(finding).append(f" {words.sentence(finding)}", "default not bold")
                console.print(Padding(text, (0, 0, 0, 2), expand=False))
    if len(shown) < verdict.total_findings:
        held = len(verdict.findings)
        told = f"--json has the first {held:,} of {verdict.total_findings:,}; a larger --findings tells more."
        if held == verdict.total_findings:
            told = f"--json has all {held:,}."
        console.print(Padding(Text(told), (0, 0, 0, 2), expand=False))


def _table(shown: Sequence[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(words.COLUMNS):
        table.add_column(column, justify="left" if i in words.WORD_COLUMNS else "right")
    for finding in shown:
        *cells, _, rule = words.cells(finding)
        table.add_row(*cells, _verdict(finding), Text(rule))
    return table


def _verdict(finding: Finding) -> Text:
    return Text(finding.verdict, "bold red" if finding.verdict == "fault" else "green")


def _causes(verdict: EngineVerdict) -> list[Text]:
    lines = []
    written = verdict.written.cause if verdict.written is not None else None
    causes = (*verdict.causes, *((written,) if written is not None else ()))
    several = len(verdict.causes) > 1
    if several:
        lines.append(Text("These rows do not tell the following apart:", "bold"))
    if verdict.untried:
        lines.append(Text(f"Not tried for want of time: {'; '.join(verdict.untried)}."))
    for cause in causes:
        lines.append(
            Text("Cause: ", "bold").append(words.named(cause), "bold red").append(f" ({cause.family})")
        )
        lines.append(Text(f"  {cause.says}"))
        lines.append(Text(f"  {words.evidence(cause)}", "dim"))
    if verdict.fault_rows and not verdict.causes:
        lines.append(Text("No single fault that is known here explains it.", "bold"))
        lines += [
            Text(f"  Explains a part: {cause.name} ({cause.explained} of {cause.faulty} sampled faulty rows)")
            for cause in verdict.candidates
        ]
    return lines
