"""A live sidecar in a process of its own, on a loopback port that the system picks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.support.cases import ROOT
from tests.support.process import ForkedProcess

START_SECONDS = 120.0
"""Time to import torch and pass the self-test on a busy machine."""


class LiveServer:
    """Starts ``python -m server`` and waits until it listens, and until it is ready unless told otherwise.

    Args:
        flags: settings as flags.
        environment: further environment variables.
        ready: whether to wait for the self-test.
        module: what is run, and any words before the flags, for tests that wrap the server.
        forked: whether the process is a fork that has everything imported, which saves two seconds; not for
            tests of how a server ends.
    """

    def __init__(
        self,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        ready: bool = True,
        module: str = "server",
        forked: bool = False,
    ) -> None:
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - open as long as the server runs
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("NVFP4_INDEXER_")}
        words = [*module.split(), "--port", "0", *flags]
        variables = {**inherited, **(environment or {})}
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if forked:
            self.process = ForkedProcess.of_module(words[0], words[1:], variables, None, self._log)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words], cwd=ROOT, stderr=self._log, env=variables
            )
        try:
            self.url = f"http://127.0.0.1:{self._wait_for('listening')['port']}"
            if ready:
                self._wait_for("ready")
        except BaseException:
            self.kill()
            self._log.close()
            raise

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def client(self, token: str | None = None) -> httpx.Client:
        """An httpx client of this server."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def events(self) -> list[dict[str, Any]]:
        """The log so far."""
        self._log.flush()
        lines = Path(self._log.name).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def log_text(self) -> str:
        """Everything the server wrote to stderr."""
        return Path(self._log.name).read_text(encoding="utf-8")

    def stop(self, seconds: float = 60) -> int:
        """SIGTERM, and the exit code; killed if it takes longer."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        self._log.close()
        return self.process.returncode

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def _wait_for(self, event: str) -> dict[str, Any]:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            for found in self.events():
                if found["event"] == event:
                    return found
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"the server logged no {event!r} event: {self.log_text()[-2000:]}")


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until a condition holds; fail if it does not within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
