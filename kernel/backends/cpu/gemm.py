"""Products of keys and queries in tile shapes that give the same bits on this machine.

BLAS picks its kernel, and with it the order of summation, by the shape of the product (one row is a
matrix-vector product, for one). A row's score must not depend on the rows beside it, so rows are padded to
one of a few widths, and a width is used only if it gave the bits of the widest one in a trial.

Where even the widest tile sums differently from place to place, products are made in float64, at half the
speed: an E4M3 product is a multiple of 2^-18 and 128 of them stay below 2^25, so every float64 sum is exact
and no order matters.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kernel.contract import BLOCK_TOKENS, HEAD_DIM
from kernel.nvfp4 import E4M3_NAN

ROW_WIDTHS = (512, 256, 128, 64, 32, 16)
"""Rows of a tile, widest first."""
PRODUCT_CELLS = 1 << 20
"""Most cells of a product: 4 MiB in float32, so that the maximum is taken in the last-level cache."""
MAX_GROUP_BLOCKS = 32
"""Most blocks multiplied at a time."""


def group_blocks(width: int) -> int:
    """Most blocks that are multiplied at a time with tiles of a width."""
    return min(MAX_GROUP_BLOCKS, PRODUCT_CELLS // (width * BLOCK_TOKENS))


@dataclass(frozen=True, eq=False)
class RowTile:
    """The queries of some consecutive rows, ready to be multiplied."""

    rows: slice
    """Rows, counted within the chunk."""
    queries: torch.Tensor
    """``[128, width]``, zero past the rows."""
    positions: torch.Tensor
    """``[width]`` int64: position of each row's token, ascending."""
    first_position: int
    last_position: int


class RowTiles:
    """The widths and the number format whose scores do not depend on the tile."""

    def __init__(self) -> None:
        self.dtype, self.widths = agreeing_shapes()

    def split(self, queries: torch.Tensor, first_position: int, num_heads: int) -> list[RowTile]:
        """Cut the queries of consecutive tokens into tiles.

        Args:
            queries: ``[tokens * H, 128]`` float8_e4m3fn.
            first_position: position of the first token.
            num_heads: H.
        """
        tiles = []
        start, total = 0, queries.shape[0]
        while start < total:
            width = self._width(total - start)
            end = min(start + width, total)
            padded = torch.zeros((HEAD_DIM, width), dtype=self.dtype, device="cpu")
            padded[:, : end - start] = queries[start:end].float().t()
            rows = torch.arange(start, start + width, dtype=torch.int64, device="cpu").clamp_(max=end - 1)
            tiles.append(
                RowTile(
                    rows=slice(start, end),
                    queries=padded,
                    positions=first_position + rows // num_heads,
                    first_position=first_position + start // num_heads,
                    last_position=first_position + (end - 1) // num_heads,
                )
            )
            start = end
        return tiles

    def _width(self, rows: int) -> int:
        """Width of the next tile of ``rows`` remaining ones: at most a quarter of it is padding."""
        covering = min((w for w in self.widths if w >= rows), default=self.widths[0])
        if 4 * rows >= 3 * covering:
            return covering
        return next((w for w in self.widths if w <= rows), self.widths[-1])


class TileMaxima:
    """Block maxima of a tile's products, through one product buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._product = torch.empty(PRODUCT_CELLS, dtype=dtype, device="cpu")

    def write(self, tile: RowTile, keys: torch.Tensor, first_position: int, out: torch.Tensor) -> None:
        """Largest ``q . k`` over the causal tokens of each block, -inf where there is none.

        Args:
            tile: the rows.
            keys: ``[n * 128, 128]``, n at most ``group_blocks`` of the width.
            first_position: position of ``keys[0]``, a multiple of 128.
            out: ``[n, rows]`` float32, written.
        """
        tokens, width = keys.shape[0], tile.queries.shape[1]
        product = self._product[: tokens * width].view(tokens, width)
        torch.mm(keys, tile.queries, out=product)
        whole_tokens = (tile.first_position + 1 - first_position) // BLOCK_TOKENS * BLOCK_TOKENS
        if whole_tokens < tokens:
            masked = max(whole_tokens, 0)
            positions = torch.arange(
                first_position + masked, first_position + tokens, dtype=torch.int64, device="cpu"
            )
            product[masked:].masked_fill_(positions[:, None] > tile.positions, -torch.inf)
        blocks = product.view(-1, BLOCK_TOKENS, width)[:, :, : out.shape[1]]
        if product.dtype == out.dtype:
            torch.amax(blocks, 1, out=out)
        else:
            out.copy_(blocks.amax(1))


@functools.cache
def agreeing_shapes() -> tuple[torch.dtype, tuple[int, ...]]:
    """The format to multiply in and the row widths that agree bit for bit, found by a trial of 0.1 s."""
    generator = torch.Generator("cpu").manual_seed(0)
    queries = _inexact_values(ROW_WIDTHS[0], generator)
    tokens = group_blocks(ROW_WIDTHS[0]) * BLOCK_TOKENS
    keys = _inexact_values(MAX_GROUP_BLOCKS * BLOCK_TOKENS, generator)
    transposed = queries.t().contiguous()
    product = torch.cat([_product(part, transposed) for part in torch.split(keys, tokens)])
    key_order = torch.randperm(tokens, generator=generator, dtype=torch.int64, device="cpu")
    query_order = torch.randperm(queries.shape[0], generator=generator, dtype=torch.int64, device="cpu")
    moved = _product(keys[key_order], queries[query_order].t().contiguous())
    if not torch.equal(moved, product[key_order][:, query_order]):
        return torch.float64, ROW_WIDTHS
    widths = tuple(width for width in ROW_WIDTHS if _agrees(keys, queries[:width], product[:, :width]))
    if ROW_WIDTHS[0] not in widths:
        return torch.float64, ROW_WIDTHS
    return torch.float32, widths


def _agrees(keys: torch.Tensor, queries: torch.Tensor, product: torch.Tensor) -> bool:
    """Whether every number of blocks that may be multiplied at a time gives the bits of ``product``."""
    transposed = queries.t().contiguous()
    last = group_blocks(queries.shape[0]) * BLOCK_TOKENS
    counts = range(BLOCK_TOKENS, last + 1, BLOCK_TOKENS)
    return all(torch.equal(_product(keys[:tokens], transposed), product[:tokens]) for tokens in counts)


def _product(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    # Into a given tensor, as in earnest: autocast would round the product to its own dtype.
    out = torch.empty((keys.shape[0], queries.shape[1]), dtype=torch.float32, device="cpu")
    return torch.mm(keys, queries, out=out)


def _inexact_values(rows: int, generator: torch.Generator) -> torch.Tensor:
    """``[rows, 128]`` E4M3 values over all exponents, so that float32 sums depend on their order."""
    encoded = torch.randint(0, 256, (rows, HEAD_DIM), dtype=torch.uint8, generator=generator, device="cpu")
    encoded[(encoded & 0x7F) == E4M3_NAN] = 0
    values: torch.Tensor = encoded.view(torch.float8_e4m3fn).float()
    return values
