"""What ``verify`` says about an engine's recorded result."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from client.failure import printable
from indexer.explain.engine_verdict import Cause, EngineVerdict, Finding

SHOWN_FINDINGS = 12


def print_engine(console: Console, case: str, verdict: EngineVerdict) -> None:
    """Explain a verdict to a person."""
    word = Text("engine RIGHT ", "bold green") if verdict.ok else Text("engine WRONG ", "bold red")
    word.overflow = "fold"
    console.print(word.append(printable(case), "default not bold"))
    for line in _counts(verdict):
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
    if verdict.findings:
        console.print(Padding(_findings(verdict), (0, 0, 0, 2), expand=False))
    for cause in _causes(verdict):
        console.print(Padding(cause, (0, 0, 0, 2), expand=False))


def _counts(verdict: EngineVerdict) -> list[str]:
    lines = [
        f"{verdict.rows:,} rows: {verdict.right_rows:,} right, {verdict.tie_rows:,} differ by legal ties, "
        f"{verdict.rounding_rows:,} by rounding, {verdict.fault_rows:,} by faults."
    ]
    if verdict.max_score_error is not None:
        lines.append(
            f"Largest score error {verdict.max_score_error:.2g} of {verdict.score_tolerance:.2g} allowed, in "
            "units of sum|q k|."
        )
    if verdict.selection_fault_rows:
        lines.append(
            f"In {verdict.selection_fault_rows:,} rows the ids are not the best by the engine's own scores: "
            "the selection is at fault, not the scores."
        )
    if verdict.fault_rows:
        requests = _first(verdict.fault_rows_by_request)
        lines.append(f"Faulty rows by request: {requests}; by head: {_first(verdict.fault_rows_by_head)}.")
    written = verdict.written
    if written is not None:
        where = ""
        if written.wrong:
            where = f"; the first wrong one is position {written.worst_position:,} of request "
            where += str(written.worst_request)
        right = written.tokens - written.wrong
        lines.append(
            f"Keys of this step: {right:,} of {written.tokens:,} lie in the pages as they must{where}."
        )
    return lines


def _first(counts: dict[int, int]) -> str:
    shown = [f"{name}: {count:,}" for name, count in list(counts.items())[:8]]
    return ", ".join(shown) + (f" and {len(counts) - 8} more" if len(counts) > 8 else "")


def _findings(verdict: EngineVerdict) -> Table:
    shown = verdict.findings[:SHOWN_FINDINGS]
    rest = verdict.total_findings - len(shown)
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"{rest:,} more differences; --json has the first {len(verdict.findings):,}"
        if rest
        else None,
        caption_justify="left",
    )
    for column in ("request", "head", "token", "position", "block"):
        table.add_column(column, justify="right")
    table.add_column("what")
    for column in ("expected", "got", "to k-th"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for finding in shown:
        table.add_row(
            *(f"{n:,}" for n in (finding.request, finding.head, finding.token, finding.position)),
            "row" if finding.block < 0 else f"{finding.block:,}",
            finding.kind,
            *(_number(n) for n in (finding.expected, finding.got)),
            "" if finding.margin is None else f"{finding.margin:+.4g}",
            _verdict(finding),
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


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
        lines.append(Text("Cause: ", "bold").append(cause.name, "bold red").append(f" ({cause.family})"))
        lines.append(Text(f"  {cause.says}"))
        lines.append(Text(f"  {_evidence(cause)}", "dim"))
    if verdict.fault_rows and not verdict.causes:
        lines.append(Text("No single fault that is known here explains it.", "bold"))
        lines += [
            Text(f"  Explains a part: {cause.name} ({cause.explained} of {cause.faulty} sampled faulty rows)")
            for cause in verdict.candidates
        ]
    return lines


def _evidence(cause: Cause) -> str:
    rows = f"Computed and compared: it gives {cause.explained} of {cause.faulty} sampled faulty rows exactly"
    if cause.right:
        rows += f", and leaves {cause.kept} of {cause.right} right ones as they are"
    return rows + "."
