"""Python in processes of its own."""

from __future__ import annotations

import dataclasses
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import current_process, get_context
from multiprocessing import forkserver as forks
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, Any

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
    """Processes that begin with the project imported: forks of one process that did what `preloaded` does."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


class ForkedProcess:
    """A process of :func:`forkserver` with the part of subprocess.Popen that tests use.

    Its interpreter is not shut down as one that was started: tests of how a process ends need the latter.
    """

    def __init__(self, target: Callable[..., object], *arguments: object) -> None:
        context = forkserver()
        forks.ensure_running()
        address = forks._forkserver._forkserver_address  # type: ignore[attr-defined]
        self._process = context.Process(target=_run, args=(address, target, arguments), daemon=True)
        self._process.start()

    @classmethod
    def of_module(
        cls,
        module: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        stdout: int | IO[Any] | None,
        stderr: int | IO[Any],
    ) -> ForkedProcess:
        """``python -m module words`` in the project's root."""
        # Pickling a connection hands its descriptor over.
        streams = [None if file is None else Connection(os.dup(_number(file))) for file in (stdout, stderr)]
        return cls(_run_module, module, list(words), dict(environment), streams)

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


def _run(address: str, target: Callable[..., object], arguments: tuple[object, ...]) -> None:
    # Its own children come from the same process; multiprocessing would start another one for them.
    forks._forkserver._forkserver_address = address  # type: ignore[attr-defined]
    forks._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    current_process().daemon = False
    target(*arguments)


def _number(file: int | IO[Any]) -> int:
    return file if isinstance(file, int) else file.fileno()


def _run_module(
    module: str, words: list[str], environment: dict[str, str], streams: list[Connection | None]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, stream in enumerate(streams, 1):
        if stream is not None:
            os.dup2(stream.fileno(), number)
            stream.close()
    encoding = environment.get("PYTHONIOENCODING")
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115 - open to the end
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = [module, *words]
    sys.modules.pop(module, None)  # it becomes __main__
    runpy.run_module(module, run_name="__main__", alter_sys=True)


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
    """Run the command in a :class:`ForkedProcess`, with further environment variables."""
    with tempfile.TemporaryFile("w+") as stdout:
        done = spawn_onto(stdout, *words, **environment)
        stdout.seek(0)
        done.stdout = stdout.read()
        return done


def spawn_onto(
    stdout: int | IO[Any], *words: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """As :func:`spawn`, with a stdout that is given."""
    given = [str(word) for word in words]
    with tempfile.TemporaryFile("w+") as stderr:
        process = ForkedProcess.of_module("client.cli", given, {**os.environ, **environment}, stdout, stderr)
        code = process.wait()
        stderr.seek(0)
        return subprocess.CompletedProcess(given, code, "", stderr.read())


def wrong_expectation(folder: Path) -> Path:
    """A case whose expected ids are not the right selection, in one row."""
    case = read_case(CUT)
    assert case.expected_block_ids is not None
    ids = case.expected_block_ids.copy()
    ids[0, 0] = ids[0, 0, ::-1]
    path = folder / "wrong.safetensors"
    write_case(dataclasses.replace(case, expected_block_ids=ids), path)
    return path
