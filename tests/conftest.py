"""Settings every test runs under."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

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
        if compiled.FOLDER not in os.environ:
            os.environ[compiled.FOLDER] = str(compiled.kept_folder())
        # Threads that wait spin: numpy's cost its tests three times their own time on two busy cores.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's, in processes that tests start


# ---- Which worker runs a test: with --dist loadgroup ----

_WAITING = (
    "http",
    "distributed",
    "newcomer",
    "client/test_command.py",
    "client/test_live.py",
    "client/test_outputs.py",
    "client/test_problems.py",
)
"""Folders and files whose tests wait for deadlines, servers, ranks and processes, half their time or more."""

_LAUNCHING = (
    "gfx950/test_decode.py",
    "gfx950/test_hip_",
    "gfx950/test_kernel_library.py",
    "gfx950/test_prefill.py",
    "gfx950/test_row_calls.py",
)
"""Files that launch the kernels on the simulated device."""


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Gives tests that share costly set-up to one worker, and those that wait to the last worker; others take
    them when nothing else is left.

    By ids: pytest-xdist writes the name of a mark to ids, which pytest 9.2 does not let it do.
    """

    _last: WorkerController | None = None

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0].removeprefix("tests/")
        # Kernels take a second or two at their first launch on the simulated device of a process.
        if path.startswith(_LAUNCHING) or (path.startswith("contract") and "flydsl-sim" in nodeid):
            return "flydsl-sim"
        return path if path.startswith(("gfx950", *_WAITING)) else nodeid

    def schedule(self) -> None:
        if self._last is None and len(self.nodes) > 1:
            self._last = self.nodes[-1]
        super().schedule()

    def _assign_work_unit(self, node: WorkerController) -> None:
        waits = node is self._last
        fitting = next((scope for scope in self.workqueue if scope.startswith(_WAITING) == waits), None)
        if fitting is not None:
            self.workqueue.move_to_end(fitting, last=False)
        elif waits:
            node.shutdown()
            return
        super()._assign_work_unit(node)


def _in_groups(config: pytest.Config) -> bool:
    return bool(config.getoption("dist") == "loadgroup")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """A worker for each core, and one for tests that wait."""
    return len(os.sched_getaffinity(0)) + 1 if _in_groups(config) else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups | None:
    return Groups(config, log) if _in_groups(config) else None


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
