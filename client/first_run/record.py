"""The parent's record of a first run: a JSON file, a text that says what to send back, an archive of both."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client.first_run import SIMULATED
from client.first_run.run_part import PartResult
from indexer.case.codec import write_atomically

RECORD = "first-run.json"
TEXT = "what-to-send-back.txt"
ARCHIVE = "nvfp4-indexer-first-run.tar.gz"
ROCPROF = "rocprof"
OWN_NAMES = (RECORD, TEXT, ARCHIVE, ROCPROF)
"""Everything that a run writes to its folder."""
FORMAT = "nvfp4-indexer-first-run"
NO_MEASUREMENT = (
    "SIMULATED: a CPU interpreted the kernels. No time here is a measurement of them: "
    "only what is right and what is wrong counts."
)
_LINE_CHARS, _ENDS_CHARS = 400, 190
"""Most characters of an error's line; of a longer error that many are shown of each end."""


@dataclass
class Record:
    """What a run has found so far.

    Attributes:
        backend: one of :data:`client.first_run.BACKENDS`.
        versions: of the program and its packages.
        kernels: which kernels run.
        planned: names of the parts to run.
        parts: results of those that ended or were skipped.
        finished: whether all of them did.
        stopped: why the run ended early: a signal, or a backend that cannot run; None if it did not.
    """

    backend: str
    versions: dict[str, str]
    kernels: dict[str, str | None]
    planned: Sequence[str]
    parts: list[PartResult] = field(default_factory=list)
    finished: bool = False
    stopped: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every part ended and is right."""
        return self.finished and all(part.ok for part in self.parts)

    @property
    def faster_layout(self) -> dict[str, Any] | None:
        """The decode benchmark's comparison of the layouts, if it made one."""
        items = [item for part in self.parts if part.name == "speed-decode" for item in part.items]
        return next((item for item in items if item.get("ok") and "steps" in item), None)

    def fields(self) -> dict[str, Any]:
        """Returns the record's JSON fields."""
        return {
            "format": FORMAT,
            "version": 1,
            "versions": self.versions,
            "kernels": self.kernels,
            "backend": self.backend,
            "simulated": self.backend == SIMULATED,
            "note": NO_MEASUREMENT if self.backend == SIMULATED else None,
            "ok": self.ok,
            "planned": list(self.planned),
            "finished": self.finished,
            "stopped": self.stopped,
            "faster_layout": self.faster_layout,
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }

    def text(self) -> str:
        """Returns the human-readable text."""
        lines = [NO_MEASUREMENT, ""] if self.backend == SIMULATED else []
        lines += [f"Send back {ARCHIVE}: it holds this text, {RECORD} and what rocprofv3 wrote.", ""]
        for part in self.parts:
            lines += part_lines(part)
        if self.stopped is not None:
            ended = {part.name for part in self.parts}
            missing = ", ".join(name for name in self.planned if name not in ended) or "none"
            lines += ["", f"NOT FINISHED: {self.stopped}; parts that did not run: {missing}."]
        layout = self.faster_layout
        if layout is not None and self.backend != SIMULATED:
            lines += ["", *_layout_lines(layout)]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write the JSON file, atomically.

        Raises:
            OSError: it cannot be written.
        """
        write_atomically([json.dumps(self.fields(), indent=1).encode()], folder / RECORD)

    def pack(self, folder: Path) -> Path:
        """Write the JSON file, the text, and the archive of both with what rocprofv3 wrote.

        Raises:
            OSError: it cannot be written.
        """
        self.write(folder)
        write_atomically([self.text().encode()], folder / TEXT)
        unfinished = folder / f".{ARCHIVE}.part"
        with tarfile.open(unfinished, "w:gz") as archive:
            for name in (TEXT, RECORD, ROCPROF):
                if (folder / name).exists():
                    archive.add(folder / name, name)
        return unfinished.replace(folder / ARCHIVE)


# ---- Text ----


def part_lines(part: PartResult) -> list[str]:
    """Returns a part's verdict, followed by one line for each error."""
    if part.skipped is not None:
        return [f"{part.name}: left out, {part.skipped}"]
    wrong = [item for item in part.items if item.get("ok") is False]
    skipped = [item["skipped"] for item in part.items if item.get("skipped")]
    verdict = "right" if part.ok else f"WRONG ({len(wrong)} items)" if wrong else "FAILED"
    line = f"{part.name}: {verdict}, {len(part.items)} items, {part.seconds:.0f} s"
    errors = [_item_error(item) for item in wrong]
    if part.error is not None:
        errors += _stderr_lines(part.error, last=not wrong or part.exit_code != 1)
    return ["; ".join([line, *skipped]), *(f"  {error}" for error in errors)]


def _item_error(item: dict[str, Any]) -> str:
    name = item.get("name") or item.get("case") or "an item"
    if item.get("error"):
        return f"{name}: {_one_line(str(item['error']))}"
    counts = [f"{field} {value}" for field, value in item.items() if _is_count(field) and value is not None]
    return f"{name}: {', '.join(counts) or 'wrong'}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LINE_CHARS else f"{line[:_ENDS_CHARS]} ... {line[-_ENDS_CHARS:]}"


def _is_count(field: str) -> bool:
    return field.startswith("wrong_") or field in ("max_score_error", "score_tolerance", "topk_mismatches")


def _stderr_lines(error: str, *, last: bool) -> list[str]:
    """Why a part was stopped, and its JSON errors' messages, or without any its last line if ``last``."""
    lines = [line for line in error.splitlines() if line.strip()]
    stopped = [line for line in lines[:1] if line.startswith(("interrupted by", "stopped after"))]
    messages = [message for line in lines if (message := _message(line)) is not None]
    if last and not messages:
        messages = lines[len(stopped) :][-1:]
    return list(map(_one_line, [*stopped, *messages]))


def _message(line: str) -> str | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return str(fields["message"]) if isinstance(fields, dict) and "message" in fields else None


def _layout_lines(verdict: dict[str, Any]) -> list[str]:
    if verdict["layout"] is None:
        lines = [f"Decode: no difference between the layouts ({verdict['percent']:.1f} %): set nothing."]
    else:
        less = f"takes {verdict['percent']:.1f} % less time with {verdict['set']}"
        lines = [f"Decode {less}: set it where the indexer runs."]
    for step in verdict["steps"]:
        times = ", ".join(f"{layout} {us:.1f} us" for layout, us in step["cold_us"].items())
        faster = "no difference" if step["layout"] is None else f"{step['layout']} is faster"
        lines.append(f"  {step['shape']}: {times}: {faster} ({step['percent']:.1f} %)")
    return lines
