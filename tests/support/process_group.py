"""Ranks of a process group in processes of their own, which are started once and run many calls."""

from __future__ import annotations

import copy
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from indexer import IndexerConfig, IndexScorer
from indexer.distributed import DistributedIndexScorer
from indexer.distributed.ranks import RankGroup
from tests.support.process import forkserver
from tests.support.scorer_state import ScorerState, assert_consistent, state_of

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
        context = forkserver()
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


# What ranks are asked to do, and what comes back: scripts of calls, on one scorer or on every rank's.


class Step(NamedTuple):
    """One call of a script. Sequences are named by their places among all that the script made."""

    method: str
    sequences: tuple[int, ...] = ()
    tensor: NDArray[np.generic] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Answer(NamedTuple):
    """The bytes of a result, as numpy arrays."""

    block_ids: NDArray[np.int32]
    scores: NDArray[np.float32] | None
    num_blocks: NDArray[np.int32]


class Refusal(NamedTuple):
    """A named error."""

    kind: str
    text: str


def make(
    rank: Rank, name: str, config: IndexerConfig, ranks: int, head_groups: int, deadline_seconds: float = 60.0
) -> tuple[int, int]:
    """Make a scorer on the first ranks, each on a GPU of its own if on any; context ranks and free pages."""
    if config.device == "cuda":
        config = replace(config, device=f"cuda:{rank.index}")
    scorer = DistributedIndexScorer(
        config, rank.groups[ranks], head_groups=head_groups, deadline_seconds=deadline_seconds
    )
    rank.scorers[name] = scorer
    return scorer.context_ranks, scorer.num_free_pages


def play(rank: Rank, name: str, script: Sequence[Step]) -> list[Any]:
    """Play a script on a rank's scorer."""
    return played(rank.scorers[name], script)


def rank_state(rank: Rank, name: str) -> ScorerState:
    """A rank's own state, after a look whether it is consistent."""
    scorer = rank.scorers[name]
    assert_consistent(scorer)
    return state_of(scorer)


def played(scorer: IndexScorer, script: Sequence[Step]) -> list[Any]:
    """What each call of a script gives; all sequences are dropped at the end."""
    made: list[int] = []
    live: set[int] = set()
    outcomes: list[Any] = []
    for step in script:
        ids = [made[place] for place in step.sequences]
        try:
            outcome = _call(scorer, step, ids)
        except (ValueError, RuntimeError) as error:
            outcomes.append(Refusal(type(error).__name__, str(error)))
            continue
        if step.method in ("add_sequence", "fork_sequence"):
            made.append(outcome)
            live.add(outcome)
        if step.method == "free_sequence":
            live.remove(ids[0])
        outcomes.append(outcome)
    outcomes.append([scorer.sequence_length(seq) for seq in scorer.sequences])
    for seq in sorted(live):
        scorer.free_sequence(seq)
    return outcomes


def _call(scorer: IndexScorer, step: Step, ids: list[int]) -> Any:
    tensor = None if step.tensor is None else torch.from_numpy(step.tensor).to(scorer.device)
    options = copy.copy(step.options)
    if step.method == "score":
        result = scorer.score(tensor, ids, **options)  # type: ignore[arg-type]
        return Answer(
            result.block_ids.cpu().numpy(),
            None if result.scores is None else result.scores.cpu().numpy(),
            result.num_blocks.cpu().numpy(),
        )
    arguments: list[Any] = [*ids, *([] if tensor is None else [tensor])]
    return getattr(scorer, step.method)(*arguments, **options)


def assert_same_outcomes(actual: Sequence[Any], expected: Sequence[Any], who: str) -> None:
    """Fail unless two plays of a script gave the same ids, errors, and bytes of results."""
    assert len(actual) == len(expected)
    for place, (got, want) in enumerate(zip(actual, expected)):
        where = f"{who}, step {place}"
        if not isinstance(want, Answer):
            assert got == want, where
            continue
        assert isinstance(got, Answer), f"{where}: {got}"
        for name, mine, other in zip(Answer._fields, got, want):
            if mine is None or other is None:
                assert mine is other, f"{where}: {name}"
                continue
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype), f"{where}: {name}"
            assert mine.tobytes() == other.tobytes(), f"{where}: {name}"


# Ranks as threads of one process: everything of a scorer over ranks but the transport, in milliseconds.

T = TypeVar("T")


class _ThreadRank:
    """Takes the place of a rank group: a payload is handed over where all threads meet."""

    lost = None
    bytes_sent = 0
    bytes_received = 0

    def __init__(self, rank: int, payloads: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(payloads)
        self._payloads = payloads
        self._barrier = barrier

    def connect(self, device: torch.device) -> None:
        """See :meth:`RankGroup.connect`."""

    def gather(self, payload: torch.Tensor, gathered: torch.Tensor) -> None:
        """See :meth:`RankGroup.gather`; payloads that differ in shape fail here, as they would hang there."""
        self._payloads[self.rank] = payload
        self._barrier.wait(60)
        for rank, other in enumerate(self._payloads):
            assert (other.shape, other.dtype) == (payload.shape, payload.dtype)
            gathered[rank] = other
        self._barrier.wait(60)


class ThreadRanks:
    """Scorers of one configuration on so many ranks.

    Args:
        config: of each.
        ranks: threads.
        head_groups: of the scorers.
    """

    def __init__(self, config: IndexerConfig, ranks: int, head_groups: int) -> None:
        groups = _groups(ranks)
        self._threads = ThreadPoolExecutor(ranks)

        def make(rank: int) -> DistributedIndexScorer:
            group = cast("Any", groups[rank])
            return DistributedIndexScorer(config, group, head_groups=head_groups)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("indexer.distributed.scorer.RankGroup", _given_group)
            self.scorers = self._on_all(range(ranks), make)

    def run(self, function: Callable[[DistributedIndexScorer], T]) -> list[T]:
        """What a function gives on every rank, called at once."""
        return self._on_all(self.scorers, function)

    def _on_all(self, values: Sequence[Any], function: Callable[[Any], T]) -> list[T]:
        return list(self._threads.map(function, values))


def thread_ranks_of(ranks: int, function: Callable[[int, Any], T]) -> list[T]:
    """What a function gives on every rank, called at once with the rank and its group."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(ranks) as threads:
        patch.setattr("indexer.distributed.scorer.RankGroup", _given_group)
        return list(threads.map(function, range(ranks), _groups(ranks)))


def _groups(ranks: int) -> list[_ThreadRank]:
    payloads, barrier = [torch.empty(0)] * ranks, threading.Barrier(ranks)
    return [_ThreadRank(rank, payloads, barrier) for rank in range(ranks)]


def _given_group(group: RankGroup, _: float) -> RankGroup:
    return group
