"""The record of a first run: one JSON file, a text that says what to send back, and both in an archive."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.first_run.parts import SIMULATED
from client.first_run.run_part import PartResult
from indexer.case.atomic import write_atomically

RECORD = "first-run.json"
TEXT = "what-to-send-back.txt"
ARCHIVE = "nvfp4-indexer-first-run.tar.gz"
ROCPROF = "rocprof"
FORMAT = "nvfp4-indexer-first-run"
NO_MEASUREMENT = (
    "SIMULATED: a CPU interpreted the kernels. No time here is a measurement of them: "
    "only what is right and what is wrong counts."
)


@dataclass(frozen=True)
class Record:
    """What a run found so far.

    Attributes:
        backend: ``flydsl`` or ``flydsl-sim``.
        versions: of the program and its packages.
        kernels: which kernels run.
        parts: those that ended.
    """

    backend: str
    versions: dict[str, str]
    kernels: dict[str, str | None]
    parts: Sequence[PartResult]

    @property
    def ok(self) -> bool:
        """Whether every part is right."""
        return all(part.ok for part in self.parts)

    @property
    def faster_layout(self) -> dict[str, Any] | None:
        """What the decode benchmark chose, if it could."""
        items = [item for part in self.parts if part.name == "speed-decode" for item in part.items]
        return next((item for item in items if item.get("ok") and "set" in item), None)

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": FORMAT,
            "version": 1,
            "versions": self.versions,
            "kernels": self.kernels,
            "backend": self.backend,
            "simulated": self.backend == SIMULATED,
            "note": NO_MEASUREMENT if self.backend == SIMULATED else None,
            "ok": self.ok,
            "faster_layout": self.faster_layout,
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }

    def text(self) -> str:
        """For people."""
        lines = [NO_MEASUREMENT, ""] if self.backend == SIMULATED else []
        lines += [f"Send back {ARCHIVE}: it holds this text, {RECORD} and what rocprofv3 wrote.", ""]
        lines += map(_line, self.parts)
        layout = self.faster_layout
        if layout is not None and self.backend != SIMULATED:
            lines += ["", f"Decode is faster with {layout['set']}: set it where the indexer runs."]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write the JSON file, whole.

        Raises:
            OSError: it cannot be written.
        """
        write_atomically([json.dumps(self.fields(), indent=1).encode()], folder / RECORD)

    def pack(self, folder: Path) -> Path:
        """Write everything, and the archive of it.

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


def _line(part: PartResult) -> str:
    if part.skipped is not None:
        return f"{part.name}: left out, {part.skipped}"
    wrong = [item for item in part.items if item.get("ok") is False]
    skipped = [item["skipped"] for item in part.items if item.get("skipped")]
    verdict = "right" if part.ok else f"WRONG ({len(wrong)} items)" if wrong else "FAILED"
    line = f"{part.name}: {verdict}, {len(part.items)} items, {part.seconds:.0f} s"
    reasons = [str(item.get("error") or item.get("name") or item.get("case")) for item in wrong[:1]]
    if not part.ok and not wrong and part.error:
        reasons = part.error.splitlines()[-1:]
    return "; ".join([line, *skipped, *reasons])
