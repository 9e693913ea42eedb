"""The parent's side of a part: its command, its process, its result however it ends, and signals."""

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

from client.first_run import DOCTOR, VERIFY

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ROOT = Path(__file__).resolve().parents[2]
_SHOWN_CHARS = 4000
"""Of the stderr of a part that failed."""


def command_of(part: str, backend: str, folder: Path, cases: Sequence[str]) -> list[str]:
    """Returns the command that runs a part.

    Args:
        part: one of :data:`client.first_run.PARTS`.
        backend: one of :data:`client.first_run.BACKENDS`, or ``auto`` for the doctor.
        folder: for the part's own files.
        cases: case files to verify.
    """
    own = [sys.executable, "-m", "client.cli"]
    if part == DOCTOR:
        return [*own, "doctor", "--json", "--backend", backend]
    if part == VERIFY:
        return [*own, "verify", "--json", "--backend", backend, "--", *cases]
    folder = folder.resolve()
    return [sys.executable, "-m", "client.first_run", part, "--backend", backend, "--folder", str(folder)]


@dataclass(frozen=True)
class PartResult:
    """The outcome of a part.

    Attributes:
        name: of the part.
        ok: it exited with 0.
        seconds: its duration.
        exit_code: negative for a signal; None for a part that was skipped, timed out or was interrupted.
        items: the objects that it printed.
        error: the end of its stderr, or why it was stopped; None for a part that is right.
        skipped: why it was skipped; None for a part that ran.
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
    """Run a part; one that times out or is interrupted is killed, and what it had printed is kept."""
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
            start_new_session=True,  # so that the part's own children die with it
        ) as process,
        interruption.stopping(process),
    ):
        timed_out = False
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            kill_group(process)
            stdout, stderr = process.communicate()
        except BaseException:
            kill_group(process)
            raise
    code = process.returncode
    stopped = None
    if interruption.signal is not None and code == -signal.SIGKILL:
        stopped = f"interrupted by {interruption.signal.name}"
    elif timed_out:
        stopped = f"stopped after {timeout_s:.0f} s"
    error = None
    if stopped is not None:
        error = f"{stopped}\n{stderr[-_SHOWN_CHARS:]}".rstrip()
    elif code:
        error = stderr[-_SHOWN_CHARS:].strip() or f"exit code {code}"
    return PartResult(
        name=name,
        ok=stopped is None and code == 0,
        seconds=time.perf_counter() - began,
        exit_code=None if stopped else code,
        items=_items(stdout),
        error=error,
    )


def _items(printed: str) -> list[dict[str, Any]]:
    found = []
    for line in printed.splitlines():
        with contextlib.suppress(ValueError):  # an unfinished line, or a library's own output
            item = json.loads(line)
            if isinstance(item, dict):
                found.append(item)
    return found


# ---- Signals ----


class Interruption:
    """The first of SIGINT, SIGTERM and SIGHUP to come: it kills the running part; what was found is kept."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._running: subprocess.Popen[str] | None = None

    @contextlib.contextmanager
    def stopping(self, process: subprocess.Popen[str]) -> Iterator[None]:
        """Kill the process, a group leader, if a signal comes in the body or has come before it."""
        self._running = process
        try:
            if self.signal is not None:
                kill_group(process)
            yield
        finally:
            self._running = None

    @contextlib.contextmanager
    def handling(self) -> Iterator[None]:
        """Handle signals in the body; one that is ignored, as SIGHUP under ``nohup``, stays ignored."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        handled = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
        try:
            for number in handled:
                signal.signal(number, self._handle)
            yield
        finally:
            for number, handler in handled.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        # Nothing is raised: a closing terminal signals twice, and the second must not cut off the packing.
        self.signal = self.signal or signal.Signals(number)
        if self._running is not None:
            kill_group(self._running)


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process group, unless its leader has been waited for: its pid may be another's by then."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
