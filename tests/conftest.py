"""Settings every test runs under."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from hypothesis import settings

from tests.gfx950 import compiled
from tests.mutation import score

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")

_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _workers > 1:
    # Each worker, and each process that it starts, would otherwise start a thread per core, and they would
    # wait for one another.
    _threads = max(1, len(os.sched_getaffinity(0)) // _workers)
    torch.set_num_threads(_threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads))


def pytest_configure(config: pytest.Config) -> None:
    """Give the session, and the workers that inherit its environment, a folder to share."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        os.environ[compiled.SESSION] = folder.name
        os.environ.setdefault(compiled.FOLDER, folder.name)
        # Threads that wait spin: numpy's cost its tests three times their own time on two busy cores.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's, in processes that tests start


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the scores that mutation tests record, of whichever worker ran them."""
    recorded = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for name, value in getattr(report, "user_properties", [])
        if name == score.PROPERTY
    ]
    if recorded:
        terminalreporter.section("mutation scores")
        for line in score.lines(recorded):
            terminalreporter.write_line(line)
