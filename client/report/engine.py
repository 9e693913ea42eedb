"""The section about an engine's recorded result."""

from __future__ import annotations

from collections.abc import Sequence

from client import engine_words as words
from client.report.html import items, label, paragraph, section, table, text
from indexer.explain.engine_verdict import Cause, EngineVerdict, Finding
from indexer.finite_queries import NotFiniteRow

SHOWN_FINDINGS = 40


def engine_section(verdict: EngineVerdict) -> str:
    """Verdict, causes, and the first differences."""
    shown = words.some_of_each_kind(verdict, SHOWN_FINDINGS)
    parts = [f"<p>{verdict_badge(verdict)}</p>", paragraph(words.row_counts(verdict))]
    at_fault = words.selection_faults(verdict)
    if at_fault is not None:
        parts.append(paragraph(at_fault))
    parts += [*_causes(verdict), _counts(verdict)]
    if verdict.total_findings:
        parts += _differences(verdict, shown)
    return section("Engine", *parts)


def verdict_badge(verdict: EngineVerdict) -> str:
    """The verdict in a few words, coloured."""
    headline, style = words.headline(verdict)
    kinds = {"bold green": "ok", "bold red": "bad", "bold yellow": "open"}
    return label(headline.lower(), kinds[style])


def not_judged_section(count: int, rows: Sequence[NotFiniteRow]) -> str:
    """Rows that were left out."""
    shown = rows[: words.MAX_NAMED]
    lines = [words.not_finite(row) for row in shown]
    if count > len(shown):
        lines.append(f"and {count - len(shown):,} more")
    why = f"{count:,} rows were left out: their queries are not finite, and no answer to them is right."
    return section("Not judged", paragraph(why), items(lines))


def _counts(verdict: EngineVerdict) -> str:
    rows: list[tuple[object, object]] = []
    error = words.score_error(verdict)
    if error is not None:
        rows.append(("largest score error, in sum|q k|", error))
    if verdict.fault_rows:
        rows.append(("faulty rows by request", words.by_number(verdict.fault_rows_by_request)))
        rows.append(("faulty rows by head", words.by_number(verdict.fault_rows_by_head)))
    written = words.written_keys(verdict)
    if written is not None:
        rows.append(("keys of this step", written))
    return table(("", ""), rows, words=(0, 1)) if rows else ""


def _differences(verdict: EngineVerdict, shown: Sequence[Finding]) -> list[str]:
    parts = [
        "<h3>Differences by kind</h3>",
        table(("kind", "how many", "shown here"), words.kind_counts(verdict, shown), words=(0, 1)),
    ]
    if shown:
        parts.append(f"<h3>{text(words.shown_of(verdict, shown))}</h3>")
        parts.append(table(words.COLUMNS, map(words.cells, shown), words=words.WORD_COLUMNS))
        parts.append(paragraph(words.COLUMN_NOTE, "soft"))
    return parts


def _causes(verdict: EngineVerdict) -> list[str]:
    written = verdict.written.cause if verdict.written is not None else None
    parts = []
    if len(verdict.causes) > 1:
        parts.append(paragraph("These rows do not tell the following causes apart."))
    if verdict.untried:
        parts.append(paragraph(f"Not tried for want of time: {'; '.join(verdict.untried)}."))
    parts += [_cause(cause, "cause") for cause in verdict.causes]
    if written is not None:
        parts.append(_cause(written, "cause"))
    if verdict.fault_rows and not verdict.causes:
        part = " These explain a part:" if verdict.candidates else ""
        parts.append(paragraph(f"No single fault that is known here explains it.{part}"))
        parts += [_cause(cause, "cause maybe") for cause in verdict.candidates]
    return parts


def _cause(cause: Cause, kind: str) -> str:
    return (
        f'<div class="{kind}"><b>{text(words.named(cause))}</b> ({text(cause.family)})'
        f"{paragraph(cause.says)}{paragraph(words.evidence(cause), 'soft')}</div>"
    )
