"""Single launches of the decode scorer's assembly, without FlyDSL's launcher: small, sharp and exact.

Pages, rows of scores and maxima are regions of their own, far apart: 32-bit offsets and accesses of what no
request has are faults.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kernel.contract import BLOCK_TOKENS
from kernel.gfx950 import SCHEDULES, Kernel, Memory, Program, RunOptions, RunReport, Schedule, run
from kernel.plan import MAXIMA_BLOCKS
from tests.gfx950.mutation.launch import WrongScoresError
from tests.gfx950.prefill import group_maxima
from tests.support.call import Call
from tests.support.compare import oracle_scores

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

POISON = np.float32(np.nan)
_THREADS = 256
_PAGE_STRIDE = (5 << 30) + 48
"""Bytes."""
_TOKEN_STRIDE, _HEAD_STRIDE = (1 << 30) + 5, (1 << 40) + (1 << 31) + 3
"""Cells."""
_WAVE_INSTRUCTIONS = 60_000
"""Far more than a wave of these launches runs between two barriers."""


@dataclass(frozen=True)
class DecodeLaunch:
    """A call, launched on ``2^log_workgroups`` workgroups.

    Attributes:
        name: for people. call: what is scored. columns: of the scores. maxima: whether they are wanted.
        fill: whether cells past a request's blocks are filled. extra: (table row, query start, query end,
            length) of requests that no host would let pass, after those of the call. extra_table: rows of
            the block table and extra_queries: tokens of ``q`` for them; what is written there is not looked
            at. schedule: the order of waves.
    """

    name: str
    call: Call
    columns: int
    log_workgroups: int = 0
    maxima: bool = False
    fill: bool = True
    extra: tuple[tuple[int, int, int, int], ...] = ()
    extra_table: tuple[tuple[int, ...], ...] = ()
    extra_queries: int = 0
    schedule: Schedule = SCHEDULES[0]

    @cached_property
    def requests(self) -> Int32Array:
        """``[4, batch]``: table rows, query starts, query ends, lengths."""
        starts = self.call.cu_seqlens_q.tolist()
        rows = list(zip(range(len(starts) - 1), starts[:-1], starts[1:], self.call.seq_lens.tolist()))
        requests: Int32Array = np.array([*rows, *self.extra], np.int32).T.copy()
        return requests

    @cached_property
    def expected(self) -> tuple[Float32Array, Float32Array]:
        """Scores and maxima, poison where nothing is to be written."""
        scores = oracle_scores(self.call, self.columns)
        maxima = group_maxima(scores)
        if not self.fill:
            for request in self.call.batch().requests:
                rows = slice(request.query_start, request.query_start + request.query_len)
                scores[:, rows, request.num_blocks :] = torch.nan
                maxima[:, rows, -(-request.num_blocks // MAXIMA_BLOCKS) :] = torch.nan
        return scores.numpy(), maxima.numpy()

    @cached_property
    def lut(self) -> npt.NDArray[np.uint8]:
        return self.call.batch().lut.numpy()

    @cached_property
    def needed_pages(self) -> list[int]:
        """Pages of blocks that some row needs keys of; to touch another one is a fault."""
        if self.extra:
            return list(range(self.call.pages.shape[0]))
        needed: set[int] = set()
        for request in self.call.batch().requests:
            own = request.num_blocks - self.call.local_blocks
            whole = range(self.call.init_blocks, min(request.seq_len // BLOCK_TOKENS, own))
            first = (request.prefix_len + 1) // BLOCK_TOKENS if not self.call.local_blocks else own
            blocks = [*whole, *range(first, own)] if request.num_blocks else []
            needed.update(self.call.block_table[request.table_row, blocks].tolist())
        return sorted(needed)

    def under(self, schedule: Schedule) -> DecodeLaunch:
        """The same launch in another order."""
        return replace(self, schedule=schedule)

    def run(self, kernel: Kernel) -> RunReport:
        """Raises an InterpreterError for what the kernel does wrong, WrongScoresError for what it writes."""
        call = self.call
        scores, maxima = (
            np.full((x.shape[0], x.shape[1] + self.extra_queries, x.shape[2]), POISON) for x in self.expected
        )
        queries = call.q.view(torch.uint8).numpy()
        queries = np.concatenate([queries, *[queries[:1]] * self.extra_queries])
        table = call.block_table.numpy()
        table = np.concatenate([table, np.array(self.extra_table, np.int32).reshape(-1, table.shape[1])])
        memory = Memory()
        arrays = {
            "q": queries,
            "lut": self.lut,
            "table": table,
            **{f"requests {field}": column for field, column in enumerate(self.requests)},
        }
        at = {
            name: _register(memory, array, name, place) for place, (name, array) in enumerate(arrays.items())
        }
        at_scores = _register_rows(memory, scores, "scores", 32)
        at_maxima = _register_rows(memory, maxima, "maxima", 64) if self.maxima else 0
        at_pages = (0xA5 << 40) - 9216  # all 48 bits, and the second page behind a carry into the upper half
        for page_id in self.needed_pages:
            address = at_pages + page_id * _PAGE_STRIDE
            page = call.pages[page_id].numpy()
            memory.register_array(page, f"page {page_id}", writable=False, address=address)
        strides = (_HEAD_STRIDE, _TOKEN_STRIDE)
        kernargs = struct.pack(
            "<15q10i",
            at["q"], at_pages, _PAGE_STRIDE, at["lut"], at_scores, *strides, at_maxima, *strides, at["table"],
            *(at[f"requests {field}"] for field in range(4)),
            *table.shape, self.requests.shape[1], queries.shape[0], call.pages.shape[0], self.columns,
            self.columns if self.fill else 0, call.init_blocks, call.local_blocks, self.log_workgroups,
        )  # fmt: skip
        report = run(
            Program({kernel.name: kernel}),
            kernel.name,
            grid=(1 << self.log_workgroups, 1, 1),
            block=(_THREADS, 1, 1),
            kernargs=kernargs,
            memory=memory,
            schedule=self.schedule,
            options=RunOptions(wave_instruction_limit=_WAVE_INSTRUCTIONS, trace=True),
        )
        self._compare("scores", scores, self.expected[0])
        if self.maxima:
            self._compare("maxima", maxima, self.expected[1])
        return report

    def _compare(self, name: str, actual: Float32Array, expected: Float32Array) -> None:
        own = slice(0, self.call.total_q)
        wrong = actual[:, own].view(np.uint32) != expected[:, own].view(np.uint32)
        if wrong.any():
            cell = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise WrongScoresError(
                f"{self.name}: {int(wrong.sum())} of {wrong.size} {name} are wrong, the first at {cell}: "
                f"{actual[cell]} instead of {expected[cell]}"
            )


def _register(memory: Memory, array: npt.NDArray[np.generic], name: str, place: int) -> int:
    """Device address of an array, across a multiple of 4 GiB: carries into the upper half matter."""
    address = (place + 1 << 40) - array.nbytes // 2 // 16 * 16
    return memory.register_array(array, name, writable=False, address=address).address


def _register_rows(memory: Memory, array: Float32Array, name: str, place: int) -> int:
    """Device address of the first row of ``[H, tokens, cells]``; each row is a region."""
    start = (place << 40) - 4
    for head, tokens in enumerate(array):
        for token, row in enumerate(tokens):
            address = start + 4 * (head * _HEAD_STRIDE + token * _TOKEN_STRIDE)
            memory.register_array(row, f"{name} of head {head}, token {token}", address=address)
    return start
