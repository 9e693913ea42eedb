"""A step of an engine, planned once and run for every layer.

Lengths, block tables and options are the same for all layers of a step; queries and pages differ. A backend
turns a :class:`Step` into a :class:`Plan`, tensors that its kernels read, and runs the plan on each layer's
queries and pages.

    step = Step(block_table, lengths ...)      checked, on the host or on the device
    plan = backend.plan(step)                  once: tiles, splits and row maps, one copy to the device
    backend.select(plan, q, pages, block_ids)  57 times: launches only
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.batch import Request, ScoreBatch
from kernel.contract import BLOCK_TOKENS

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lengths:
    """The requests of a ragged batch, each field ``[n]`` int64 on the host.

    Attributes:
        table_rows: row of the block table.
        query_starts: first row in ``q``.
        query_lens: queries, which stand at the last positions.
        seq_lens: keys, this step's included.
    """

    table_rows: IntArray
    query_starts: IntArray
    query_lens: IntArray
    seq_lens: IntArray

    @staticmethod
    def of(requests: Sequence[Request]) -> Lengths:
        """The same requests as arrays."""
        rows = [(r.table_row, r.query_start, r.query_len, r.seq_len) for r in requests]
        return Lengths(*np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy())

    @staticmethod
    def consecutive(query_lens: IntArray, seq_lens: IntArray) -> Lengths:
        """Requests whose rows follow one another, in the order of the block table."""
        ends = np.cumsum(query_lens)
        return Lengths(np.arange(query_lens.size), ends - query_lens, query_lens, seq_lens)

    def __len__(self) -> int:
        return self.query_lens.size

    def __getitem__(self, chosen: Any) -> Lengths:
        """Some of the requests: a slice, a mask or indices."""
        return Lengths(
            self.table_rows[chosen], self.query_starts[chosen], self.query_lens[chosen], self.seq_lens[chosen]
        )

    @property
    def fields(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The fields in their order."""
        return self.table_rows, self.query_starts, self.query_lens, self.seq_lens

    @property
    def prefix_lens(self) -> IntArray:
        """Keys before the first query of each request."""
        return self.seq_lens - self.query_lens

    @cached_property
    def num_blocks(self) -> IntArray:
        """Blocks that the rows of each request may see; 0 without queries."""
        return np.where(self.query_lens > 0, -(-self.seq_lens // BLOCK_TOKENS), 0)

    @cached_property
    def max_blocks(self) -> int:
        """Blocks of the longest request."""
        return int(self.num_blocks.max(initial=0))

    def requests(self) -> tuple[Request, ...]:
        """The same requests one by one."""
        return tuple(Request(*row) for row in zip(*(field.tolist() for field in self.fields)))

    def blocks_per_query(self, total_q: int) -> NDArray[np.int32]:
        """``nb`` of every query token: ``[total_q]``, 0 for tokens of no request."""
        owner = np.repeat(np.arange(len(self)), self.query_lens)
        query = np.arange(owner.size) - (np.cumsum(self.query_lens) - self.query_lens)[owner]
        num_blocks = np.zeros(total_q, dtype=np.int32)
        num_blocks[self.query_starts[owner] + query] = (self.prefix_lens[owner] + query) // BLOCK_TOKENS + 1
        return num_blocks


@dataclass(frozen=True, eq=False)
class DeviceLengths:
    """Lengths that only the device knows, within bounds that the host knows.

    Attributes:
        cu_seqlens_q: ``[batch + 1]`` int32 on the device, exclusive prefix sums of the query lengths.
        seq_lens: ``[batch]`` int32 on the device.
        max_query_len: most queries of a request; further ones get no blocks.
        max_seq_len: most keys of a request; a longer one is read as if it ended there.
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, eq=False)
class Step:
    """A checked scoring call but for its queries and pages.

    Attributes:
        block_table: ``[rows, max_blocks]`` int32, contiguous, on the backend's device. Page ids are clamped
            to the cache when they are read.
        total_q: query tokens.
        num_heads: H.
        lengths: of the requests.
        init_blocks: blocks forced at a row's start, at most those of the longest context.
        local_blocks: blocks forced at a row's end, likewise.
        by_block: whether ids are ordered by block instead of by score.
    """

    block_table: torch.Tensor
    total_q: int
    num_heads: int
    lengths: Lengths | DeviceLengths
    init_blocks: int = 0
    local_blocks: int = 0
    by_block: bool = False

    @staticmethod
    def of(batch: ScoreBatch, order: str = "score") -> Step:
        """The step of a call."""
        return Step(
            batch.block_table,
            batch.total_q,
            batch.num_heads,
            Lengths.of(batch.requests),
            batch.init_blocks,
            batch.local_blocks,
            order == "block",
        )

    @property
    def num_score_blocks(self) -> int:
        """Least ``S`` of a score buffer."""
        if isinstance(self.lengths, Lengths):
            return self.lengths.max_blocks
        return min(-(-self.lengths.max_seq_len // BLOCK_TOKENS), self.block_table.shape[1])


HEADER = 7
"""Numbers that every plan starts with: those of :class:`PlanHeader`."""


class PlanHeader(NamedTuple):
    """What every backend's plan says first."""

    total_q: int
    num_heads: int
    num_score_blocks: int
    init_blocks: int
    local_blocks: int
    by_block: int
    max_query_len: int
    """Of lengths on the device; 0 where the host knows them."""

    @staticmethod
    def of(step: Step) -> PlanHeader:
        """The header of a step's plan."""
        most = step.lengths.max_query_len if isinstance(step.lengths, DeviceLengths) else 0
        return PlanHeader(
            step.total_q,
            step.num_heads,
            step.num_score_blocks,
            step.init_blocks,
            step.local_blocks,
            int(step.by_block),
            most,
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """A step as its backend runs it, in the form that operators take.

    Attributes:
        numbers: int64 on the host: the header, then what the backend adds.
        tensors: on the device: the block table, then ``nb`` of every query token, ``[total_q]`` int32 (of
            lengths on the device: ``cu_seqlens_q`` and ``seq_lens``); the rest is the backend's.
    """

    numbers: torch.Tensor
    tensors: list[torch.Tensor]
    runs: dict[tuple[object, ...], Any] = field(default_factory=dict)
    """What the backend keeps of a run for the runs of other layers."""
    given: bool = False
    """Whether it is made of an operator's arguments that are no plan's of this process: of any tensors."""

    def key(self, pages: torch.Tensor, out: torch.Tensor) -> tuple[object, ...]:
        """What a run that is kept depends on beside the plan: all but the addresses of its tensors and of the
        block table. Lengths on the device are the caller's, and may have moved."""
        lengths = self.tensors[1:3] if self.header.max_query_len else ()
        shapes = (*pages.shape, *pages.stride(), *out.shape, *out.stride())
        return *shapes, *[tensor.data_ptr() for tensor in lengths]

    def on(self, block_table: torch.Tensor) -> Plan:
        """The same plan of another block table of the same shape."""
        return Plan(self.numbers, [block_table, *self.tensors[1:]], self.runs)

    def keep(self, key: tuple[object, ...], run: Any) -> None:
        """Keep what the runs of ``key`` share."""
        if len(self.runs) >= _MOST_RUNS:
            self.runs.clear()
        self.runs[key] = run

    @staticmethod
    def again(numbers: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Plan:
        """The plan of an operator's arguments: the one they are taken from, where it is alive."""
        found = _ALIVE.get(id(numbers))
        if found is None or len(found.tensors) != len(tensors):
            return Plan(numbers, list(tensors), given=True)
        same = found.numbers is numbers and all(map(operator.is_, found.tensors, tensors))
        return found if same else Plan(numbers, list(tensors), given=True)

    @staticmethod
    def of(step: Step, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> Plan:
        """A plan with the header of its step."""
        header = PlanHeader.of(step)
        every = torch.tensor([*header, *numbers], dtype=torch.int64, device="cpu")
        plan = _ALIVE[id(every)] = Plan(every, [step.block_table, *tensors])
        return plan

    @cached_property
    def header(self) -> PlanHeader:
        """The numbers that every plan has."""
        return PlanHeader(*self._numbers[:HEADER])

    @cached_property
    def own_numbers(self) -> list[int]:
        """The backend's numbers."""
        return self._numbers[HEADER:]

    @cached_property
    def _numbers(self) -> list[int]:
        numbers: list[int] = self.numbers.tolist()
        return numbers


_ALIVE: WeakValueDictionary[int, Plan] = WeakValueDictionary()
"""Plans by the id of their numbers, which are alive as long as they are."""
_MOST_RUNS = 64
"""Runs that a plan keeps; beyond, all are forgotten."""


# ---- Arrays of a plan on the device: one copy, queued, nothing waits ----

_ALIGNMENT = 4
"""Integers that an array starts at a multiple of: 16 bytes, as kernels are compiled for."""


def uploaded(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Arrays of int32 or int64 on the device, parts of one buffer that is copied on the current stream."""
    words = [np.ascontiguousarray(array).view(np.int32).reshape(-1) for array in arrays]
    places = np.cumsum([0] + [-(-part.size // _ALIGNMENT) * _ALIGNMENT for part in words]).tolist()
    cuda = device.type == "cuda"
    host = torch.empty(places[-1], dtype=torch.int32, device="cpu", pin_memory=cuda)
    staging = host.numpy()
    for place, part in zip(places, words):
        staging[place : place + part.size] = part
    buffer = host.to(device, non_blocking=True) if cuda else host
    return [
        buffer[place : place + part.size].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for place, part, array in zip(places, words, arrays)
    ]


# ---- Plans of backends that run requests one by one on the host ----


def host_plan(step: Step) -> Plan:
    """A plan that only keeps the lengths; device lengths are those of the host, read when it runs."""
    lengths = step.lengths
    if isinstance(lengths, DeviceLengths):
        return Plan.of(step, (), (lengths.cu_seqlens_q, lengths.seq_lens))
    num_blocks = torch.from_numpy(lengths.blocks_per_query(step.total_q)).to(step.block_table.device)
    return Plan.of(step, np.concatenate(lengths.fields).tolist(), (num_blocks,))


def planned_batch(
    plan: Plan, q: torch.Tensor, pages: torch.Tensor, lut: torch.Tensor
) -> tuple[PlanHeader, ScoreBatch]:
    """The call of a :func:`host_plan`, page ids and device lengths clamped."""
    header = plan.header
    table = plan.tensors[0].clamp(0, max(pages.shape[0] - 1, 0))
    forced = header.init_blocks, header.local_blocks
    return header, ScoreBatch(q, pages, table, lut, planned_lengths(plan).requests(), *forced)


def planned_lengths(plan: Plan) -> Lengths:
    """The lengths of a :func:`host_plan`, clamped where they are the device's."""
    if plan.header.max_query_len:
        return clamped_lengths(plan.header, plan.tensors[1].numpy(), plan.tensors[2].numpy())
    return Lengths(*np.array(plan.own_numbers, dtype=np.int64).reshape(4, -1))


def clamped_lengths(header: PlanHeader, cu_seqlens_q: NDArray[Any], seq_lens: NDArray[Any]) -> Lengths:
    """Lengths of the device as kernels read them: within the rows of ``q`` and the bounds of the plan.

    A request of more queries than keys has no rows for the first of them.
    """
    starts = np.clip(cu_seqlens_q[:-1].astype(np.int64), 0, header.total_q)
    ends = np.clip(cu_seqlens_q[1:].astype(np.int64), starts, header.total_q)
    keys = np.clip(seq_lens.astype(np.int64), 0, header.num_score_blocks * BLOCK_TOKENS)
    query_lens = np.minimum(ends - starts, header.max_query_len)
    missing = np.maximum(query_lens - keys, 0)
    return Lengths(np.arange(starts.size), starts + missing, query_lens - missing, keys)
