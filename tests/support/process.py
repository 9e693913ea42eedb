"""Python in processes of its own."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from client.cli import app
from indexer.case import read_case, write_case
from tests.support.cases import CUT, ROOT


def python(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the project's root, with further environment variables."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def printed_by(*words: str | Path, **environment: str) -> str:
    """What :func:`python` printed; fail unless it ended well."""
    done = python(*words, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def forkserver() -> ForkServerContext:
    """Processes that begin with torch and the server imported: forks of one process that did nothing else."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["server.serve", "tests.support.process_group"])
    return context


class ForkedProcess:
    """A process of :func:`forkserver` with the part of subprocess.Popen that tests use.

    Its interpreter is not shut down as one that was started: tests of how a process ends need the latter.
    """

    def __init__(self, target: Callable[..., object], *arguments: object) -> None:
        self._process = forkserver().Process(target=target, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """Its id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> Any:
        """Exit code, minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code of one that ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


# The command, run in this process or in one of its own.

VERIFY_KEYS = [
    "case",
    "backend",
    "ok",
    "rows",
    "max_score_error",
    "score_tolerance",
    "topk_mismatches",
    "seconds",
    "unjudged_rows",
    "not_finite",
    "engine",
]
"""Of one line of ``verify --json``, in order."""


def call(*words: str | Path) -> Result:
    """Run the command in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def spawn(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return python("-m", "client.cli", *words, **environment)


def wrong_expectation(folder: Path) -> Path:
    """A case whose expected ids are not the right selection, in one row."""
    case = read_case(CUT)
    assert case.expected_block_ids is not None
    ids = case.expected_block_ids.copy()
    ids[0, 0] = ids[0, 0, ::-1]
    path = folder / "wrong.safetensors"
    write_case(dataclasses.replace(case, expected_block_ids=ids), path)
    return path
