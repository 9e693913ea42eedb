"""The top-k kernels on the interpreter: rows of random scores that end in a local block's sentinel."""

from __future__ import annotations

import struct

import numpy as np

from kernel.backends.flydsl.topk_variants import THREADS, WAVES, Variant
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


def shape(num_blocks: int, k: int, grouped: bool) -> Shape:
    """Rows of ``num_blocks`` blocks: maxima and ``k`` groups read, or all scores; a length; ids written."""
    cells = 4 * num_blocks
    if grouped and num_blocks > CACHE_LINE_BYTES // 4 * k:
        cells = 4 * -(-num_blocks // MAXIMA_BLOCKS) + CACHE_LINE_BYTES * k
    name = f"{CALL_ROWS:,} rows x {num_blocks:,} blocks, k = {k}"
    return Shape(name, "row", CALL_ROWS, cells + 4 + 4 * k)


def lengths(variant: Variant) -> tuple[int, ...]:
    """Blocks of the rows that a kernel is reported for: its longest, and some shorter ones."""
    if variant.most_groups is None:
        return (8192, 4096, 1024)
    most = variant.most_groups * MAXIMA_BLOCKS or 16_384
    return (most, most // 2, 300)


def report_topk(assembly: str, variant: Variant) -> WorkReport:
    """Run a kernel on rows of each of its :func:`lengths` and count.

    Args:
        assembly: the compiler's text, metadata included.
        variant: the kernel.

    Raises:
        InterpreterError: the kernel is wrong.
    """
    works: list[Work] = []
    for num_blocks in lengths(variant):
        found = _interpret(assembly, variant, num_blocks)
        grouped = variant.most_groups is not None
        works.append(work_of(shape(num_blocks, variant.best, grouped), found, _ROWS))
    return report_of(found, tuple(works))


def _interpret(assembly: str, variant: Variant, num_blocks: int) -> RunReport:
    k, grouped = variant.best, variant.most_groups is not None
    scores = np.random.default_rng(3).standard_normal((_ROWS, num_blocks)).astype(np.float32)
    scores[:, -1] = LOCAL_SCORE
    groups = -(-num_blocks // MAXIMA_BLOCKS)
    padded = np.full((_ROWS, groups * MAXIMA_BLOCKS), -np.inf, np.float32)
    padded[:, :num_blocks] = scores
    maxima = padded.reshape(_ROWS, groups, MAXIMA_BLOCKS).max(-1)
    row_lengths = np.full(_ROWS, num_blocks, np.int32)
    block_ids = np.empty((_ROWS, k), np.int32)
    memory = Memory()
    inputs = [
        memory.register_array(array, label, writable=False).address
        for array, label in ((scores, "scores"), (maxima, "maxima"), (row_lengths, "lengths"))
    ]
    out = memory.register_array(block_ids, "block ids", initialised=False).address
    kernargs = struct.pack(
        "<10q4i",
        inputs[0], scores.size, num_blocks,
        inputs[1] if grouped else 0, maxima.size, groups,
        inputs[2], out, block_ids.size, k,
        num_blocks, _ROWS, k, 0,
    )  # fmt: skip
    workgroups = -(-_ROWS // (WAVES * variant.rows_per_wave))
    return run(
        parse_program(assembly), variant.name, grid=(workgroups, 1, 1), block=(THREADS, 1, 1),
        kernargs=kernargs, memory=memory,
    )  # fmt: skip
