"""The section about an engine's recorded result."""

from __future__ import annotations

from client.report.html import badge, paragraph, section, table, text
from indexer.explain.engine_verdict import Cause, EngineVerdict

SHOWN_FINDINGS = 40


def engine_section(verdict: EngineVerdict) -> str:
    """Verdict, causes, and the first differences."""
    parts = [
        f"<p>{badge(verdict.ok, 'engine right', 'engine wrong')}</p>",
        _counts(verdict),
        *_causes(verdict),
    ]
    if verdict.findings:
        shown = min(SHOWN_FINDINGS, len(verdict.findings))
        parts.append(f"<h3>Differences: the first {shown:,} of {verdict.total_findings:,}, faults first</h3>")
        parts.append(_findings(verdict))
    return section("Engine", *parts)


def _counts(verdict: EngineVerdict) -> str:
    rows: list[tuple[object, object]] = [
        ("rows", f"{verdict.rows:,}"),
        ("right", f"{verdict.right_rows:,}"),
        ("differ by legal ties", f"{verdict.tie_rows:,}"),
        ("differ by rounding", f"{verdict.rounding_rows:,}"),
        ("faulty", f"{verdict.fault_rows:,}"),
    ]
    if verdict.selection_fault_rows is not None:
        rows.append(("not the best by the engine's own scores", f"{verdict.selection_fault_rows:,}"))
    if verdict.max_score_error is not None:
        error = f"{verdict.max_score_error:.2g} of {verdict.score_tolerance:.2g} allowed"
        rows.append(("largest score error, in sum|q k|", error))
    if verdict.fault_rows:
        rows.append(("faulty rows by request", _by(verdict.fault_rows_by_request)))
        rows.append(("faulty rows by head", _by(verdict.fault_rows_by_head)))
    written = verdict.written
    if written is not None:
        rows.append(("keys of this step written wrong", f"{written.wrong:,} of {written.tokens:,}"))
    return table(("", ""), rows)


def _by(counts: dict[int, int]) -> str:
    shown = ", ".join(f"{name}: {count:,}" for name, count in list(counts.items())[:8])
    return shown + (f" and {len(counts) - 8} more" if len(counts) > 8 else "")


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
        parts.append(paragraph("No single fault that is known here explains it. These explain a part:"))
        parts += [_cause(cause, "cause maybe") for cause in verdict.candidates]
    return parts


def _cause(cause: Cause, kind: str) -> str:
    rows = f"Computed and compared: it gives {cause.explained} of {cause.faulty} sampled faulty rows exactly"
    if cause.right:
        rows += f" and leaves {cause.kept} of {cause.right} right ones as they are"
    return (
        f'<div class="{kind}"><b>{text(cause.name)}</b> ({text(cause.family)})'
        f"{paragraph(cause.says)}{paragraph(rows + '.', 'soft')}</div>"
    )


def _findings(verdict: EngineVerdict) -> str:
    rows = [
        (
            f"{finding.request:,}",
            finding.head,
            f"{finding.token:,}",
            f"{finding.position:,}",
            "row" if finding.block < 0 else f"{finding.block:,}",
            "" if finding.expected is None else f"{finding.expected:.6g}",
            "" if finding.got is None else f"{finding.got:.6g}",
            "" if finding.margin is None else f"{finding.margin:+.4g}",
            finding.kind,
            finding.verdict,
        )
        for finding in verdict.findings[:SHOWN_FINDINGS]
    ]
    columns = (
        "request",
        "head",
        "token",
        "position",
        "block",
        "expected",
        "got",
        "to k-th",
        "what",
        "verdict",
    )
    return table(columns, rows, words=(8, 9))
