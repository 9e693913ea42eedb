"""What is run, in this order: commands that print a JSON object a line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

SIMULATED = "flydsl-sim"
DOCTOR, VERIFY = "doctor", "verify"
PARTS = (
    DOCTOR,
    VERIFY,
    "check-cases",
    "check-decode",
    "check-select",
    "check-topk",
    "check-insert",
    "speed-prefill",
    "speed-decode",
    "speed-topk",
    "speed-insert",
    "counters",
)
"""The first two are commands of this program, the others are in :mod:`indexer.first_run`."""


def command_of(part: str, backend: str, folder: Path, cases: Sequence[str]) -> list[str]:
    """The command that runs a part.

    Args:
        part: one of :data:`PARTS`.
        backend: ``flydsl`` or ``flydsl-sim``.
        folder: for files of its own.
        cases: case files that are verified.
    """
    own = [sys.executable, "-m", "client.cli"]
    if part == DOCTOR:
        return [*own, "doctor", "--json", "--backend", backend]
    if part == VERIFY:
        return [*own, "verify", "--json", "--backend", backend, "--", *cases]
    folder = folder.resolve()
    return [sys.executable, "-m", "indexer.first_run", part, "--backend", backend, "--folder", str(folder)]
