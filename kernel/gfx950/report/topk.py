"""The top-k kernels on the interpreter: rows of random scores that end in a local block's sentinel."""

from __future__ import annotations

import struct

import numpy as np

from kernel.batch import LOCAL_SCORE
from kernel.gfx950.launch import run
from kernel.gfx950.memory import Memory
from kernel.gfx950.parse import parse_program
from kernel.gfx950.report.work import CACHE_LINE_BYTES, Shape, Work, WorkReport, report_of, work_of
from kernel.gfx950.run_report import RunReport
from kernel.plan import MAXIMA_BLOCKS

CALL_ROWS = 32_768
"""Rows of a prefill of 8,192 queries with 4 heads."""
_ROWS = 16
_THREADS = 256
_WAVES = 4


def shape(num_blocks: int, k: int, grouped: bool) -> Shape:
    """Rows of ``num_blocks`` blocks: maxima and ``k`` groups read, or all scores; a length; ids written."""
    cells = 4 * num_blocks
    if grouped and num_blocks > CACHE_LINE_BYTES // 4 * k:
        cells = 4 * -(-num_blocks // MAXIMA_BLOCKS) + CACHE_LINE_BYTES * k
    name = f"{CALL_ROWS:,} rows x {num_blocks:,} blocks, k = {k}"
    return Shape(name, "row", CALL_ROWS, cells + 4 + 4 * k)


def report_topk(
    assembly: str, name: str, *, k: int, lengths: tuple[int, ...], grouped: bool, rows_per_wave: int
) -> WorkReport:
    """Run a kernel at each row length and count.

    Args:
        assembly: the compiler's text, metadata included.
        name: the kernel's symbol.
        k: ids of a row.
        lengths: blocks of a row.
        grouped: whether it reads group maxima.
        rows_per_wave: rows that it takes in a wave.

    Raises:
        InterpreterError: the kernel is wrong.
    """
    works: list[Work] = []
    for num_blocks in lengths:
        found = _interpret(assembly, name, num_blocks, k, grouped, rows_per_wave)
        works.append(work_of(shape(num_blocks, k, grouped), found, _ROWS))
    return report_of(found, tuple(works))


def _interpret(
    assembly: str, name: str, num_blocks: int, k: int, grouped: bool, rows_per_wave: int
) -> RunReport:
    scores = np.random.default_rng(3).standard_normal((_ROWS, num_blocks)).astype(np.float32)
    scores[:, -1] = LOCAL_SCORE
    groups = -(-num_blocks // MAXIMA_BLOCKS)
    padded = np.full((_ROWS, groups * MAXIMA_BLOCKS), -np.inf, np.float32)
    padded[:, :num_blocks] = scores
    maxima = padded.reshape(_ROWS, groups, MAXIMA_BLOCKS).max(-1)
    lengths = np.full(_ROWS, num_blocks, np.int32)
    block_ids = np.empty((_ROWS, k), np.int32)
    memory = Memory()
    inputs = [
        memory.register_array(array, label, writable=False).address
        for array, label in ((scores, "scores"), (maxima, "maxima"), (lengths, "lengths"))
    ]
    out = memory.register_array(block_ids, "block ids", initialised=False).address
    kernargs = struct.pack(
        "<10q4i",
        inputs[0], scores.size, num_blocks,
        inputs[1] if grouped else 0, maxima.size, groups,
        inputs[2], out, block_ids.size, k,
        num_blocks, _ROWS, k, 0,
    )  # fmt: skip
    workgroups = -(-_ROWS // (_WAVES * rows_per_wave))
    return run(
        parse_program(assembly), name, grid=(workgroups, 1, 1), block=(_THREADS, 1, 1), kernargs=kernargs,
        memory=memory,
    )  # fmt: skip
