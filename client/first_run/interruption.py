"""Ctrl-C, SIGTERM and SIGHUP while parts run: the running part is killed, and what was found is kept."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

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
