"""The prefill scorer's loops by role, found by what its waves do and not by how the code looks.

A block costs a wave exactly one barrier, so a trip round a loop that passes barriers scores as many blocks as
it passes. An interpreted run tells which instructions each trip of each wave issued; counting blocks tells
which of them a trip scored, and the wave's query positions then tell its role:

    unmasked    a trip of four blocks: seen whole, without sentinels
    whole       a trip of one block that every row of the wave sees whole
    diagonal    of one that the wave's rows see in part, where the tile starts at a block boundary
    unaligned   the same where it does not
    later       of one after all of the wave's rows

What does not fit is an error: then the kernel's structure has changed and this file with it must.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel.backends.flydsl import geometry as geo
from kernel.contract import BLOCK_TOKENS
from kernel.errors import IndexerError
from kernel.gfx950.parse import Instruction, Kernel
from kernel.gfx950.report.control_flow import Loop, natural_loops
from kernel.gfx950.report.dynamic import InterpretedRun
from kernel.gfx950.report.model import model_clocks
from kernel.plan import STORE_BLOCKS, WorkItem

ROLES = ("unmasked", "whole", "diagonal", "unaligned", "later")


class UnknownLoopsError(IndexerError, RuntimeError):
    """The kernel's loops are not those that the report knows."""


@dataclass(frozen=True)
class Trip:
    """What a wave issues in one trip of a role."""

    role: str
    blocks: int
    """Blocks scored."""
    path: tuple[int, ...]
    """Indices of the kernel's instructions, in order."""
    seen: int
    """Trips of the role in the run, whichever their paths."""
    paths: int
    """Different paths among them."""

    def instructions(self, kernel: Kernel) -> list[Instruction]:
        """The instructions in the order they were issued."""
        return [kernel.instructions[at] for at in self.path]


def find_trips(run: InterpretedRun) -> list[Trip]:
    """One trip of each role, in the order of ``ROLES``.

    Of a role's paths the most frequent one; of ``unaligned`` trips, which differ by position, the one with
    the most model clocks.

    Raises:
        UnknownLoopsError: a role is missing, a path has two roles, or the loops are not as described above.
    """
    kernel = run.report.kernel
    barriers = frozenset(at for at, i in enumerate(kernel.instructions) if i.mnemonic == "s_barrier")
    loops = [loop for loop in natural_loops(kernel) if loop.body & barriers]
    found: dict[str, Counter[tuple[int, ...]]] = {role: Counter() for role in ROLES}
    for (workgroup, wave), trace in sorted(run.report.traces.items()):
        item = run.items[workgroup]
        block = item.first_block
        for path in trips_of(trace, loops):
            blocks = sum(at in barriers for at in path)
            if blocks:
                found[_role(item, wave, run.num_heads, block, blocks)][path] += 1
                block += blocks
        if block != item.end_block:
            raise UnknownLoopsError(
                f"{kernel.name}: wave {wave} of workgroup {workgroup} passed {block} blocks, not "
                f"{item.end_block}"
            )
    _check_roles(kernel, found)
    return [_representative(kernel, role, found[role]) for role in ROLES]


def trips_of(trace: npt.NDArray[np.int32], loops: list[Loop]) -> Iterator[tuple[int, ...]]:
    """The trips of one wave round each of the loops, outer ones first; without those of the loops inside."""
    innermost = np.full(int(trace.max()) + 1, -1)
    for number, loop in enumerate(loops):
        body = np.array(sorted(loop.body))
        innermost[body[body < innermost.size]] = number
    headers = np.array([loop.header for loop in loops])
    where = innermost[trace]
    # A trip begins at its loop's header and ends where the loop, or one inside it, is entered or left.
    edges = np.flatnonzero(np.diff(where, prepend=-2) != 0)
    starts = np.flatnonzero(np.isin(trace, headers))
    cuts = np.union1d(edges, starts)
    for first, last in zip(cuts, [*cuts[1:], trace.size]):
        if where[first] >= 0 and trace[first] == headers[where[first]]:
            yield tuple(trace[first:last].tolist())


def _role(item: WorkItem, wave: int, num_heads: int, block: int, blocks: int) -> str:
    """By the positions of the wave's rows: its N-tiles lie 16 tokens apart
    (:mod:`kernel.backends.flydsl.score_prefill`)."""
    tokens = geo.MFMA_ROWS // num_heads
    first = item.position + wave // num_heads * BLOCK_TOKENS + wave % num_heads * tokens
    last = first + geo.WAVE_TOKENS - geo.MFMA_ROWS + tokens - 1
    whole = (block + blocks) * BLOCK_TOKENS - 1 <= first
    if blocks == STORE_BLOCKS and whole:
        return "unmasked"
    if blocks != 1:
        raise UnknownLoopsError(
            f"a trip of a wave at position {first} scored {blocks} blocks from block {block}"
        )
    if whole:
        return "whole"
    if block * BLOCK_TOKENS > last:
        return "later"
    return "unaligned" if item.position % BLOCK_TOKENS else "diagonal"


def _check_roles(kernel: Kernel, found: dict[str, Counter[tuple[int, ...]]]) -> None:
    role_of: dict[tuple[int, ...], str] = {}
    for role, paths in found.items():
        if not paths:
            raise UnknownLoopsError(f"{kernel.name}: no wave took a trip of role {role}")
        for path in paths:
            if role_of.setdefault(path, role) != role:
                raise UnknownLoopsError(f"{kernel.name}: one path is both {role_of[path]} and {role}")


def _representative(kernel: Kernel, role: str, paths: Counter[tuple[int, ...]]) -> Trip:
    def weight(path: tuple[int, ...]) -> tuple[int, int]:
        cost = model_clocks([kernel.instructions[at] for at in path]).most if role == "unaligned" else 0
        return cost, paths[path]

    blocks = STORE_BLOCKS if role == "unmasked" else 1
    return Trip(role, blocks, max(paths, key=weight), paths.total(), len(paths))
