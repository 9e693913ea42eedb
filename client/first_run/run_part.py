"""Runs a part as a process and keeps what it said, however it ends: a GPU's fault ends the process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.first_run.interruption import Interruption, kill_group

_ROOT = Path(__file__).resolve().parents[2]
_SHOWN_CHARS = 4000
"""Of what a part that failed printed on stderr."""


@dataclass(frozen=True)
class PartResult:
    """What came of a part.

    Attributes:
        name: of the part.
        ok: it ended with 0.
        seconds: that it took.
        exit_code: negative for a signal; None for a part that was left out, took too long or was
            interrupted.
        items: the objects that it printed.
        error: what it printed on stderr, its end, or why it was stopped; None for a part that is right.
        skipped: why it was left out; None for a part that ran.
    """

    name: str
    ok: bool
    seconds: float
    exit_code: int | None
    items: list[dict[str, Any]]
    error: str | None = None
    skipped: str | None = None


def run_part(
    name: str, command: list[str], timeout_s: float, interruption: Interruption | None = None
) -> PartResult:
    """Run a part; a process that takes too long or is interrupted is killed, what it had printed is kept."""
    interruption = interruption or Interruption()
    began = time.perf_counter()
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    with (
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # so that what a part starts ends with it
        ) as process,
        interruption.stopping(process),
    ):
        late = False
        try:
            printed, complaints = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            late = True
            kill_group(process)
            printed, complaints = process.communicate()
        except BaseException:
            kill_group(process)
            raise
    code = process.returncode
    stopped = None
    if interruption.signal is not None and code == -signal.SIGKILL:
        stopped = f"interrupted by {interruption.signal.name}"
    elif late:
        stopped = f"stopped after {timeout_s:.0f} s"
    error = None
    if stopped is not None:
        error = f"{stopped}\n{complaints[-_SHOWN_CHARS:]}".rstrip()
    elif code:
        error = complaints[-_SHOWN_CHARS:].strip() or f"exit code {code}"
    return PartResult(
        name=name,
        ok=stopped is None and code == 0,
        seconds=time.perf_counter() - began,
        exit_code=None if stopped else code,
        items=_items(printed),
        error=error,
    )


def _items(printed: str) -> list[dict[str, Any]]:
    found = []
    for line in printed.splitlines():
        with contextlib.suppress(ValueError):  # of a line that the process did not finish, or a library's own
            item = json.loads(line)
            if isinstance(item, dict):
                found.append(item)
    return found
