"""A scorer over several ranks for one sidecar: rank 0 in its process, the others in child processes.

Rank 0 sends each call to the others through pipes before it makes the call itself; the collectives of the
call go over torch.distributed. A pipe has no timeout, so an idle rank waits for calls without end, and it
breaks with the process that holds its other end: no rank outlives the server, however that ends.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import structlog
import torch
import torch.distributed as dist

from indexer.config import IndexerConfig
from indexer.distributed import DistributedIndexScorer
from indexer.pipeline import ScoreResult
from kernel.backends import registry
from kernel.errors import IndexerError, InvalidArgumentError, RankLostError

_START_SECONDS = 120.0
"""Time for all ranks to import torch and join the group."""
_END_SECONDS = 10.0
"""Time for a rank to exit once its pipe is closed."""
_LOST_REMEDY = "restart the server"
_GPU_BACKENDS = ("flydsl", "triton")
_log = structlog.get_logger("server")


class LeadingScorer(DistributedIndexScorer):
    """Rank 0: starts the others and has them make every call, too.

    Args:
        config: as of one scorer; its pages are shared out, its device is that of rank 0.
        ranks: in all, 2 or more.
        deadline_seconds: see :class:`DistributedIndexScorer`.

    Raises:
        InvalidArgumentError: a device without room for its pages, or one device for all ranks.
        BackendUnavailableError: the backend cannot run here.
        RankLostError: a rank did not start.
    """

    def __init__(self, config: IndexerConfig, ranks: int, deadline_seconds: float) -> None:
        own_config = rank_config(config, 0, ranks)
        self._followers = Followers(config, ranks, deadline_seconds)
        _join(0, ranks, self._followers.store)
        super().__init__(own_config, deadline_seconds=deadline_seconds)

    @property
    def lost(self) -> RankLostError | None:
        """Why no call is possible any more."""
        return super().lost or self._followers.lost

    def close(self) -> None:
        """Ends the other ranks."""
        self._followers.end()

    def add_sequence(self) -> int:
        """See the base class."""
        self._tell("add_sequence")
        return super().add_sequence()

    def append_keys(
        self, seq: int | Sequence[int], k: torch.Tensor, lens: Sequence[int] | None = None
    ) -> None:
        """See the base class."""
        self._tell("append_keys", seq, k, lens)
        super().append_keys(seq, k, lens)

    def truncate_sequence(self, seq: int, length: int) -> None:
        """See the base class."""
        self._tell("truncate_sequence", seq, length)
        super().truncate_sequence(seq, length)

    def fork_sequence(self, seq: int) -> int:
        """See the base class."""
        self._tell("fork_sequence", seq)
        return super().fork_sequence(seq)

    def free_sequence(self, seq: int) -> None:
        """See the base class."""
        self._tell("free_sequence", seq)
        super().free_sequence(seq)

    def score(self, *arguments: Any, **options: Any) -> ScoreResult:
        """See the base class."""
        self._tell("score", *arguments, **options)
        return super().score(*arguments, **options)

    def _tell(self, method: str, *arguments: object, **options: object) -> None:
        self._turn()  # a call that is refused here must not be made there
        if self.lost is not None:
            raise RankLostError(self.lost.ranks, self.lost.reason, _LOST_REMEDY)
        self._followers.tell((method, tuple(map(_packed, arguments)), options))


class Followers:
    """The processes of ranks 1 and up.

    Args:
        config: as of one scorer.
        ranks: in all.
        deadline_seconds: of their scorers.

    Attributes:
        store: file through which the ranks find each other.
        lost: set once one of them ended.
    """

    def __init__(self, config: IndexerConfig, ranks: int, deadline_seconds: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nvfp4-indexer-")
        self.store = str(Path(self._folder.name) / "store")
        self.lost: RankLostError | None = None
        self._ending = False
        context = get_context("spawn")
        self._calls: list[SimpleQueue[bytes | None]] = []
        self._processes = []
        for rank in range(1, ranks):
            here, there = context.Pipe()
            arguments = (rank, ranks, self.store, config, deadline_seconds, there)
            process = context.Process(target=follow, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            calls: SimpleQueue[bytes | None] = SimpleQueue()
            self._calls.append(calls)
            # A thread for each: a rank that hangs does not read, and must not block the others' calls.
            sender = threading.Thread(target=_send, args=(calls, here), name=f"to rank {rank}", daemon=True)
            sender.start()
            _log.info("rank started", rank=rank, pid=process.pid)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def tell(self, call: object) -> None:
        """Sends a call to all, without waiting for any."""
        pickled = bytes(ForkingPickler.dumps(call))
        for calls in self._calls:
            calls.put(pickled)

    def end(self) -> None:
        """Ends all, and kills any that does not exit in time."""
        self._ending = True
        for calls in self._calls:
            calls.put(None)
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()
        _leave()
        self._folder.cleanup()

    def _watch(self) -> None:
        ranks = {process.sentinel: rank for rank, process in enumerate(self._processes, 1)}
        first = wait(list(ranks))[0]
        if self._ending or not isinstance(first, int):
            return
        rank = ranks[first]
        self._processes[rank - 1].join()
        reason = f"its process ended with code {self._processes[rank - 1].exitcode}"
        self.lost = RankLostError((rank,), reason, _LOST_REMEDY)
        _log.error("rank lost", rank=rank, reason=reason, remedy=_LOST_REMEDY)


def _send(calls: SimpleQueue[bytes | None], pipe: Connection) -> None:
    with pipe:
        while (call := calls.get()) is not None:
            try:
                pipe.send_bytes(call)
            except OSError:  # the rank has ended, which the call itself tells
                return


def follow(
    rank: int, ranks: int, store: str, config: IndexerConfig, deadline_seconds: float, pipe: Connection
) -> None:
    """Makes the calls that rank 0 sends, until its end of the pipe closes."""
    # A terminal's Ctrl-C reaches every process; rank 0 drains and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _join(rank, ranks, store)
    scorer = DistributedIndexScorer(rank_config(config, rank, ranks), deadline_seconds=deadline_seconds)
    while True:
        try:
            method, arguments, options = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            getattr(scorer, method)(*(_unpacked(value, scorer.device) for value in arguments), **options)
        except RankLostError:
            break
        except (IndexerError, MemoryError, RuntimeError):
            # Every rank raises the same, and rank 0 answers for all.
            continue
    _leave()


def rank_config(config: IndexerConfig, rank: int, ranks: int) -> IndexerConfig:
    """Returns the configuration of a rank's scorer: its share of the pages, rounded up, and its own GPU.

    Raises:
        InvalidArgumentError: all ranks would use one GPU.
    """
    config = replace(config, num_pages=-(-config.num_pages // ranks))
    if registry.resolve(config.backend) not in _GPU_BACKENDS:
        return config
    if config.device not in (None, "cuda"):
        raise InvalidArgumentError(
            "device", config.device, f"must be 'cuda' for {ranks} ranks, or left out", "leave it out"
        )
    if torch.cuda.device_count() < ranks:
        raise InvalidArgumentError(
            "context_parallel", ranks, f"{torch.cuda.device_count()} GPUs are there", "ask for fewer ranks"
        )
    return replace(config, device=f"cuda:{rank}")


def _join(rank: int, ranks: int, store: str) -> None:
    """Makes the process a rank of the default group, over loopback and with its share of the cores."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_START_SECONDS),
        )
    except RuntimeError as error:
        reason = f"not all ranks started within {_START_SECONDS:g} s ({str(error)[:200]})"
        raise RankLostError((), reason, _LOST_REMEDY) from error


def _leave() -> None:
    """Aborts NCCL's part of the default group, whether the other ranks are alive or not: one of its threads
    polls the store, and would wait there for a file that is gone while the process exits."""
    if dist.is_initialized() and dist.group.WORLD is not None and torch.cuda.is_available():
        with suppress(RuntimeError):
            dist.group.WORLD._get_backend(torch.device("cuda")).abort()


def _packed(value: object) -> object:
    """Returns a tensor as bytes: pickling it into a pipe would pass handles of shared memory."""
    if not isinstance(value, torch.Tensor):
        return value
    host = value.detach().cpu().contiguous()
    return _Tensor(host.dtype, tuple(host.shape), host.flatten().view(torch.uint8).numpy().tobytes())


def _unpacked(value: object, device: torch.device) -> object:
    return value.tensor().to(device) if isinstance(value, _Tensor) else value


class _Tensor:
    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> None:
        self._dtype, self._shape, self._content = dtype, shape, content

    def tensor(self) -> torch.Tensor:
        if not self._content:
            return torch.empty(self._shape, dtype=self._dtype, device="cpu")
        content = torch.frombuffer(bytearray(self._content), dtype=torch.uint8)
        return content.view(self._dtype).view(self._shape)
