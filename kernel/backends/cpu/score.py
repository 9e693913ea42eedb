"""Block scores of a request, a bounded part at a time.

A part is a chunk of query tokens times a group of blocks. Its keys are dequantised once, then multiplied tile
by tile (``keys @ queries^T``: tokens down, rows across, so that the maximum over a block's tokens runs over
whole vectors), and only blocks that some row of the tile sees are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernel.backends.cpu.gemm import BLOCK_TILE, GemmTiles
from kernel.backends.cpu.keys import KeyReader, build_pair_table
from kernel.batch import INIT_SCORE, LOCAL_SCORE, Request, ScoreBatch
from kernel.page import BLOCK_TOKENS, blocks_of

GROUP_BLOCKS = 16
"""Blocks dequantised at a time: 1 MiB of keys."""
CHUNK_ROWS = 4096
"""Most rows of a part."""


@dataclass(frozen=True)
class ScorePart:
    """Final scores of some query tokens and some blocks."""

    tokens: slice
    """Query tokens, counted within the request."""
    blocks: slice
    scores: torch.Tensor
    """``[blocks, tokens, H]`` float32."""
    num_blocks_of_rows: torch.Tensor
    """``[tokens * H]``: ``nb`` of each row."""
    is_last: bool
    """Whether no further blocks of these tokens follow."""


class Scorer:
    """Scores requests part by part."""

    def __init__(self) -> None:
        self._tiles = GemmTiles()
        self._pair_table = build_pair_table()

    def parts(self, batch: ScoreBatch, request: Request) -> Iterator[ScorePart]:
        """Scores of a request: token chunk after token chunk, and the blocks of each in order from 0.

        Together the parts of a chunk cover the blocks that its last token sees; sentinels are in, and cells
        at and past a row's ``nb`` are -inf.
        """
        H = batch.num_heads
        reader = KeyReader(self._pair_table, min(GROUP_BLOCKS, request.num_blocks))
        page_ids = batch.block_table[request.table_row, : request.num_blocks].long()
        for start in range(0, request.query_len, CHUNK_ROWS // H):
            end = min(start + CHUNK_ROWS // H, request.query_len)
            positions = torch.arange(request.prefix_len + start, request.prefix_len + end)
            queries = batch.q[request.query_start + start : request.query_start + end].flatten(0, 1)
            tiles = self._tiles.split(queries, positions.repeat_interleave(H))
            num_blocks = positions // BLOCK_TOKENS + 1
            last_block = blocks_of(request.prefix_len + end)
            for first in range(0, last_block, GROUP_BLOCKS):
                stop = min(first + GROUP_BLOCKS, last_block)
                keys = reader.read(batch.pages, page_ids[first:stop])
                scores = torch.full((stop - first, (end - start) * H), -torch.inf)
                for tile in tiles:
                    seen = min(stop, tile.last_position // BLOCK_TOKENS + 1)
                    for block in range(first, seen, BLOCK_TILE):
                        blocks = slice(block - first, min(block + BLOCK_TILE, seen) - first)
                        tokens = slice(blocks.start * BLOCK_TOKENS, blocks.stop * BLOCK_TOKENS)
                        tile.block_scores(keys[tokens], block * BLOCK_TOKENS, out=scores[blocks, tile.rows])
                scores = scores.view(stop - first, end - start, H)
                _force(scores, first, num_blocks, batch.init_blocks, batch.local_blocks)
                yield ScorePart(
                    tokens=slice(start, end),
                    blocks=slice(first, stop),
                    scores=scores,
                    num_blocks_of_rows=num_blocks.repeat_interleave(H),
                    is_last=stop == last_block,
                )


def _force(scores: torch.Tensor, first_block: int, num_blocks: torch.Tensor, init: int, local: int) -> None:
    """Write the sentinels into ``[blocks, tokens, H]``; the local value wins over the init value."""
    stop = first_block + scores.shape[0]
    if first_block >= init and stop <= int(num_blocks[0]) - local:
        return
    blocks = torch.arange(first_block, stop)[:, None]
    causal = blocks < num_blocks
    scores.masked_fill_((causal & (blocks < init))[..., None], INIT_SCORE)
    scores.masked_fill_((causal & (blocks >= num_blocks - local))[..., None], LOCAL_SCORE)
