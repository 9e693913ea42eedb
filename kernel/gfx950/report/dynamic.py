"""A small launch of the prefill scorer on the interpreter: the paths its waves take, LDS bank conflicts.

The work items are tiles of 512 query rows: one whose first query starts a block, which meets groups of fully
visible blocks, blocks seen whole, its diagonal and, with few heads, blocks that only later waves see; and
tiles that start inside a block, whose diagonals the compiler could not foresee. Results are not looked at.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.gfx950.launch import RunOptions, run
from kernel.gfx950.memory import Memory
from kernel.gfx950.parse import Program
from kernel.gfx950.run_report import RunReport
from kernel.nvfp4 import build_lut
from kernel.page import blocks_of
from kernel.plan import MAXIMA_BLOCKS, TILE_ROWS, WorkItem, pack_items

POSITIONS = (10 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 8, 2 * BLOCK_TOKENS + 64)
"""Positions of the tiles' first queries."""
_PAGES = 16
_THREADS = 256
_ARGUMENTS = struct.Struct("<12q2i")
"""The kernel's arguments (:class:`kernel.backends.flydsl.score_item.KernelArguments`)."""


@dataclass(frozen=True)
class InterpretedRun:
    """What the interpreter counted, and the work items, one a workgroup."""

    report: RunReport
    items: tuple[WorkItem, ...]
    num_heads: int

    def extra_passes(self) -> dict[int, float]:
        """Mean extra LDS passes of an access, by assembly line."""
        return {line: extra / accesses for line, (accesses, extra) in self._conflicts().items()}

    def lds_traffic(self) -> dict[str, tuple[int, int]]:
        """LDS accesses and their extra passes, by mnemonic (:mod:`kernel.gfx950.bank_conflicts`)."""
        mnemonics = {i.line: i.mnemonic for i in self.report.kernel.instructions}
        found: dict[str, tuple[int, int]] = {}
        for line, (accesses, extra) in self._conflicts().items():
            before = found.get(mnemonics[line], (0, 0))
            found[mnemonics[line]] = (before[0] + accesses, before[1] + extra)
        return found

    def _conflicts(self) -> dict[int, tuple[int, int]]:
        return self.report.bank_conflicts or {}


def interpret(program: Program, kernel_name: str, num_heads: int) -> InterpretedRun:
    """Run one tile at each of ``POSITIONS``, with traces and bank conflicts.

    Args:
        program: holds the kernel.
        kernel_name: the prefill scorer for ``num_heads``.
        num_heads: index heads, H.

    Raises:
        InterpreterError: the kernel is wrong.
    """
    random = np.random.default_rng(0)
    tokens = TILE_ROWS // num_heads
    columns = max(blocks_of(position + tokens) for position in POSITIONS)
    items = tuple(
        WorkItem(0, k * tokens, tokens, position, 0, blocks_of(position + tokens), columns)
        for k, position in enumerate(POSITIONS)
    )
    queries = random.integers(0, 0x7F, (len(items) * tokens, num_heads, HEAD_DIM)).astype(np.uint8)
    pages = random.integers(0, 256, (_PAGES, PAGE_BYTES)).astype(np.uint8)
    table = (np.arange(columns, dtype=np.int32) * 5) % _PAGES
    scores = np.empty((num_heads, len(items) * tokens, columns), np.float32)
    maxima = np.empty((*scores.shape[:2], -(-columns // MAXIMA_BLOCKS)), np.float32)
    lut = build_lut(torch.device("cpu")).numpy()
    work = np.frombuffer(pack_items(items), np.int32).copy()

    memory = Memory()
    inputs = [
        memory.register_array(array, name, writable=False).address
        for array, name in (
            (queries, "q"), (pages, "pages"), (lut, "lut"), (table, "table"), (work, "work"),
        )
    ]  # fmt: skip
    outputs = [
        memory.register_array(array, name, initialised=False).address
        for array, name in ((scores, "scores"), (maxima, "maxima"))
    ]
    q_at, pages_at, lut_at, table_at, work_at = inputs
    kernargs = _ARGUMENTS.pack(
        q_at, pages_at, PAGE_BYTES, lut_at,
        outputs[0], scores[0].size, columns,
        outputs[1], maxima[0].size, maxima.shape[2],
        table_at, work_at, 0, 1,
    )  # fmt: skip
    report = run(
        program, kernel_name, grid=(len(items), 1, 1), block=(_THREADS, 1, 1), kernargs=kernargs,
        memory=memory, options=RunOptions(trace=True, bank_conflicts=True),
    )  # fmt: skip
    return InterpretedRun(report, items, num_heads)
