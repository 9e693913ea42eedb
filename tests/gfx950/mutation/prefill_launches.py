"""Single launches of the prefill scorer's assembly, without FlyDSL's launcher: small, sharp and exact.

A launch is one work item of a plan, or several in one grid. Whatever it must write is known from the oracle
and the item alone, and everything else it must leave as it was.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kernel.gfx950 import Kernel, Memory, Program, RunOptions, RunReport, Schedule, run
from kernel.plan import MAXIMA_BLOCKS, STORE_BLOCKS, WorkItem, pack_items, plan_prefill
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
from tests.support.call import Call
from tests.support.compare import oracle_scores

_BARRIERS = 40
"""Twice as many as a workgroup of these launches passes."""


@dataclass(frozen=True)
class Case:
    """A call and how it is launched: for scores ``[H, total_q, columns]``, with or without group maxima."""

    name: str
    call: Call
    columns: int
    slots: int = 1
    maxima: bool = False

    @cached_property
    def items(self) -> list[WorkItem]:
        batch = self.call.batch()
        return plan_prefill(
            batch.requests,
            batch.num_heads,
            table_stride=self.call.block_table.shape[1],
            score_blocks=self.columns,
            slots=self.slots,
            alignment=MAXIMA_BLOCKS if self.maxima else STORE_BLOCKS,
        )

    @cached_property
    def oracle(self) -> Float32Array:
        scores: Float32Array = oracle_scores(self.call, self.columns).numpy()
        return scores

    @cached_property
    def lut(self) -> npt.NDArray[np.uint8]:
        return self.call.batch().lut.numpy()


@dataclass(frozen=True)
class PrefillLaunch:
    """Some items of a case as one grid."""

    case: Case
    items: tuple[WorkItem, ...]
    schedule: Schedule

    @property
    def name(self) -> str:
        blocks = ", ".join(f"{item.first_block}:{item.end_block}" for item in self.items[:1])
        return f"{self.case.name} {self.items[0].first_token}+{self.items[0].num_tokens} blocks {blocks}"

    @cached_property
    def expected(self) -> tuple[Float32Array, Float32Array]:
        """Scores and maxima, poison where these items have nothing to write."""
        case = self.case
        heads, tokens, columns = case.oracle.shape
        scores = np.full((heads, tokens, columns), POISON, np.float32)
        maxima = np.full((heads, tokens, -(-columns // MAXIMA_BLOCKS)), POISON, np.float32)
        for item in self.items:
            rows = slice(item.first_token, item.first_token + item.num_tokens)
            end = min(max(item.end_block, item.fill_end), columns)
            scores[:, rows, item.first_block : end] = case.oracle[:, rows, item.first_block : end]
            if case.maxima:
                for group in range(item.first_block // MAXIMA_BLOCKS, -(-end // MAXIMA_BLOCKS)):
                    cells = case.oracle[:, rows, MAXIMA_BLOCKS * group : MAXIMA_BLOCKS * (group + 1)]
                    maxima[:, rows, group] = cells.max(-1)
        return scores, maxima

    def under(self, schedule: Schedule) -> PrefillLaunch:
        """The same launch in another order."""
        return replace(self, schedule=schedule)

    def run(self, kernel: Kernel) -> RunReport:
        """Raises an InterpreterError for what the kernel does wrong, WrongScoresError for what it writes."""
        call = self.case.call
        expected_scores, expected_maxima = self.expected
        scores, maxima = (np.full_like(x, POISON) for x in self.expected)
        memory = Memory()
        operands = {
            "q": call.q.view(torch.uint8).numpy(),
            "lut": self.case.lut,
            "table": call.block_table.numpy(),
            "work": np.frombuffer(pack_items(self.items), np.int32).copy(),
        }
        at = register_operands(memory, operands)
        at_scores = register_rows(memory, scores, "scores", 32)
        at_maxima = register_rows(memory, maxima, "maxima", 64) if self.case.maxima else 0
        at_pages = register_pages(memory, call, range(call.pages.shape[0]))
        strides = (HEAD_STRIDE, TOKEN_STRIDE)
        kernargs = struct.pack(
            "<12q2i",
            at["q"], at_pages, PAGE_STRIDE, at["lut"], at_scores, *strides, at_maxima, *strides, at["table"],
            at["work"], call.init_blocks, call.local_blocks,
        )  # fmt: skip
        report = run(
            Program({kernel.name: kernel}),
            kernel.name,
            grid=(len(self.items), 1, 1),
            block=(THREADS, 1, 1),
            kernargs=kernargs,
            memory=memory,
            schedule=self.schedule,
            options=RunOptions(wave_instruction_limit=WAVE_INSTRUCTIONS, barrier_limit=_BARRIERS),
        )
        check_cells(f"scores of {self.name}", scores, expected_scores)
        if self.case.maxima:
            check_cells(f"maxima of {self.name}", maxima, expected_maxima)
        return report


def one_each(case: Case, schedules: Sequence[Schedule]) -> list[PrefillLaunch]:
    """A launch for each item of a case, under one schedule after the other."""
    return [PrefillLaunch(case, (item,), schedules[i % len(schedules)]) for i, item in enumerate(case.items)]
