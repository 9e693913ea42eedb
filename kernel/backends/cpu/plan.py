"""How the cpu backend works through a step: short requests in tile batches, the others one by one.

A tile batch is laid out once, when the step is planned, so that a run does the same few operations for all of
its requests, and one product for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.batch import Request
from kernel.contract import BLOCK_TOKENS
from kernel.step import Lengths, PlanHeader

TILE_BATCH_CELLS = 1 << 18
"""Most score cells of a tile batch, those of padding included: 2 MiB of packed keys."""
TILE_BATCH_BLOCKS = 1024
"""Most blocks of a request in a tile batch, which keeps all scores: of more, the best are kept on the way."""
PADDED_BLOCKS = 32
"""Blocks up to which a request's rows are padded to one tile, however many are missing: two narrower tiles
are less to multiply, but more to launch."""
KEY_ROWS = 32
"""Rows whose products with a block take as long as reading its keys."""
TASK_COST = 2048
"""Least cost of a task among several, in rows times blocks: 1 ms, some times that of its small operations."""
TASKS_A_THREAD = 3
"""Tile batches, or parts of longer requests, for each thread: one held up leaves its next to another."""


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
    diagonal: torch.Tensor
    """Places of the blocks that some row does not see whole, ascending."""
    unseen: torch.Tensor
    """``[diagonal, 128, width]`` bool: the tokens of such a block that a row does not see."""
    score_cells: torch.Tensor
    """``[rows * S]``: cells of ``[blocks + 1, width]``, in the last row of it past a request's blocks."""
    row_blocks: torch.Tensor
    """``[rows]``: ``nb``."""
    tokens: torch.Tensor
    """``[rows / H]``: query tokens."""
    init: torch.Tensor | None
    """``[rows, S]`` bool: the init blocks, where there are any."""
    local: torch.Tensor | None
    """``[rows, S]`` bool: the local blocks, where there are any."""

    @staticmethod
    def of(lengths: Lengths, header: PlanHeader, table_columns: int, width: int) -> TileBatch:
        """Lay requests out whose rows fit ``width``."""
        heads, most = header.num_heads, lengths.max_blocks
        rows, prefixes = (lengths.query_lens * heads)[:, None], lengths.prefix_lens
        ends = lengths.num_blocks.cumsum()
        firsts, total = ends - lengths.num_blocks, int(ends[-1])
        owner = np.arange(len(lengths)).repeat(lengths.num_blocks)
        block = np.arange(total) - firsts[owner]
        in_tile = np.arange(width)
        row = np.minimum(in_tile, rows - 1)
        position, query_rows = prefixes[:, None] + row // heads, lengths.query_starts[:, None] * heads + row

        diagonal = np.flatnonzero(block >= (prefixes[owner] + 1) // BLOCK_TOKENS)
        last_seen = position[owner[diagonal]] - BLOCK_TOKENS * block[diagonal][:, None]
        unseen = np.arange(BLOCK_TOKENS)[:, None] > last_seen[:, None]

        kept = np.flatnonzero(in_tile < rows)
        request, blocks = kept // width, np.arange(most)
        places = np.where(blocks < lengths.num_blocks[request, None], firsts[request, None] + blocks, total)
        row_blocks = position.reshape(-1)[kept] // BLOCK_TOKENS + 1
        init = local = None
        if header.init_blocks:
            init = torch.from_numpy(blocks < np.minimum(header.init_blocks, row_blocks)[:, None])
        if header.local_blocks:
            after = row_blocks[:, None] - blocks
            local = torch.from_numpy((after > 0) & (after <= header.local_blocks))
        return TileBatch(
            width=width,
            num_blocks=most,
            first_blocks=[*firsts.tolist(), total],
            query_rows=_flat(query_rows),
            table_cells=_flat(lengths.table_rows[owner] * table_columns + block),
            diagonal=_flat(diagonal),
            unseen=torch.from_numpy(unseen),
            score_cells=_flat(places * width + (kept % width)[:, None]),
            row_blocks=_flat(row_blocks),
            tokens=_flat(query_rows.reshape(-1)[kept[::heads]] // heads),
            init=init,
            local=local,
        )


def _flat(places: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(places.reshape(-1))


@dataclass(frozen=True, eq=False)
class Layout:
    """How requests are worked through."""

    tile_batches: list[TileBatch]
    longer: tuple[Request, ...]
    """Those in no tile batch."""
    tasks: int
    """Into how many tasks the whole is worth dividing."""

    @staticmethod
    def of(
        lengths: Lengths, header: PlanHeader, table_columns: int, widths: Sequence[int], threads: int
    ) -> Layout:
        """Lay requests out.

        Args:
            lengths: of the requests; those without queries are left out.
            header: of the plan.
            table_columns: of the block table.
            widths: of tiles, widest first.
            threads: among which tile batches are spread.
        """
        rows, ascending = lengths.query_lens * header.num_heads, np.array(widths[::-1])
        covering = ascending[np.minimum(ascending.searchsorted(rows), ascending.size - 1)]
        padded = (4 * rows >= 3 * covering) | (lengths.num_blocks <= PADDED_BLOCKS)
        fitting = lengths.num_blocks <= np.minimum(TILE_BATCH_BLOCKS, TILE_BATCH_CELLS // covering)
        costs = np.where(rows > 0, lengths.num_blocks * (np.maximum(rows, covering) + KEY_ROWS), 0)
        most_cost = int(costs.sum())
        if threads > 1:
            most_cost = max(TASK_COST, -(-most_cost // (threads * TASKS_A_THREAD)))
        short = (rows <= covering) & padded & fitting & (costs <= most_cost)
        width_of = np.where(short & (rows > 0), covering, 0)
        tile_batches = []
        for width in sorted(set(width_of.tolist()) - {0}):
            chosen, cost = lengths[width_of == width], costs[width_of == width]
            while len(chosen):
                most = np.maximum.accumulate(chosen.num_blocks)
                cells = np.arange(1, len(chosen) + 1) * most * width
                fit = int(cells.searchsorted(TILE_BATCH_CELLS, side="right"))
                fit = max(min(fit, int(cost.cumsum().searchsorted(most_cost, side="right"))), 1)
                tile_batches.append(TileBatch.of(chosen[:fit], header, table_columns, width))
                chosen, cost = chosen[fit:], cost[fit:]
        longer = () if short.all() else lengths[~short].requests()
        return Layout(tile_batches, longer, len(tile_batches) + int(costs[~short].sum()) // TASK_COST)
