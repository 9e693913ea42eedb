"""Settings every test runs under."""

from __future__ import annotations

import gc
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
    """Leave what is imported out of garbage collections, which search it for a tenth of a second each.

    Give the session, and the workers that inherit its environment, a folder to share.
    """
    gc.freeze()
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        os.environ[compiled.SESSION] = folder.name
        os.environ.setdefault(compiled.FOLDER, str(compiled.kept_folder()))
        # Threads that wait spin: numpy's cost its tests three times their own time on two busy cores.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's, in processes that tests start


@pytest.hookimpl(trylast=True)  # once ids and marks are there
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that share costly set-up to one worker: compiled kernels, their first launches, ranks.

    The simulated device's kernels take a second or two at their first launch in a process.
    """
    for item in items:
        folder, _, file = item.nodeid.partition("::")[0].removeprefix("tests/").partition("/")
        if folder == "gfx950" or (folder == "distributed" and file != "test_agreement.py"):
            item.add_marker(pytest.mark.xdist_group(f"{folder}/{file}"))
        elif folder == "contract" and "flydsl-sim" in item.name:
            item.add_marker(pytest.mark.xdist_group("flydsl-sim"))


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
