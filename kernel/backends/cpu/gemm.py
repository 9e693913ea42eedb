"""Products of keys and queries in tiles whose shapes are known to give the same bits.

BLAS picks its kernel, and with it the order of summation, by the shape of the product. A row's score must
not depend on how many rows stand beside it, so rows are padded to one of a few tile widths, and a width or a
number of blocks is used only if it gave the bits of the widest tile when this class was made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel.page import BLOCK_TOKENS, HEAD_DIM

ROW_TILES = (512, 64, 16)
"""Widths of a row tile that are tried, widest first."""
BLOCK_TILE = 8
"""Most blocks multiplied at a time."""


@dataclass(frozen=True)
class RowTile:
    """Queries of some rows, ready to be multiplied."""

    rows: slice
    """Rows, counted within the chunk; as many as are real."""
    queries: torch.Tensor
    """``[128, width]`` float32, zero past the real rows."""
    positions: torch.Tensor
    """``[width]`` int64 position of each row's token."""
    first_position: int
    last_position: int
    product: torch.Tensor
    """``[BLOCK_TILE * 128, width]`` float32 workspace."""
    block_tiles: tuple[int, ...]
    """Numbers of blocks that may be multiplied at a time, most first."""

    def block_scores(self, keys: torch.Tensor, first_position: int, out: torch.Tensor) -> None:
        """Largest ``q . k`` over the causal tokens of each block, -inf where there is none.

        Args:
            keys: ``[n * 128, 128]`` float32, n at most ``BLOCK_TILE``.
            first_position: position of ``keys[0]``, a multiple of 128.
            out: ``[n, rows]`` float32, written.
        """
        tokens = keys.shape[0]
        product = torch.mm(keys, self.queries, out=self.product[:tokens])
        blocks = product.view(-1, BLOCK_TOKENS, product.shape[1])
        visible = max(0, (self.first_position + 1 - first_position) // BLOCK_TOKENS)
        if visible < blocks.shape[0]:
            start = first_position + visible * BLOCK_TOKENS
            key_positions = torch.arange(start, first_position + tokens)
            hidden = key_positions[:, None] > self.positions
            product[visible * BLOCK_TOKENS :].masked_fill_(hidden, -torch.inf)
        out.copy_(blocks.amax(1)[:, : out.shape[1]])


class GemmTiles:
    """The tile shapes that agree bit for bit on this machine."""

    def __init__(self) -> None:
        self.widths = ROW_TILES

    def split(self, queries: torch.Tensor, positions: torch.Tensor) -> list[RowTile]:
        """Cut ``[rows, 128]`` E4M3 queries of ascending positions ``[rows]`` into tiles."""
        tiles = []
        start = 0
        total = queries.shape[0]
        products: dict[int, torch.Tensor] = {}
        while start < total:
            left = total - start
            width = next((w for w in self.widths if w <= left), self.widths[-1])
            end = min(start + width, total)
            padded = torch.zeros((HEAD_DIM, width))
            padded[:, : end - start] = queries[start:end].float().t()
            places = positions[start:end]
            if end - start < width:
                places = torch.nn.functional.pad(places, (0, width - (end - start)), value=int(places[-1]))
            if width not in products:
                products[width] = torch.empty((BLOCK_TILE * BLOCK_TOKENS, width))
            tiles.append(
                RowTile(
                    rows=slice(start, end),
                    queries=padded,
                    positions=places,
                    first_position=int(places[0]),
                    last_position=int(places[-1]),
                    product=products[width],
                    block_tiles=(),
                )
            )
            start = end
        return tiles
