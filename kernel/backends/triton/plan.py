"""Host-side plan of a prefill call: row tiles, chunks that fit the buffers, splits over keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.batch import Request
from kernel.contract import BLOCK_TOKENS

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
    requests: tuple[Request, ...],
    num_heads: int,
    table_columns: int,
    *,
    max_blocks: int,
    max_score_groups: int | None = None,
) -> Iterator[Chunk]:
    """Cut a call into chunks that fit the buffers.

    Args:
        requests: those to be scored.
        num_heads: H.
        table_columns: columns of the block table.
        max_blocks: blocks that the workspace holds; a single request's blocks always fit.
        max_score_groups: groups of 16 scores that the score buffer holds, at least one tile's; None: no
        limit,
            scores go to the caller's buffer.
    """
    pending: list[Request] = []
    blocks = 0
    for request in requests:
        if not request.query_len:
            continue
        if pending and blocks + request.num_blocks > max_blocks:
            yield from _row_chunks(pending, num_heads, table_columns, max_score_groups)
            pending, blocks = [], 0
        pending.append(request)
        blocks += request.num_blocks
    if pending:
        yield from _row_chunks(pending, num_heads, table_columns, max_score_groups)


def splits_of(tiles: int, num_blocks: int, multiprocessors: int, programs_per_multiprocessor: int) -> int:
    """Parts that the keys of every tile are cut into: the number with the shortest last wave.

    A part costs the loads of its queries and the filling of its pipeline, about as much as scoring some
    blocks.
    """
    places = multiprocessors * programs_per_multiprocessor

    def blocks_in_a_row(splits: int) -> int:
        return -(-tiles * splits // places) * (-(-num_blocks // splits) + _PART_BLOCKS)

    most = max(1, min(num_blocks // (2 * GROUP_BLOCKS), 4 * places // tiles))
    return min(range(1, most + 1), key=blocks_in_a_row)


def _row_chunks(
    requests: list[Request], num_heads: int, table_columns: int, max_score_groups: int | None
) -> Iterator[Chunk]:
    first_blocks = np.cumsum([0] + [request.num_blocks for request in requests])
    table_cells = np.concatenate(
        [
            np.arange(request.num_blocks, dtype=np.int64) + request.table_row * table_columns
            for request in requests
        ]
    )
    tiles: list[tuple[int, ...]] = []
    rows, num_blocks, changed = 0, 0, True
    for request, first_block in zip(requests, first_blocks.tolist()):
        request_rows = request.query_len * num_heads
        for start in range(0, request_rows, TILE_ROWS):
            count = min(TILE_ROWS, request_rows - start)
            most = max(num_blocks, _tile_blocks(request, num_heads, start + count))
            groups = -(-most // GROUP_BLOCKS) * (rows + TILE_ROWS)
            if tiles and max_score_groups is not None and groups > max_score_groups:
                yield _chunk(tiles, table_cells, rows, num_blocks, changed)
                tiles, rows, changed = [], 0, False
                most = _tile_blocks(request, num_heads, start + count)
            first_row = request.query_start * num_heads + start
            tiles.append(
                (
                    most_of_tile := _tile_blocks(request, num_heads, start + count),
                    first_row,
                    count,
                    start,
                    request.prefix_len,
                    first_block,
                    rows,
                )
            )
            rows += count
            num_blocks = max(most, most_of_tile)
    yield _chunk(tiles, table_cells, rows, num_blocks, changed)


def _tile_blocks(request: Request, num_heads: int, end_row: int) -> int:
    """``nb`` of the last of a request's first ``end_row`` rows."""
    return (request.prefix_len + (end_row - 1) // num_heads) // BLOCK_TOKENS + 1


def _chunk(
    tiles: list[tuple[int, ...]], table_cells: NDArray[np.int64], rows: int, num_blocks: int, changed: bool
) -> Chunk:
    ordered = np.array(tiles, dtype=np.int32)
    ordered = ordered[np.argsort(-ordered[:, 0], kind="stable"), 1:]
    return Chunk(np.ascontiguousarray(ordered), table_cells, rows, num_blocks, changed)


# ---- Plans on the device: copied without waiting ----


@dataclass(frozen=True)
class DeviceChunk:
    """A :class:`Chunk` whose arrays are on the device."""

    tiles: torch.Tensor
    table_cells: torch.Tensor
    rows: int
    num_blocks: int
    keys_change: bool


def device_chunk(chunk: Chunk, device: torch.device) -> DeviceChunk:
    """Bring a chunk to the device."""
    tiles, table_cells = uploaded(chunk.tiles, device), uploaded(chunk.table_cells, device)
    return DeviceChunk(tiles, table_cells, chunk.rows, chunk.num_blocks, chunk.keys_change)


def uploaded(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array on the device; the copy is queued on the current stream, the host does not wait."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


# ---- Launch parameters, measured on an H200 (docs/performance.md); conservative ones on other devices ----

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
        return Tuning(count, True, True, True, exact, fast, decode_exact, decode_fast)
    ptx = capability >= (8, 9)
    exact = PrefillTuning(warps=8, stages=2, programs_per_multiprocessor=1)
    fast = PrefillTuning(warps=8, stages=3, programs_per_multiprocessor=1)
    decode = DecodeTuning(4, 3, 4)
    return Tuning(count, ptx, False, ptx, exact, fast, decode, decode)
