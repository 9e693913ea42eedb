"""Host-side plan of a prefill call: row tiles, chunks that fit the buffers, splits over keys.

Everything is vectorised over requests and tiles: a plan of 1,024 ragged requests takes about a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.contract import BLOCK_TOKENS
from kernel.step import Lengths

TILE_ROWS = 128
"""Rows of a tile: the M of the matrix product."""
GROUP_BLOCKS = 16
"""Blocks whose maximum is written beside the scores."""
_PART_BLOCKS = 4
TILE_FIELDS = 6
"""Integers that describe a tile: first row in q, rows, rows before it in its request, prefix length, first
block
of its request in the workspace, first row in the output."""


@dataclass(frozen=True)
class Chunk:
    """Tiles that are run together, over keys that are dequantised together."""

    tiles: NDArray[np.int32]
    """``[n, TILE_FIELDS]``, most blocks first: the longest programs start first."""
    table_cells: NDArray[np.int64]
    """Cells of the flattened block table whose pages make the workspace, in its order."""
    rows: int
    """Rows of the output; those of its requests, one after another."""
    num_blocks: int
    """Blocks of its longest row."""
    keys_change: bool
    """Whether the workspace differs from the previous chunk's."""


def chunks(
    lengths: Lengths, num_heads: int, table_columns: int, *, max_blocks: int, max_score_groups: int
) -> Iterator[Chunk]:
    """Cut a call into chunks that fit the buffers.

    Args:
        lengths: of the requests to score.
        num_heads: H.
        table_columns: columns of the block table.
        max_blocks: blocks that the workspace holds; a single request's blocks always fit.
        max_score_groups: groups of 16 scores that the score buffer holds, at least one tile's.
    """
    lengths = lengths[lengths.query_lens > 0]
    ends = np.cumsum(lengths.num_blocks)
    first = 0
    while first < len(lengths):
        room = max_blocks + (int(ends[first - 1]) if first else 0)
        stop = max(int(np.searchsorted(ends, room, side="right")), first + 1)
        yield from _row_chunks(lengths[first:stop], num_heads, table_columns, max_score_groups)
        first = stop


def splits_of(tiles: int, num_blocks: int, multiprocessors: int, programs_per_multiprocessor: int) -> int:
    """Parts that the keys of every tile are cut into: the number with the shortest last wave.

    A part costs the loads of its queries and the filling of its pipeline, about as much as scoring some
    blocks.
    """
    places = multiprocessors * programs_per_multiprocessor

    most = max(1, min(num_blocks // (2 * GROUP_BLOCKS), 4 * places // tiles))
    splits = np.arange(1, most + 1)
    blocks_in_a_row = -(-tiles * splits // places) * (-(-num_blocks // splits) + _PART_BLOCKS)
    return int(splits[np.argmin(blocks_in_a_row)])


def _row_chunks(
    lengths: Lengths, num_heads: int, table_columns: int, max_score_groups: int
) -> Iterator[Chunk]:
    num_blocks = lengths.num_blocks
    first_blocks = np.cumsum(num_blocks) - num_blocks
    table_cells = np.repeat(lengths.table_rows * table_columns - first_blocks, num_blocks)
    table_cells += np.arange(table_cells.size)

    request_rows = lengths.query_lens * num_heads
    request_tiles = -(-request_rows // TILE_ROWS)
    owner = np.repeat(np.arange(len(lengths)), request_tiles)
    start = (np.arange(owner.size) - (np.cumsum(request_tiles) - request_tiles)[owner]) * TILE_ROWS
    count = np.minimum(request_rows[owner] - start, TILE_ROWS)
    prefix = lengths.prefix_lens[owner]
    blocks = (prefix + (start + count - 1) // num_heads) // BLOCK_TOKENS + 1
    first_row = lengths.query_starts[owner] * num_heads + start
    fields = np.stack((first_row, count, start, prefix, first_blocks[owner], np.zeros_like(count)), axis=1)
    first = 0
    while first < owner.size:
        rows_before = np.cumsum(count[first:]) - count[first:]
        most = np.maximum.accumulate(blocks[first:])
        too_many = -(-most // GROUP_BLOCKS) * (rows_before + TILE_ROWS) > max_score_groups
        too_many[0] = False
        size = int(np.argmax(too_many)) if too_many.any() else too_many.size
        chosen = slice(first, first + size)
        tiles = fields[chosen].astype(np.int32)
        tiles[:, 5] = rows_before[:size]
        order = np.argsort(-blocks[chosen], kind="stable")
        yield Chunk(
            np.ascontiguousarray(tiles[order]),
            table_cells,
            int(count[chosen].sum()),
            int(blocks[chosen].max()),
            first == 0,
        )
        first += size


# ---- Launch parameters, measured on an H200 (docs/performance.md); conservative ones on other devices ----

MAX_ROWS = 64
"""Rows of a request, queries times heads, that every device decodes: 16 queries of 4 heads."""
_MANY_BLOCKS = 32
"""Blocks of a request from which on decode with more rows is the faster."""
_MANY_PAGES = 16
"""Pages of a program beside which its start is short."""


@dataclass(frozen=True)
class PrefillTuning:
    """How a prefill tile is run."""

    warps: int
    stages: int
    """Depth of the pipeline over key blocks."""
    programs_per_multiprocessor: int
    """Programs that run at once."""


@dataclass(frozen=True)
class DecodeTuning:
    """How decode is run."""

    warps: int
    stages: int
    """Pages under way in a program."""
    programs_per_multiprocessor: int
    registers: int | None = None
    """Most registers of a thread; None: the compiler's choice."""
    rounds: int = 1
    """Times that many programs are launched where each has many pages: they end at different times."""

    def programs(self, multiprocessors: int, blocks: int) -> int:
        """Programs to launch for a line of at most so many blocks."""
        at_once = multiprocessors * self.programs_per_multiprocessor
        if blocks >= _MANY_PAGES * at_once:
            return at_once * min(self.rounds, blocks // (_MANY_PAGES * at_once))
        return max(1, min(blocks, multiprocessors * min(4, self.programs_per_multiprocessor)))


@dataclass(frozen=True)
class Tuning:
    """Everything that depends on the device."""

    multiprocessors: int
    ptx: bool
    """Whether the device converts to E4M3 (PTX for sm_89 or newer)."""
    hopper: bool
    """Whether the device is of compute capability 9.0, for which there are kernels in Gluon."""
    fp8_dot: bool
    """Whether the device multiplies E4M3 matrices (``precision="fast"``)."""
    prefill_exact: PrefillTuning
    prefill_fast: PrefillTuning
    decode_exact: DecodeTuning
    decode_fast: DecodeTuning
    decode_queries: int = 16
    """Most queries of a request that is decoded."""
    decode_rows: int = MAX_ROWS
    """Most rows, queries times heads, of a request that is decoded: one product has so many columns. Up to
    there its keys are read once either way, and decode does not write them out dequantised before."""

    def decoded(self, lengths: Lengths, num_heads: int, most_queries: int) -> NDArray[np.bool_]:
        """``[n]``: requests to decode."""
        rows = lengths.query_lens * num_heads
        # The start of a program with more columns takes as long as some blocks.
        pays = (rows <= MAX_ROWS) | (lengths.num_blocks >= _MANY_BLOCKS)
        return (lengths.query_lens <= most_queries) & (rows <= self.decode_rows) & pays

    def decode(self, *, exact: bool) -> DecodeTuning:
        """How decode is run in a precision."""
        return self.decode_exact if exact else self.decode_fast


def tuning_for(device: torch.device) -> Tuning:
    """The parameters for a device; for the interpreter where there is none."""
    if device.type != "cuda":
        small = PrefillTuning(warps=4, stages=1, programs_per_multiprocessor=1)
        decode = DecodeTuning(4, 1, 1)
        return Tuning(2, False, False, False, small, small, decode, decode)
    properties = torch.cuda.get_device_properties(device)
    count = properties.multi_processor_count
    if torch.version.hip is not None:
        prefill = PrefillTuning(warps=8, stages=2, programs_per_multiprocessor=1)
        decode = DecodeTuning(4, 2, 4)
        return Tuning(count, False, False, False, prefill, prefill, decode, decode)
    capability = (properties.major, properties.minor)
    if capability == (9, 0):
        exact = PrefillTuning(warps=4, stages=3, programs_per_multiprocessor=1)
        fast = PrefillTuning(warps=4, stages=4, programs_per_multiprocessor=1)
        decode_exact, decode_fast = DecodeTuning(4, 2, 6, 80, rounds=2), DecodeTuning(4, 2, 5, 96, rounds=2)
        return Tuning(count, True, True, True, exact, fast, decode_exact, decode_fast, 128, 128)
    ptx = capability >= (8, 9)
    exact = PrefillTuning(warps=8, stages=2, programs_per_multiprocessor=1)
    fast = PrefillTuning(warps=8, stages=3, programs_per_multiprocessor=1)
    decode = DecodeTuning(4, 3, 4)
    return Tuning(count, ptx, False, ptx, exact, fast, decode, decode)
