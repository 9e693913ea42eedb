"""Ranks of a process group in processes of their own, which are started once and run many calls."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from indexer.distributed import DistributedIndexScorer

ANSWER_SECONDS = 900.0
"""Time for the slowest answer on a busy machine."""


@dataclass
class Rank:
    """What a rank's process keeps from call to call."""

    index: int
    groups: dict[int, dist.ProcessGroup]
    """The first ranks of the pool, by their number; those that this rank belongs to."""
    scorers: dict[str, DistributedIndexScorer] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """An exception that a call on a rank ended with."""

    error: Exception
    trace: str


class RankPool:
    """So many ranks over Gloo on loopback. As a context it ends those that are left, by their ids.

    Args:
        size: ranks.
        backend: of their process groups.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.support.rank_pool"])
        self._folder = tempfile.TemporaryDirectory()
        self.processes = []
        self._connections: list[Connection] = []
        for index in range(size):
            here, there = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(target=_serve, args=(index, size, backend, store, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._connections.append(here)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def start(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int]) -> None:
        """Begin ``function(rank, *arguments)`` on some ranks; a tuple in ``PerRank`` has one for each."""
        for rank in ranks:
            own = [value[rank] if isinstance(value, PerRank) else value for value in arguments]
            self._connections[rank].send((function, own))

    def finish(self, ranks: Sequence[int]) -> list[Any]:
        """What the calls return, or a :class:`Failure`; None of a rank that ended."""
        outcomes = []
        for rank in ranks:
            if not self._connections[rank].poll(ANSWER_SECONDS):
                raise AssertionError(f"rank {rank} did not answer within {ANSWER_SECONDS} s")
            try:
                outcomes.append(self._connections[rank].recv())
            except (EOFError, ConnectionResetError):
                outcomes.append(None)
        return outcomes

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int]) -> list[Any]:
        """Run a function on some ranks at once; raises what it raises on the first that fails."""
        self.start(function, *arguments, ranks=ranks)
        outcomes = self.finish(ranks)
        for rank, outcome in zip(ranks, outcomes):
            failed = isinstance(outcome, Failure)
            assert not failed, f"rank {rank}: {outcome.trace}"
        return outcomes

    def stop(self, rank: int) -> None:
        """SIGSTOP: a rank that is there and never answers."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)


class PerRank(tuple[Any, ...]):
    """An argument that differs from rank to rank."""

    __slots__ = ()


def _serve(index: int, size: int, backend: str, store: str, connection: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=index, world_size=size)
    made = {ranks: dist.new_group(list(range(ranks)), backend=backend) for ranks in range(1, size + 1)}
    groups = {ranks: group for ranks, group in made.items() if isinstance(group, dist.ProcessGroup)}
    rank = Rank(index, groups)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            outcome = function(rank, *arguments)
        except Exception as error:
            outcome = Failure(error, traceback.format_exc())
        connection.send(outcome)
