"""One checked scoring call: score and select on a backend, each stage timed.

Defines what the call paths of a scorer share: the options of a call, its result, its stage times, its score
buffer, and the error for memory that ran out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from indexer.cache import memory_bytes
from kernel.backends.base import Backend, Order, Precision
from kernel.errors import InvalidArgumentError
from kernel.step import Plan


@dataclass(frozen=True)
class ScoreOptions:
    """The options of a scoring call, checked, defaults filled in.

    Attributes:
        topk: blocks to select for a row.
        order: order of the block ids.
        init_blocks: blocks forced at a row's start, at most those of the longest context.
        local_blocks: blocks forced at a row's end, likewise.
        return_scores: whether the scores are returned.
    """

    topk: int
    order: Order
    init_blocks: int
    local_blocks: int
    return_scores: bool


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


def score_and_select(
    backend: Backend,
    plan: Plan,
    q: torch.Tensor,
    pages: torch.Tensor,
    options: ScoreOptions,
    times: StageTimes,
    scores: torch.Tensor | None = None,
) -> ScoreResult:
    """Scores a planned call and selects each row's best blocks.

    Args:
        backend: runs it.
        plan: of lengths that the host knows, with the options' order and forced blocks.
        q: ``[total_q, H, 128]`` float8_e4m3fn, contiguous.
        pages: ``[num_pages, 9216]`` uint8.
        options: of the call.
        times: the call's stages so far; ``score`` and ``topk``, or ``select``, are added.
        scores: ``[H, total_q, S]`` float32 to write them to, checked; allocated when None and returned.

    Raises:
        InvalidArgumentError: the scores do not fit in memory.
        MemoryError, torch.OutOfMemoryError: the backend needs more memory than there is.
    """
    device, num_blocks = pages.device, plan.tensors[1].clone()  # the plan is used again
    total_q, heads, _ = q.shape
    if options.return_scores and scores is None:
        scores = allocate_scores((heads, total_q, plan.header.num_score_blocks), device)
    block_ids = torch.full((heads, total_q, options.topk), -1, dtype=torch.int32, device=device)
    if scores is None:
        with times.stage("select"):
            backend.select_plan(plan, q, pages, block_ids)
    else:
        with times.stage("score"):
            backend.score_plan(plan, q, pages, scores)
        with times.stage("topk"):
            backend.topk(scores, num_blocks, block_ids, options.order)
    return ScoreResult(block_ids, scores, num_blocks, backend.name, backend.precision, times)


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


@contextmanager
def named_out_of_memory(argument: str, rows: torch.Tensor, limit: str, remedy: str) -> Iterator[None]:
    """Names the argument at fault when memory runs out in the body, on the host or on a GPU.

    Args:
        argument: ``NAME.shape[0]``.
        rows: that argument, not yet checked: read only once memory has run out.
        limit: what needs the memory.
        remedy: what to do.

    Raises:
        InvalidArgumentError: in place of MemoryError and torch.OutOfMemoryError.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InvalidArgumentError(argument, rows.shape[0], limit, remedy) from error


TOO_MANY_QUERIES = ("the call needs more memory for them than there is", "score fewer queries at a time")
"""Limit and remedy of a scoring call that runs out of memory."""


# ---- Stage times ----


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class StageTimes(Mapping[str, float]):
    """Seconds of each stage, in the order in which they ran.

    On a CPU a stage is timed by the clock. On a GPU, where calls return before their work is done, events are
    recorded around it and read when someone asks: the first look waits for the work, a call never does.
    Empty where stages are not measured.
    """

    def __init__(self, device: torch.device, *, measured: bool = True) -> None:
        self._device = device
        self._measured = measured
        self._seconds: dict[str, float] = {}
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as a part of one stage."""
        if not self._measured:
            yield
        elif self._device.type == "cuda":
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
