"""Host-side plan of a prefill call: row tiles, chunks that fit the buffers, splits over keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernel.batch import Request

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
    return (request.prefix_len + (end_row - 1) // num_heads) // 128 + 1


def _chunk(
    tiles: list[tuple[int, ...]], table_cells: NDArray[np.int64], rows: int, num_blocks: int, changed: bool
) -> Chunk:
    ordered = np.array(tiles, dtype=np.int32)
    ordered = ordered[np.argsort(-ordered[:, 0], kind="stable"), 1:]
    return Chunk(np.ascontiguousarray(ordered), table_cells, rows, num_blocks, changed)
