"""Block scores of a batch, a bounded part at a time.

A chunk is some consecutive query tokens of a request, a part is a chunk and a group of its blocks. A group's
keys are dequantised once, then multiplied tile by tile (``keys @ queries^T``: tokens down, rows across, so
that the maximum over a block's tokens runs over whole vectors); blocks that no row of a tile sees are left
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernel.backends.cpu.gemm import MAX_GROUP_BLOCKS, RowTiles, TileMaxima, group_blocks
from kernel.backends.cpu.keys import KeyReader, build_pair_table
from kernel.batch import INIT_SCORE, LOCAL_SCORE, ScoreBatch
from kernel.contract import BLOCK_TOKENS
from kernel.page import blocks_of

CHUNK_ROWS = 4096
"""Most rows of a chunk: a group's keys are dequantised once for all of them."""


@dataclass(frozen=True, eq=False)
class ScorePart:
    """Scores of a chunk's rows and some blocks: sentinels in, -inf at and past a row's ``nb``."""

    first_block: int
    scores: torch.Tensor
    """``[blocks, tokens, H]`` float32."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some consecutive query tokens of a request."""

    tokens: slice
    """The tokens' places in ``q``."""
    num_blocks: torch.Tensor
    """``[tokens]`` int64: ``nb`` of each token."""
    parts: Iterator[ScorePart]
    """Block 0 first, up to the last block that a token sees. To be consumed before the next chunk."""


class ScoreStream:
    """Scores batches chunk by chunk. Holds tables only, so threads may share it."""

    def __init__(self) -> None:
        self._row_tiles = RowTiles()
        self._pair_table = build_pair_table(self._row_tiles.dtype)

    def chunks(self, batch: ScoreBatch) -> Iterator[Chunk]:
        """Every query token of the batch's requests, in chunks."""
        reader = KeyReader(self._pair_table, min(MAX_GROUP_BLOCKS, batch.num_score_blocks))
        tile_maxima = TileMaxima(self._row_tiles.dtype)
        chunk_tokens = CHUNK_ROWS // batch.num_heads
        for request in batch.requests:
            page_ids = batch.block_table[request.table_row, : request.num_blocks].long()
            for start in range(0, request.query_len, chunk_tokens):
                end = min(start + chunk_tokens, request.query_len)
                tokens = slice(request.query_start + start, request.query_start + end)
                first = request.prefix_len + start
                positions = torch.arange(first, first + end - start, dtype=torch.int64, device="cpu")
                num_blocks = positions // BLOCK_TOKENS + 1
                yield Chunk(
                    tokens=tokens,
                    num_blocks=num_blocks,
                    parts=self._parts(batch, tokens, first, page_ids, num_blocks, reader, tile_maxima),
                )

    def _parts(
        self,
        batch: ScoreBatch,
        tokens: slice,
        first_position: int,
        page_ids: torch.Tensor,
        num_blocks: torch.Tensor,
        reader: KeyReader,
        tile_maxima: TileMaxima,
    ) -> Iterator[ScorePart]:
        queries = batch.q[tokens].flatten(0, 1)
        tiles = self._row_tiles.split(queries, first_position, batch.num_heads)
        last_block = blocks_of(first_position + num_blocks.shape[0])
        group = group_blocks(max(tile.queries.shape[1] for tile in tiles))
        for first in range(0, last_block, group):
            stop = min(first + group, last_block)
            keys = reader.read(batch.pages, page_ids[first:stop])
            scores = torch.full(
                (stop - first, queries.shape[0]), -torch.inf, dtype=torch.float32, device="cpu"
            )
            for tile in tiles:
                seen = min(stop, blocks_of(tile.last_position + 1)) - first
                if seen > 0:
                    seen_keys = keys[: seen * BLOCK_TOKENS]
                    tile_maxima.write(tile, seen_keys, first * BLOCK_TOKENS, out=scores[:seen, tile.rows])
            by_head = scores.view(stop - first, -1, batch.num_heads)
            _force(by_head, first, num_blocks, batch.init_blocks, batch.local_blocks)
            yield ScorePart(first, by_head)


def _force(scores: torch.Tensor, first_block: int, num_blocks: torch.Tensor, init: int, local: int) -> None:
    """Write the sentinels into ``[blocks, tokens, H]``; the local value wins over the init value."""
    stop = first_block + scores.shape[0]
    if first_block >= init and stop <= int(num_blocks[0]) - local:
        return
    blocks = torch.arange(first_block, stop, dtype=torch.int64, device="cpu")[:, None]
    causal = blocks < num_blocks
    scores.masked_fill_((causal & (blocks < init))[..., None], INIT_SCORE)
    scores.masked_fill_((causal & (blocks >= num_blocks - local))[..., None], LOCAL_SCORE)
