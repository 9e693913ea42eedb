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
from tests.gfx950.mutation.launch import WrongScoresError
from tests.support.call import Call
from tests.support.compare import oracle_scores

Float32Array = npt.NDArray[np.float32]

POISON = np.float32(np.nan)
_THREADS = 256
_PAGE_STRIDE = (5 << 30) + 48
"""Bytes: pages lie in regions of their own, and their offsets need 64 bits."""
_TOKEN_STRIDE, _HEAD_STRIDE = (1 << 30) + 5, (1 << 40) + (1 << 31) + 3
"""Cells: so do rows of scores, at any multiple of 4 bytes."""
_WAVE_INSTRUCTIONS = 60_000
"""Far more than a wave of these launches runs between two barriers."""
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
        at = {
            name: _register(memory, array, name, place, writable=False)
            for place, (name, array) in enumerate(operands.items())
        }
        at["scores"] = _register_rows(memory, scores, "scores", 32)
        at["maxima"] = _register_rows(memory, maxima, "maxima", 64) if self.case.maxima else 0
        at["pages"] = (
            0xA5 << 40
        ) - 9216  # all 48 bits, and the second page behind a carry into the upper half
        for page_id, page in enumerate(call.pages.numpy()):
            address = at["pages"] + page_id * _PAGE_STRIDE
            memory.register_array(page, f"page {page_id}", writable=False, address=address)
        kernargs = struct.pack(
            "<12q2i",
            at["q"],
            at["pages"],
            _PAGE_STRIDE,
            at["lut"],
            at["scores"],
            _HEAD_STRIDE,
            _TOKEN_STRIDE,
            at["maxima"],
            _HEAD_STRIDE,
            _TOKEN_STRIDE,
            at["table"],
            at["work"],
            call.init_blocks,
            call.local_blocks,
        )
        report = run(
            Program({kernel.name: kernel}),
            kernel.name,
            grid=(len(self.items), 1, 1),
            block=(_THREADS, 1, 1),
            kernargs=kernargs,
            memory=memory,
            schedule=self.schedule,
            options=RunOptions(wave_instruction_limit=_WAVE_INSTRUCTIONS, barrier_limit=_BARRIERS),
        )
        _compare("scores", scores, expected_scores)
        if self.case.maxima:
            _compare("maxima", maxima, expected_maxima)
        return report


def one_each(case: Case, schedules: Sequence[Schedule]) -> list[PrefillLaunch]:
    """A launch for each item of a case, under one schedule after the other."""
    return [PrefillLaunch(case, (item,), schedules[i % len(schedules)]) for i, item in enumerate(case.items)]


def _register(
    memory: Memory, array: npt.NDArray[np.generic], name: str, place: int, *, writable: bool = True
) -> int:
    """Device address of an array, across a multiple of 4 GiB: carries into the upper half matter."""
    address = (place + 1 << 40) - array.nbytes // 2 // 16 * 16
    return memory.register_array(array, name, writable=writable, address=address).address


def _register_rows(memory: Memory, array: Float32Array, name: str, place: int) -> int:
    """Device address of the first row of ``[H, tokens, cells]``; each row is a region."""
    start = (place << 40) - 4
    for head, tokens in enumerate(array):
        for token, row in enumerate(tokens):
            address = start + 4 * (head * _HEAD_STRIDE + token * _TOKEN_STRIDE)
            memory.register_array(row, f"{name} of head {head}, token {token}", address=address)
    return start


def _compare(name: str, actual: Float32Array, expected: Float32Array) -> None:
    wrong = actual.view(np.uint32) != expected.view(np.uint32)
    if wrong.any():
        cell = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise WrongScoresError(
            f"{int(wrong.sum())} of {wrong.size} {name} are wrong, the first at {cell}: "
            f"{actual[cell]} instead of {expected[cell]}"
        )
