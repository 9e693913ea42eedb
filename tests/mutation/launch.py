"""What a campaign runs mutants under, and what says that one went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kernel.gfx950 import Kernel, Memory, RunReport, Schedule
from tests.support.calls import Call


class WrongScoresError(Exception):
    """The kernel ended, and its outputs are not what the oracle says."""


class WrongWorkError(Exception):
    """Outputs are right, and the way to them is not the one that is due."""


class Launch(Protocol):
    """Inputs of a kernel whose outputs are known; see ``PrefillLaunch``, ``DecodeLaunch``, ``TopkLaunch`` and
    ``InsertLaunch``."""

    @property
    def name(self) -> str: ...

    def run(self, kernel: Kernel) -> RunReport:
        """Raises what the kernel does wrong."""
        ...

    def under(self, schedule: Schedule) -> Launch:
        """The same launch in another order of waves."""
        ...


# What single launches of both scorers share: arrays far apart in memory, and the comparison of cells.
#
# Pages, rows of scores and maxima are regions of their own: 32-bit offsets, and accesses of what a launch
# does not have, are faults.

Float32Array = npt.NDArray[np.float32]

POISON = np.float32(np.nan)
THREADS = 256
PAGE_STRIDE = (5 << 30) + 48
"""Bytes."""
TOKEN_STRIDE, HEAD_STRIDE = (1 << 30) + 5, (1 << 40) + (1 << 31) + 3
"""Cells: rows begin at any multiple of 4 bytes."""
WAVE_INSTRUCTIONS = 60_000
"""Far more than a wave of these launches runs between two barriers."""


def register_operands(memory: Memory, arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, int]:
    """Device addresses of arrays that are read, each across a multiple of 4 GiB and with bit 47 set:
    carries into the upper half matter, and every bit of it."""
    at = {}
    for place, (name, array) in enumerate(arrays.items()):
        address = (0x81 + place << 40) - array.nbytes // 2 // 16 * 16
        at[name] = memory.register_array(array, name, writable=False, address=address).address
    return at


def register_pages(memory: Memory, call: Call, page_ids: Iterable[int]) -> int:
    """Device address of page 0; each of the pages named is a region, and there is none of the others."""
    start = (0xA5 << 40) - 9216  # all 48 bits, and the second page behind a carry into the upper half
    for page_id in page_ids:
        page, address = call.pages[page_id].numpy(), start + page_id * PAGE_STRIDE
        memory.register_array(page, f"page {page_id}", writable=False, address=address)
    return start


def register_rows(memory: Memory, array: Float32Array, name: str, place: int) -> int:
    """Device address of the first row of ``[H, tokens, cells]``; each row is a region."""
    start = (place << 40) - 4
    for head, tokens in enumerate(array):
        for token, row in enumerate(tokens):
            address = start + 4 * (head * HEAD_STRIDE + token * TOKEN_STRIDE)
            memory.register_array(row, f"{name} of head {head}, token {token}", address=address)
    return start


def check_cells(name: str, actual: Float32Array, expected: Float32Array) -> None:
    """Raises WrongScoresError unless all bits are the same."""
    wrong = actual.view(np.uint32) != expected.view(np.uint32)
    if wrong.any():
        cell = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise WrongScoresError(
            f"{int(wrong.sum())} of {wrong.size} {name} are wrong, the first at {cell}: "
            f"{actual[cell]} instead of {expected[cell]}"
        )
