"""A verdict over an engine's recorded result: words and cells for ``verify`` and ``report``, and printing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from client.output import Cells, counted, fits, printable
from indexer.explain.verdict import Cause, EngineVerdict, Finding, Verdict
from indexer.verify import NotFiniteRow

COLUMN_NOTE = (
    "place: position in the row's ids, from 0. against: the block it is held against. expected: the right "
    "score; where the engine's own scores decide, its score of that other block. got: the engine's score. to "
    "k-th: the right score less that of the row's k-th best block; where its own scores decide, got less "
    "expected."
)
_COUNTED: dict[Verdict, tuple[str, str]] = {
    "fault": ("fault", "faults"),
    "rounding": ("by rounding", "by rounding"),
    "tie": ("legal tie", "legal ties"),
}
"""Of one, and of several."""
MAX_NAMED = 8
"""Requests, heads or rows that are named in a line."""


def headline_of(verdict: EngineVerdict) -> tuple[str, str]:
    """The verdict in a few words, and the style of it."""
    written_wrong = verdict.written is not None and verdict.written.wrong
    if verdict.fault_rows or written_wrong:
        return "engine WRONG", "bold red"
    if verdict.unjudged_rows:
        return f"engine NOT JUDGED in {counted(verdict.unjudged_rows, 'row')}", "bold yellow"
    if not verdict.rows and verdict.written is None:
        return "engine recorded NO RESULT", "bold yellow"
    return "engine RIGHT", "bold green"


def row_counts(verdict: EngineVerdict) -> str:
    """How many rows there are of each kind."""
    unjudged = f" {counted(verdict.unjudged_rows, 'row')} not judged." if verdict.unjudged_rows else ""
    if not verdict.rows:
        return "No row was judged: the file holds neither scores nor ids of the engine." + unjudged
    return (
        f"{counted(verdict.rows, 'row')}: {verdict.right_rows:,} right, {verdict.tie_rows:,} differ by legal "
        f"ties, {verdict.rounding_rows:,} by rounding, {verdict.fault_rows:,} by faults.{unjudged}"
    )


def score_error(verdict: EngineVerdict) -> str | None:
    """The largest error, and what has none that could be stated; None without scores."""
    if verdict.max_measured_error is None or verdict.unmeasured_cells is None:
        return None
    error = f"{verdict.max_measured_error:.2g} of {verdict.score_tolerance:.2g} allowed"
    if not verdict.unmeasured_cells:
        return error
    kinds = ", ".join(f"{name}: {count:,}" for name, count in verdict.unmeasured_cells.items())
    where = counted(sum(verdict.unmeasured_cells.values()), "wrong cell")
    return f"none can be stated in {where} ({kinds}); {error} in the others"


def selection_faults(verdict: EngineVerdict) -> str | None:
    """Rows whose ids its own scores contradict; None if there are none."""
    if not verdict.selection_fault_rows:
        return None
    return (
        f"In {counted(verdict.selection_fault_rows, 'row')} the ids are not the best by the engine's own "
        "scores: whatever the scores are, the selection is at fault there, or what becomes of its ids."
    )


def by_number(counts: dict[int, int]) -> str:
    """Counts by request or head, the first few."""
    shown = [f"{name}: {count:,}" for name, count in list(counts.items())[:MAX_NAMED]]
    more = len(counts) - MAX_NAMED
    return ", ".join(shown) + (f" and {more:,} more" if more > 0 else "")


def written_keys(verdict: EngineVerdict) -> str | None:
    """Keys of the step in the pages; None if they were not recorded."""
    written = verdict.written
    if written is None:
        return None
    right = f"{written.tokens - written.wrong:,} of {written.tokens:,} lie in the pages as they must"
    if not written.wrong:
        return right
    return (
        f"{right}; the first wrong one is position {written.worst_position:,} of request "
        f"{written.worst_request:,}"
    )


def kind_counts(verdict: EngineVerdict, shown: Sequence[Finding]) -> list[tuple[str, str, str]]:
    """Each kind of difference, how many there are, and how many are shown."""
    told = Counter(finding.kind for finding in shown)
    return [
        (
            kind,
            ", ".join(f"{count:,} {_COUNTED[which][count > 1]}" for which, count in counts.items()),
            f"{told[kind]:,}",
        )
        for kind, counts in verdict.differences.items()
    ]


def some_of_each_kind(verdict: EngineVerdict, most: int) -> list[Finding]:
    """Returns the first findings of each kind, so that a row with many does not hide the other kinds."""
    seen: Counter[tuple[str, bool]] = Counter()
    turns = []
    for i, finding in enumerate(verdict.findings):
        legal = finding.verdict != "fault"
        turns.append((legal, seen[finding.kind, legal], i))
        seen[finding.kind, legal] += 1
    return [verdict.findings[i] for _, _, i in sorted(sorted(turns)[:most], key=lambda turn: turn[2])]


def shown_of(verdict: EngineVerdict, shown: Sequence[Finding]) -> str:
    """Which findings a list holds."""
    total = verdict.total_findings
    if len(shown) == total:
        return "The difference" if total == 1 else f"All {total:,} differences, faults first"
    return f"{len(shown):,} of {total:,} differences, the first of each kind, faults first"


def finding_cells(shown: Sequence[Finding]) -> Cells:
    """Findings as a table, see :data:`COLUMN_NOTE`."""
    columns = (
        "request",
        "head",
        "token",
        "position",
        "what",
        "place",
        "block or id",
        "against",
        "expected",
        "got",
        "to k-th",
        "verdict",
        "rule",
    )
    rows = [
        (
            f"{finding.request:,}",
            f"{finding.head}",
            f"{finding.token:,}",
            f"{finding.position:,}",
            finding.kind,
            _whole(finding.place),
            _whole(finding.id if finding.kind == "id" else finding.block),
            _whole(finding.against),
            _number(finding.expected),
            _number(finding.got),
            "" if finding.margin is None else f"{finding.margin:+.4g}",
            _verdict(finding),
            finding.rule,
        )
        for finding in shown
    ]
    return Cells(columns, rows, words=(4, 11, 12))


def sentence(finding: Finding) -> str:
    """A finding where a table is too wide."""
    what = f"id {finding.id}" if finding.kind == "id" else f"block {finding.block:,}"
    place = "" if finding.place is None else f", place {finding.place}"
    scores = [
        f"{name} {_number(value)}"
        for name, value in (("expected", finding.expected), ("got", finding.got))
        if value is not None
    ]
    where = (
        f"request {finding.request:,}, head {finding.head}, token {finding.token:,} "
        f"(position {finding.position:,}){place}, {what}"
    )
    return "; ".join((f"{finding.kind}: {where}: {finding.rule}", *scores))


def not_finite(row: NotFiniteRow) -> str:
    """A row that is not judged."""
    return (
        f"request {row.request:,}, head {row.head}, token {row.token:,} (position {row.position:,}): "
        f"index_q[{row.token}, {row.head}, {row.dim}] = {printable(row.value)}"
    )


def named(cause: Cause) -> str:
    """A cause, and the part of the call that has it."""
    return cause.name if cause.only is None else f"{cause.name}, only {cause.only}"


def evidence(cause: Cause) -> str:
    """Returns how many rows a cause was found to explain."""
    rows = f"Computed and compared: it explains {cause.explained} of {cause.faulty} sampled faulty rows"
    if cause.right:
        rows += f", and leaves {cause.kept} of {cause.right} right ones as they are"
    if cause.only is not None:
        rows += f", all {cause.only}: no other row of the call is faulty"
    return rows + "."


def _whole(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


# ---- Printing ----

SHOWN_FINDINGS = 12


def print_not_judged(console: Console, case: str, count: int, rows: Sequence[NotFiniteRow]) -> None:
    """Prints which rows of a case were not judged."""
    console.print(
        Text("NOT JUDGED ", "bold yellow", overflow="fold").append(printable(case), "default not bold")
    )
    shown = rows[:MAX_NAMED]
    lines = [f"{count:,} rows were left out: their queries are not finite, and no answer to them is right."]
    lines += [f"  {not_finite(row)}" for row in shown]
    if count > len(shown):
        lines.append(f"  and {count - len(shown):,} more; --json names the first {len(rows):,}.")
    for line in lines:
        _print_indented(console, Text(line))


def _print_indented(console: Console, part: RenderableType) -> None:
    console.print(Padding(part, (0, 0, 0, 2), expand=False))


def print_engine(console: Console, case: str, verdict: EngineVerdict) -> None:
    """Prints a verdict over an engine's result."""
    headline, style = headline_of(verdict)
    word = Text(f"{headline} ", style, overflow="fold")
    console.print(word.append(printable(case), "default not bold"))
    for line in _counts(verdict):
        _print_indented(console, Text(line))
    shown = some_of_each_kind(verdict, SHOWN_FINDINGS)
    if verdict.total_findings:
        _print_differences(console, verdict, shown)
    for cause in _causes(verdict):
        _print_indented(console, cause)


def _counts(verdict: EngineVerdict) -> list[str]:
    lines = [row_counts(verdict)]
    error = score_error(verdict)
    if error is not None:
        lines.append(f"Largest score error, in units of sum|q k|: {error}.")
    at_fault = selection_faults(verdict)
    if at_fault is not None:
        lines.append(at_fault)
    if verdict.fault_rows:
        requests = by_number(verdict.fault_rows_by_request)
        heads = by_number(verdict.fault_rows_by_head)
        lines.append(f"Faulty rows by request: {requests}; by head: {heads}.")
    written = written_keys(verdict)
    if written is not None:
        lines.append(f"Keys of this step: {written}.")
    return lines


def _print_differences(console: Console, verdict: EngineVerdict, shown: Sequence[Finding]) -> None:
    """How many there are of each kind, the first of them, and where the others are."""
    kinds = [f"{kind} {count} ({told} shown)" for kind, count, told in kind_counts(verdict, shown)]
    _print_indented(console, Text("Differences by kind: " + "; ".join(kinds) + "."))
    if shown:
        _print_indented(console, Text(shown_of(verdict, shown) + ":"))
        table = finding_cells(shown).table()
        if fits(console, table, indent=2):
            _print_indented(console, table)
        else:
            for finding in shown:
                text = _verdict(finding).append(f" {sentence(finding)}", "default not bold")
                _print_indented(console, text)
    if len(shown) < verdict.total_findings:
        held = len(verdict.findings)
        told = f"--json has the first {held:,} of {verdict.total_findings:,}; a larger --findings tells more."
        if held == verdict.total_findings:
            told = f"--json has all {held:,}."
        _print_indented(console, Text(told))


def _verdict(finding: Finding) -> Text:
    return Text(finding.verdict, "bold red" if finding.verdict == "fault" else "green")


def _causes(verdict: EngineVerdict) -> list[Text]:
    lines = []
    causes = list(verdict.causes)
    if verdict.written is not None and verdict.written.cause is not None:
        causes.append(verdict.written.cause)
    if len(verdict.causes) > 1:
        lines.append(Text("These rows do not tell the following apart:", "bold"))
    if verdict.untried:
        lines.append(Text(f"Not tried for want of time: {'; '.join(verdict.untried)}."))
    for cause in causes:
        lines.append(Text("Cause: ", "bold").append(named(cause), "bold red").append(f" ({cause.family})"))
        lines.append(Text(f"  {cause.says}"))
        lines.append(Text(f"  {evidence(cause)}", "dim"))
    if verdict.fault_rows and not verdict.causes:
        lines.append(Text("No single fault that is known here explains it.", "bold"))
        lines += [
            Text(f"  Explains a part: {cause.name} ({cause.explained} of {cause.faulty} sampled faulty rows)")
            for cause in verdict.candidates
        ]
    return lines
