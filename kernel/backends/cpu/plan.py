"""How the cpu backend works through a step: short requests in tile batches, the others one by one.

A tile batch is laid out once, when the step is planned, so that a run does the same few operations for all of
its requests, and one product for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernel.batch import Request
from kernel.contract import BLOCK_TOKENS
from kernel.step import IntArray, Lengths

TILE_BATCH_CELLS = 1 << 18
"""Most score cells of a tile batch, those of padding included: 2 MiB of packed keys."""
PADDED_BLOCKS = 32
"""Blocks up to which a request's rows are padded to one tile, however many are missing: two narrower tiles
are less to multiply, but more to launch."""


@dataclass(frozen=True, eq=False)
class TileBatch:
    """Requests whose rows fit a tile each, of one width; the blocks of each follow those of the one before.

    Attributes:
        width: rows of a tile, those that pad it included.
        num_blocks: blocks of the longest request, ``S``.
        first_blocks: place of each request's first block; last, the number of blocks.
    """

    width: int
    num_blocks: int
    first_blocks: list[int]
    query_rows: torch.Tensor
    """``[requests * width]``: rows of ``[total_q * H, 128]``. A request's last row pads its tile."""
    table_cells: torch.Tensor
    """``[blocks]``: where the flat block table has the page id."""
    score_rows: torch.Tensor
    """``[blocks]``: where ``[requests * S, width]`` has the scores."""
    diagonal: torch.Tensor
    """Places of the blocks that some row does not see whole, ascending."""
    limits: torch.Tensor
    """``[diagonal, width]``: the last token that a row sees of such a block; below 0: none."""
    kept_rows: torch.Tensor
    """``[rows]``: those of ``[requests * width]`` that are no padding."""
    row_blocks: torch.Tensor
    """``[rows]``: ``nb``."""
    tokens: torch.Tensor
    """``[rows / H]``: query tokens."""


@dataclass(frozen=True, eq=False)
class Layout:
    """How requests are worked through, in the form of a plan. All integers are int64.

    Attributes:
        numbers: of each tile batch width, ``num_blocks``, diagonal blocks, rows, requests, ``first_blocks``;
            ``table_row``, ``query_start``, ``query_len`` and ``seq_len`` of each longer request.
        places: the tensors of each tile batch, one after another.
    """

    numbers: list[int]
    places: list[torch.Tensor]

    @staticmethod
    def of(lengths: Lengths, num_heads: int, table_columns: int, widths: Sequence[int]) -> Layout:
        """Lay requests out.

        Args:
            lengths: of the requests; those without queries are left out.
            num_heads: H.
            table_columns: of the block table.
            widths: of tiles, widest first.
        """
        rows, ascending = lengths.query_lens * num_heads, np.array(widths[::-1])
        covering = ascending[np.minimum(ascending.searchsorted(rows), ascending.size - 1)]
        padded = (4 * rows >= 3 * covering) | (lengths.num_blocks <= PADDED_BLOCKS)
        short = (rows <= covering) & padded & (covering * lengths.num_blocks <= TILE_BATCH_CELLS)
        numbers: list[int] = []
        places: list[torch.Tensor] = []
        for width in np.unique(covering[short & (rows > 0)]).tolist():
            chosen = lengths[short & (rows > 0) & (covering == width)]
            while len(chosen):
                most = np.maximum.accumulate(chosen.num_blocks)
                cells = np.arange(1, len(chosen) + 1) * most * width
                fit = max(int(cells.searchsorted(TILE_BATCH_CELLS, side="right")), 1)
                own, array = _tile_batch(chosen[:fit], num_heads, table_columns, width)
                numbers += own
                places.append(array)
                chosen = chosen[fit:]
        others = lengths[~short]
        fields = (others.table_rows, others.query_starts, others.query_lens, others.seq_lens)
        return Layout(numbers + np.stack(fields, axis=1).reshape(-1).tolist(), places)

    def tile_batches(self, num_heads: int) -> Iterator[TileBatch]:
        """Every tile batch."""
        at = 0
        for array in self.places:
            width, num_blocks, diagonal, rows, requests = self.numbers[at : at + 5]
            first_blocks = self.numbers[at + 5 : at + 6 + requests]
            at += 6 + requests
            blocks, tokens = first_blocks[-1], rows // num_heads
            sizes = [requests * width, blocks, blocks, diagonal, diagonal * width, rows, rows, tokens]
            parts = list(torch.split(array, sizes))
            parts[4] = parts[4].view(diagonal, width)
            yield TileBatch(width, num_blocks, first_blocks, *parts)

    def requests(self) -> list[Request]:
        """Every longer request."""
        at = 0
        for _ in self.places:
            at += 6 + self.numbers[at + 4]
        return [Request(*self.numbers[first : first + 4]) for first in range(at, len(self.numbers), 4)]


def _tile_batch(
    lengths: Lengths, num_heads: int, table_columns: int, width: int
) -> tuple[list[int], torch.Tensor]:
    """The numbers and the places of a tile batch."""
    rows, most = lengths.query_lens * num_heads, lengths.max_blocks
    ends = lengths.num_blocks.cumsum()
    firsts = ends - lengths.num_blocks
    owner = np.arange(len(lengths)).repeat(lengths.num_blocks)
    block = np.arange(owner.size) - firsts[owner]
    row = np.minimum(np.arange(width), rows[:, None] - 1)
    position = lengths.prefix_lens[:, None] + row // num_heads
    diagonal = np.flatnonzero(block >= (lengths.prefix_lens[owner] + 1) // BLOCK_TOKENS)
    kept = np.flatnonzero(np.arange(width) < rows[:, None])
    query_rows = (lengths.query_starts * num_heads)[:, None] + row
    parts: tuple[IntArray, ...] = (
        query_rows,
        lengths.table_rows[owner] * table_columns + block,
        owner * most + block,
        diagonal,
        position[owner[diagonal]] - BLOCK_TOKENS * block[diagonal][:, None],
        kept,
        position.reshape(-1)[kept] // BLOCK_TOKENS + 1,
        query_rows.reshape(-1)[kept[::num_heads]] // num_heads,
    )
    numbers = [width, most, diagonal.size, kept.size, len(lengths), *firsts.tolist(), int(ends[-1])]
    return numbers, torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))
