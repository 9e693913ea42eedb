"""The ranks of a process group, and messages between all of them that end by a deadline.

Messages on the host are sent from each rank to each, not through a collective: a collective passes them along
a ring, so that a rank that ends looks to most others like a neighbour that is late. This way each rank waits
for every other one itself and can name the one that fails. The bytes are those of an all-gather.
"""

from __future__ import annotations

import re
import time
from copy import copy
from datetime import timedelta
from math import isfinite
from typing import Any, cast

import torch
import torch.distributed as dist

from kernel.errors import InvalidArgumentError, RankLostError

_POLL_SECONDS = 2e-5
_LOST_REMEDY = "start the ranks again and make the scorer anew"


class RankGroup:
    """Process groups of its own on the ranks of a given one. Collective: every rank makes it.

    Args:
        group: whose ranks; the default group when None.
        deadline_seconds: time that ranks get to answer, from when this one asks.

    Attributes:
        rank: this one, in the group.
        size: ranks of the group.
        bytes_sent: payload given to the transport so far, to all other ranks together.
        bytes_received: payload received from them.

    Raises:
        InvalidArgumentError: there is no process group, or the deadline is no time.
        RankLostError: ranks are missing.
    """

    def __init__(self, group: dist.ProcessGroup | None, deadline_seconds: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgumentError(
                "group",
                group,
                "torch.distributed is not initialised",
                "start the program with torchrun and call torch.distributed.init_process_group() first",
            )
        if not isfinite(deadline_seconds) or deadline_seconds <= 0:
            raise InvalidArgumentError(
                "deadline_seconds", deadline_seconds, "must be above 0 and finite", "pass seconds, 30.0 say"
            )
        self.bytes_sent = 0
        self.bytes_received = 0
        self._deadline = timedelta(seconds=deadline_seconds)
        self._global_ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self.rank = self._global_ranks.index(dist.get_rank())
        self.size = len(self._global_ranks)
        self._lost: RankLostError | None = None
        self._host = self._new_group("gloo")
        self._device: dist.ProcessGroup | None = None

    def use_device(self, device: torch.device) -> None:
        """Let :meth:`gather` send between GPUs, over NCCL (RCCL on AMD). Collective."""
        if device.type == "cuda":
            self._device = self._new_group("nccl")

    def close(self) -> None:
        """Leave the groups; every later message raises :class:`RankLostError`."""
        if self._lost is None:
            self._lost = RankLostError((self.rank,), "this rank closed its scorer", _LOST_REMEDY)
        for group in (self._device, self._host):
            if group is not None:
                dist.destroy_process_group(group)
        self._device = None

    def gather(self, payload: torch.Tensor, gathered: torch.Tensor) -> None:
        """Send a payload to every other rank, and write what every rank sends.

        Args:
            payload: contiguous, of one shape and dtype on all ranks.
            gathered: ``[size, *payload.shape]``, contiguous, written.

        Raises:
            RankLostError: a rank ended, or did not send its own by the deadline.
        """
        if self._lost is not None:
            raise copy(self._lost)
        if self._device is not None and payload.device.type == "cuda":
            self._gather_on_device(payload, gathered)
        else:
            self._gather_on_host(payload, gathered)

    def _gather_on_host(self, payload: torch.Tensor, gathered: torch.Tensor) -> None:
        gathered[self.rank] = payload
        if not payload.numel():
            return
        end = time.monotonic() + self._deadline.total_seconds()
        failures: dict[int, str] = {}
        waiting: list[tuple[int, dist.Work]] = []
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            peer = self._global_ranks[rank]
            try:
                received = dist.irecv(gathered[rank], src=peer, group=self._host)
                sent = dist.isend(payload, dst=peer, group=self._host)
                self.bytes_sent += payload.nbytes
                self.bytes_received += payload.nbytes
            except RuntimeError as error:
                failures[rank] = str(error)
                continue
            waiting += [(rank, work) for work in (received, sent) if work is not None]
        for rank, work in waiting:
            left = max(end - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                failures.setdefault(rank, str(error))
        if failures:
            self._lost = _lost(failures, self._deadline)
            raise copy(self._lost)

    def _gather_on_device(self, payload: torch.Tensor, gathered: torch.Tensor) -> None:
        dist.all_gather_into_tensor(gathered, payload, group=self._device)
        self.bytes_sent += (self.size - 1) * payload.nbytes
        self.bytes_received += (self.size - 1) * payload.nbytes
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(payload.device))
        end = time.monotonic() + self._deadline.total_seconds()
        # A collective that waits for a rank that ended would keep the stream for ever.
        while not done.query():
            if time.monotonic() > end:
                # Names those that ended.
                self._gather_on_host(torch.zeros(1), torch.zeros(self.size, 1))
                self._lost = RankLostError((), _late(self._deadline), _LOST_REMEDY)
                raise copy(self._lost)
            time.sleep(_POLL_SECONDS)

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        try:
            group = dist.new_group(
                self._global_ranks,
                timeout=self._deadline,
                backend=backend,
                use_local_synchronization=len(self._global_ranks) < dist.get_world_size(),
            )
        except RuntimeError as error:
            reason = f"one of {self._global_ranks} did not come in time ({_first_line(error)})"
            raise RankLostError((), reason, _LOST_REMEDY) from error
        return cast("dist.ProcessGroup", group)


def _lost(failures: dict[int, str], deadline: timedelta) -> RankLostError:
    # What this rank gave up itself says nothing about the others.
    ended = tuple(rank for rank, text in failures.items() if not re.search("(?i)timed ?out|timeout", text))
    if ended:
        return RankLostError(tuple(sorted(ended)), "its connection ended", _LOST_REMEDY)
    return RankLostError(tuple(sorted(failures)), _late(deadline), _LOST_REMEDY)


def _late(deadline: timedelta) -> str:
    return f"no answer within {deadline.total_seconds():g} s"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
