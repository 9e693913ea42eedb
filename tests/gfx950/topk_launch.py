"""Single launches of a top-k kernel's assembly, without FlyDSL's launcher: every cell that it may touch is
known, and nothing else is registered."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kernel.backends.flydsl.geometry import THREADS, WAVES, Variant
from kernel.gfx950 import Kernel, Memory, Program, RunOptions, RunReport, Schedule, run
from tests.gfx950.topk_rows import Row

UNWRITTEN = -7
_TOKEN_STRIDE, _HEAD_STRIDE = (1 << 30) + 5, (1 << 40) + (1 << 31) + 3
"""Cells: offsets of rows need 64 bits, and rows begin at any multiple of 4 bytes."""
_WAVE_INSTRUCTIONS = 200_000
"""Far more than the rows of a wave take."""


class WrongIdsError(Exception):
    """The kernel ended, and its ids are not the contract's."""


@dataclass(frozen=True)
class TopkLaunch:
    """Rows ``[heads][tokens]`` and how they are selected.

    ``columns`` is S, that of the longest row if None; ``lengths`` replaces what the kernel is told of tokens.
    """

    name: str
    variant: Variant
    rows: Sequence[Sequence[Row]]
    k: int
    ascending: bool = False
    schedule: Schedule = Schedule()  # noqa: RUF009  frozen
    columns: int | None = None
    lengths: Sequence[int] | None = None

    @cached_property
    def expected(self) -> npt.NDArray[np.int32]:
        """Ids ``[heads, tokens, k]``."""
        found = [[row.best(self.k) for row in head] for head in self.rows]
        if self.ascending:
            found = [[_ascending(ids) for ids in head] for head in found]
        return np.array(found, np.int32).reshape(len(self.rows), -1, self.k)

    def under(self, schedule: Schedule) -> TopkLaunch:
        """The same launch in another order."""
        return replace(self, schedule=schedule)

    def run(self, kernel: Kernel) -> RunReport:
        """Raises an InterpreterError for what the kernel does wrong, WrongIdsError for what it writes."""
        heads, tokens = len(self.rows), len(self.rows[0])
        grouped = self.variant.most_groups is not None
        longest = max(row.scores.size for head in self.rows for row in head)
        lengths = self.lengths or [row.scores.size for row in self.rows[0]]
        num_blocks = np.array(lengths, np.int32)
        ids = np.full((heads, tokens, self.k), UNWRITTEN, np.int32)
        memory = Memory()
        # all 48 bits of an address, rows before and behind a multiple of 4 GiB
        scores_at, maxima_at, ids_at = ((place << 40) - 4 for place in (0x85, 0xA5, 0xC5))
        for head, rows in enumerate(self.rows):
            for token, row in enumerate(rows):
                at, name = head * _HEAD_STRIDE + token * _TOKEN_STRIDE, f"head {head}, token {token}"
                if row.scores.size:
                    _read_only(memory, row.scores, f"scores of {name}", scores_at + 4 * at)
                if row.scores.size and grouped:
                    _read_only(memory, row.maxima, f"maxima of {name}", maxima_at + 4 * at)
                memory.register_array(ids[head, token], f"ids of {name}", address=ids_at + 4 * at)
        lengths_at = (5 << 40) - 8
        _read_only(memory, num_blocks, "num_blocks", lengths_at)
        strides = (_HEAD_STRIDE, _TOKEN_STRIDE)
        kernargs = struct.pack(
            "<10q4i",
            scores_at,
            *strides,
            maxima_at if grouped else 0,
            *strides,
            lengths_at,
            ids_at,
            *strides,
            longest if self.columns is None else self.columns,
            tokens,
            self.k,
            self.ascending,
        )
        report = run(
            Program({kernel.name: kernel}),
            kernel.name,
            grid=(-(-tokens // (WAVES * self.variant.rows_per_wave)), heads, 1),
            block=(THREADS, 1, 1),
            kernargs=kernargs,
            memory=memory,
            schedule=self.schedule,
            options=RunOptions(wave_instruction_limit=_WAVE_INSTRUCTIONS),
        )
        self._compare(ids)
        return report

    def _compare(self, ids: npt.NDArray[np.int32]) -> None:
        wrong = np.argwhere((ids != self.expected).any(-1))
        if wrong.size:
            head, token = map(int, wrong[0])
            raise WrongIdsError(
                f"{len(wrong)} rows are wrong, the first {self.rows[head][token].name!r}: "
                f"{ids[head, token].tolist()} instead of {self.expected[head, token].tolist()}"
            )


def _ascending(ids: list[int]) -> list[int]:
    return sorted(one for one in ids if one >= 0) + [-1] * ids.count(-1)


def _read_only(memory: Memory, array: npt.NDArray[np.generic], name: str, address: int) -> None:
    memory.register_array(array, name, writable=False, address=address)
