"""The ranks of a process group, and messages between all of them that end by a deadline.

Messages on the host are sent from each rank to each, not through a collective: a collective passes them along
a ring, so that a rank that ends looks to most others like a neighbour that is late. This way each rank waits
for every other one itself and can name the one that fails. The bytes are those of an all-gather.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import suppress
from copy import copy
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from kernel.errors import InvalidArgumentError, RankLostError

_FIRST_TAG = 0x4E56_0000
"""Of messages on the host: far from those that a program counts up from 0."""
_MAX_SECONDS = 86400
_POLL_SECONDS = 2e-5
_LOST_REMEDY = "start the ranks again and make the scorer anew"
_NCCL_REMEDY = (
    "give each rank a GPU of its own, read what NCCL logs with NCCL_DEBUG=INFO, and start the ranks again"
)

_num_made: Counter[str] = Counter()
"""Rank groups of this process by the name of their process group: ranks make them in one order."""


class RankGroup:
    """The ranks of a process group. Every rank makes it, and sends the same messages.

    Args:
        group: the default group when None. It needs Gloo for tensors on the host; tensors on a GPU go over
            NCCL (RCCL on AMD) if it has that for them, else through the host. A loss there aborts NCCL's part
            of it.
        deadline_seconds: time that ranks get to answer, from when this one asks.

    Attributes:
        rank: this one, in the group.
        size: ranks of the group.
        bytes_sent: payload given to the transport so far, to all other ranks together.
        bytes_received: payload asked of them.
        lost: the error that every later message raises; None as long as all ranks answer.

    Raises:
        InvalidArgumentError: there is no such process group, or the deadline is no time.
    """

    def __init__(self, group: dist.ProcessGroup | None, deadline_seconds: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgumentError(
                "group",
                group,
                "torch.distributed is not initialised",
                "start the program with torchrun and call torch.distributed.init_process_group() first",
            )
        if not isinstance(deadline_seconds, (int, float)) or not 0 < deadline_seconds < _MAX_SECONDS:
            raise InvalidArgumentError(
                "deadline_seconds",
                repr(deadline_seconds),
                f"must be a number above 0 and below {_MAX_SECONDS}",
                "pass seconds, 30.0 say",
            )
        found = dist.group.WORLD if group is None else group
        if found is None:
            raise AssertionError("torch.distributed is initialised")
        self._group: dist.ProcessGroup = found
        backends = dist.get_backend_config(self._group)
        if "cpu:gloo" not in backends:
            raise InvalidArgumentError(
                "group",
                backends,
                "must have Gloo for tensors on the host",
                "call init_process_group('cpu:gloo,cuda:nccl')",
            )
        self._over_nccl = "cuda:nccl" in backends
        self.bytes_sent = 0
        self.bytes_received = 0
        self._deadline = timedelta(seconds=deadline_seconds)
        self._global_ranks = dist.get_process_group_ranks(self._group)
        self.rank = self._global_ranks.index(dist.get_rank())
        self.size = len(self._global_ranks)
        self.lost: RankLostError | None = None
        self._tag = _FIRST_TAG + _num_made[self._group.group_name]
        _num_made[self._group.group_name] += 1

    def connect(self, device: torch.device) -> None:
        """Connect the ranks' GPUs, which NCCL does at the first message between them, and with no deadline.

        Args:
            device: where this rank's later messages lie; those on the host need no more than the group.

        Raises:
            RankLostError: NCCL cannot connect them, or a rank ended.
        """
        if device.type == "cuda" and self._over_nccl and self.size > 1:
            own = torch.zeros(1, dtype=torch.uint8, device=device)
            self._gather_on_device(own, own.repeat(self.size))

    def gather(self, payload: torch.Tensor, gathered: torch.Tensor) -> None:
        """Send a payload to every other rank, and write what every rank sends.

        Args:
            payload: contiguous, of one shape and dtype on all ranks.
            gathered: ``[size, *payload.shape]``, contiguous, written.

        Raises:
            RankLostError: a rank ended, or did not send its own by the deadline.
        """
        if self.lost is not None:
            raise copy(self.lost)
        gathered[self.rank] = payload
        if not payload.numel() or self.size == 1:
            return
        self.bytes_sent += (self.size - 1) * payload.nbytes
        self.bytes_received += (self.size - 1) * payload.nbytes
        if payload.device.type == "cpu":
            self._gather_on_host(payload, gathered)
        elif self._over_nccl:
            self._gather_on_device(payload, gathered)
        else:
            on_host = torch.empty_like(gathered, device="cpu")
            self._gather_on_host(payload.cpu(), on_host)
            gathered.copy_(on_host)

    def _gather_on_host(self, payload: torch.Tensor, gathered: torch.Tensor) -> None:
        end = time.monotonic() + self._deadline.total_seconds()
        failures: dict[int, str] = {}
        waiting: list[tuple[int, dist.Work]] = []
        for rank, peer in enumerate(self._global_ranks):
            if rank == self.rank:
                continue
            try:
                received = dist.irecv(gathered[rank], src=peer, group=self._group, tag=self._tag)
                sent = dist.isend(payload, dst=peer, group=self._group, tag=self._tag)
            except RuntimeError as error:
                failures[rank] = str(error)
                continue
            waiting += [(rank, work) for work in (received, sent) if work is not None]
        for rank, work in waiting:
            try:
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            except RuntimeError as error:
                failures.setdefault(rank, str(error))
        if failures:
            self.lost = _lost(failures, self._deadline)
            raise copy(self.lost)

    def _gather_on_device(self, payload: torch.Tensor, gathered: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(payload.device)
        own: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        own.record(stream)
        try:
            dist.all_gather_into_tensor(gathered, payload, group=self._group)
        except RuntimeError as error:
            self._give_up_on_device(f"NCCL failed ({error})", _NCCL_REMEDY)
        done.record(stream)
        own.synchronize()  # the payload is computed by now: only then does the deadline begin
        end = time.monotonic() + self._deadline.total_seconds()
        while not done.query():
            if time.monotonic() > end:
                self._give_up_on_device(_late(self._deadline), _LOST_REMEDY)
            time.sleep(_POLL_SECONDS)

    def _give_up_on_device(self, reason: str, remedy: str) -> NoReturn:
        # A collective that waits for a rank that ended would keep the stream, and what is queued, for ever.
        with suppress(RuntimeError):
            self._group._get_backend(torch.device("cuda")).abort()
        # Names those that ended.
        probe = torch.zeros((self.size, 1), dtype=torch.uint8, device="cpu")
        self._gather_on_host(probe[self.rank].clone(), probe)
        self.lost = RankLostError((), reason, remedy)
        raise copy(self.lost)


def _lost(failures: dict[int, str], deadline: timedelta) -> RankLostError:
    ranks = tuple(sorted(failures))
    late = [rank for rank in ranks if re.search("(?i)timed ?out|timeout", failures[rank])]
    ended = [rank for rank in ranks if rank not in late]
    if late and ended:
        # Perhaps the one gave up on the other: only its owner knows.
        reason = f"the connection to {', '.join(map(str, ended))} ended, {_late(deadline)} from the rest"
    else:
        reason = _late(deadline) if late else "its connection ended"
    return RankLostError(ranks, reason, _LOST_REMEDY)


def _late(deadline: timedelta) -> str:
    return f"no answer within {deadline.total_seconds():g} s"
