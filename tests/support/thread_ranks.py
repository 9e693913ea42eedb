"""Ranks as threads of one process: everything of a scorer over ranks but the transport, in milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import pytest
import torch

from indexer import IndexerConfig
from indexer.distributed import DistributedIndexScorer
from indexer.distributed.ranks import RankGroup

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
