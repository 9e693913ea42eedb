"""What came of a part, for people: a line of its verdict, and one of each error."""

from __future__ import annotations

import json
from typing import Any

from client.first_run.run_part import PartResult

_LINE_CHARS, _ENDS_CHARS = 400, 190
"""Of an error; of a longer one both ends are told."""


def part_lines(part: PartResult) -> list[str]:
    """The verdict, and under it every error in a line of its own."""
    if part.skipped is not None:
        return [f"{part.name}: left out, {part.skipped}"]
    wrong = [item for item in part.items if item.get("ok") is False]
    skipped = [item["skipped"] for item in part.items if item.get("skipped")]
    verdict = "right" if part.ok else f"WRONG ({len(wrong)} items)" if wrong else "FAILED"
    line = f"{part.name}: {verdict}, {len(part.items)} items, {part.seconds:.0f} s"
    errors = [_wrong(item) for item in wrong]
    if part.error is not None:
        errors += _printed(part.error, told=bool(wrong) and part.exit_code == 1)
    return ["; ".join([line, *skipped]), *(f"  {error}" for error in errors)]


def _wrong(item: dict[str, Any]) -> str:
    name = item.get("name") or item.get("case") or "an item"
    if item.get("error"):
        return f"{name}: {_one_line(str(item['error']))}"
    counts = [f"{field} {value}" for field, value in item.items() if _tells(field, value)]
    return f"{name}: {', '.join(counts) or 'wrong'}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LINE_CHARS else f"{line[:_ENDS_CHARS]} ... {line[-_ENDS_CHARS:]}"


def _tells(field: str, value: object) -> bool:
    told = field.startswith("wrong_") or field in ("max_score_error", "score_tolerance", "topk_mismatches")
    return told and value is not None


def _printed(error: str, *, told: bool) -> list[str]:
    """Why a part was stopped, and the messages of JSON errors; else the last line, unless items tell it."""
    lines = [line for line in error.splitlines() if line.strip()]
    stopped = [line for line in lines[:1] if line.startswith(("interrupted by", "stopped after"))]
    messages = [message for line in lines if (message := _message(line)) is not None]
    last = [] if told or messages else lines[len(stopped) :][-1:]
    return list(map(_one_line, [*stopped, *messages, *last]))


def _message(line: str) -> str | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return str(fields["message"]) if isinstance(fields, dict) and "message" in fields else None
