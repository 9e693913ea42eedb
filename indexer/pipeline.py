"""The run of one checked batch: score and select, each request by the operation made for its length."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from indexer.cache import memory_bytes
from kernel.backends.base import Backend, Order, Precision
from kernel.batch import ScoreBatch
from kernel.errors import InvalidArgumentError

# How long each stage of a call took.


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class StageTimes(Mapping[str, float]):
    """Seconds of each stage, in the order in which they ran.

    On a CPU a stage is timed by the clock. On a GPU, where calls return before their work is done, events are
    recorded around it and read when someone asks: the first look waits for the work, a call never does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as a part of one stage."""
        if self._device.type == "cuda":
            start, end = _event(), _event()
            stream = torch.cuda.current_stream(self._device)
            start.record(stream)
            yield
            end.record(stream)
            self._events.setdefault(name, []).append((start, end))
            self._seconds.setdefault(name, 0.0)
        else:
            began = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def __getitem__(self, name: str) -> float:
        for start, end in self._events.pop(name, ()):
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        return self._seconds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._seconds)

    def __len__(self) -> int:
        return len(self._seconds)

    def __repr__(self) -> str:
        return repr(dict(self))


# What a scoring call gives back.


@dataclass(frozen=True, eq=False)
class ScoreResult:
    """Selected blocks of every row, on the scorer's device.

    Attributes:
        block_ids: ``[H, total_q, k]`` int32, logical blocks of the row's request (not pages); -1 where a row
            has fewer than ``k`` blocks.
        scores: ``[H, total_q, S]`` float32, ``-inf`` at and past a row's ``nb``; None when not asked for.
        num_blocks: ``[total_q]`` int32, the causal blocks ``nb`` of each query token.
        backend: name of the backend that ran.
        precision: its precision.
        timings: seconds of each stage of the call, in order.
    """

    block_ids: torch.Tensor
    scores: torch.Tensor | None
    num_blocks: torch.Tensor
    backend: str
    precision: Precision
    timings: Mapping[str, float]


# The score buffer of a call: the one tensor that grows with queries times context.


def allocate_scores(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """A buffer ``[H, total_q, S]`` float32, unwritten.

    Raises:
        InvalidArgumentError: it is larger than the device's memory, or than what is free of it.
    """
    size = 4 * shape[0] * shape[1] * shape[2]
    if size > memory_bytes(device):
        raise _too_large(shape, size, device)
    try:
        return torch.empty(shape, dtype=torch.float32, device=device)
    except (RuntimeError, MemoryError) as error:
        raise _too_large(shape, size, device) from error


def _too_large(shape: tuple[int, ...], size: int, device: torch.device) -> InvalidArgumentError:
    return InvalidArgumentError(
        "return_scores",
        True,
        f"scores {list(shape)} take {size} bytes, which {device} does not have",
        "pass return_scores=False to get block ids alone, or score fewer queries at a time",
    )


# Memory that ran out in a call, on the host or on a GPU, as an error that names the argument at fault.


@contextmanager
def named_out_of_memory(argument: str, rows: torch.Tensor, limit: str, remedy: str) -> Iterator[None]:
    """Name what is too large when memory runs out in the body.

    Args:
        argument: ``NAME.shape[0]``.
        rows: that argument, not yet checked: it is looked at when memory has run out.
        limit: what needs the memory.
        remedy: what to do.

    Raises:
        InvalidArgumentError: in place of MemoryError and torch.OutOfMemoryError.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InvalidArgumentError(argument, rows.shape[0], limit, remedy) from error


@contextmanager
def named_for_queries(q: torch.Tensor) -> Iterator[None]:
    """The same for a scoring call."""
    limit = "the call needs more memory for them than there is"
    with named_out_of_memory("q.shape[0]", q, limit, "score fewer queries at a time"):
        yield


def score_and_select(
    backend: Backend,
    batch: ScoreBatch,
    *,
    topk: int,
    order: Order,
    times: StageTimes,
    return_scores: bool,
    scores: torch.Tensor | None = None,
) -> ScoreResult:
    """Run a batch.

    Args:
        backend: runs it.
        batch: the call.
        topk: blocks to select for a row.
        order: order of the block ids.
        times: the call's stages so far; ``score`` and ``topk``, or ``select``, are added.
        return_scores: whether to give the scores back.
        scores: ``[H, total_q, S]`` float32 to write them to, checked; one is made when None.

    Raises:
        InvalidArgumentError: the scores, or what the backend needs beside them, do not fit in memory.
    """
    device = batch.pages.device
    if return_scores and scores is None:
        scores = allocate_scores((batch.num_heads, batch.total_q, batch.num_score_blocks), device)
    shape = (batch.num_heads, batch.total_q, topk)
    with named_for_queries(batch.q):
        num_blocks = batch.num_blocks_per_query().to(device)
        block_ids = torch.full(shape, -1, dtype=torch.int32, device=device)
        if scores is None:
            with times.stage("select"):
                backend.select(batch, block_ids, order)
        else:
            with times.stage("score"):
                backend.score(batch, scores)
            with times.stage("topk"):
                backend.topk(scores, num_blocks, block_ids, order)
    return ScoreResult(
        block_ids=block_ids,
        scores=scores,
        num_blocks=num_blocks,
        backend=backend.name,
        precision=backend.precision,
        timings=times,
    )
