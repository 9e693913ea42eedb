"""Single launches of the decode scorer's assembly, without FlyDSL's launcher: small, sharp and exact."""

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
from tests.gfx950.mutation.score_launch import (
    HEAD_STRIDE,
    PAGE_STRIDE,
    POISON,
    THREADS,
    TOKEN_STRIDE,
    WAVE_INSTRUCTIONS,
    Float32Array,
    check_cells,
    register_operands,
    register_pages,
    register_rows,
)
from tests.gfx950.prefill import group_maxima
from tests.support.call import Call
from tests.support.compare import oracle_scores

Int32Array = npt.NDArray[np.int32]


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
        operands = {
            "q": queries,
            "lut": self.lut,
            "table": table,
            **{f"requests {field}": column for field, column in enumerate(self.requests)},
        }
        at = register_operands(memory, operands)
        at_scores = register_rows(memory, scores, "scores", 32)
        at_maxima = register_rows(memory, maxima, "maxima", 64) if self.maxima else 0
        at_pages = register_pages(memory, call, self.needed_pages)
        strides = (HEAD_STRIDE, TOKEN_STRIDE)
        kernargs = struct.pack(
            "<15q10i",
            at["q"], at_pages, PAGE_STRIDE, at["lut"], at_scores, *strides, at_maxima, *strides, at["table"],
            *(at[f"requests {field}"] for field in range(4)),
            *table.shape, self.requests.shape[1], queries.shape[0], call.pages.shape[0], self.columns,
            self.columns if self.fill else 0, call.init_blocks, call.local_blocks, self.log_workgroups,
        )  # fmt: skip
        report = run(
            Program({kernel.name: kernel}),
            kernel.name,
            grid=(1 << self.log_workgroups, 1, 1),
            block=(THREADS, 1, 1),
            kernargs=kernargs,
            memory=memory,
            schedule=self.schedule,
            options=RunOptions(wave_instruction_limit=WAVE_INSTRUCTIONS, trace=True),
        )
        own = slice(0, call.total_q)
        check_cells(f"scores of {self.name}", scores[:, own], self.expected[0])
        if self.maxima:
            check_cells(f"maxima of {self.name}", maxima[:, own], self.expected[1])
        return report
