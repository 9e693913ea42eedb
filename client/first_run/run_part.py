"""Runs a part as a process and keeps what it said, however it ends: a GPU's fault ends the process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ctrl-C, SIGTERM and SIGHUP while parts run: the running part is killed, and what was found is kept.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Whether a signal asked to stop, and the process that it stops."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._running: subprocess.Popen[str] | None = None

    @contextlib.contextmanager
    def stopping(self, process: subprocess.Popen[str]) -> Iterator[None]:
        """Kill a process, the first of its group, when a signal comes, or has come."""
        self._running = process
        try:
            if self.signal is not None:
                kill_group(process)
            yield
        finally:
            self._running = None

    @contextlib.contextmanager
    def handling(self) -> Iterator[None]:
        """Take signals in the body; one that is ignored, as ``nohup`` has SIGHUP, stays so."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        taken = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
        try:
            for number in taken:
                signal.signal(number, self._take)
            yield
        finally:
            for number, handler in taken.items():
                signal.signal(number, handler)

    def _take(self, number: int, _frame: object) -> None:
        # Nothing is raised: a terminal that closes signals twice, and the second must not cut the packing.
        self.signal = self.signal or signal.Signals(number)
        if self._running is not None:
            kill_group(self._running)


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it started, unless it has been waited for: its number is free then."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


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


# What is run, in this order: commands that print a JSON object a line.

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
"""The first two are commands of this program, the others are in :mod:`client.first_run`."""


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
    return [sys.executable, "-m", "client.first_run", part, "--backend", backend, "--folder", str(folder)]
