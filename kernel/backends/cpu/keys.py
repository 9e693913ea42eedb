"""Keys of pages as floats, by table: one gather for each code byte, two values at a time."""

from __future__ import annotations

import functools

import torch

from kernel.contract import BLOCK_TOKENS, GROUP_DIMS, GROUPS, HEAD_DIM
from kernel.nvfp4 import dequantize
from kernel.page import codes_of, scales_of

_GROUP_BYTES = GROUP_DIMS // 2
"""Code bytes that share a scale."""


@functools.cache
def build_pair_table(dtype: torch.dtype) -> torch.Tensor:
    """Both values of every (scale byte, code byte).

    Returns:
        ``[65536]`` pairs, index ``scale * 256 + code``: 512 KiB in float32, which stays in L2.
    """
    every_byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    values = dequantize(every_byte.expand(256, 256), every_byte[:, None].expand(256, 256 // _GROUP_BYTES))
    return torch.view_as_complex(values.to(dtype).view(-1, 2))


class KeyReader:
    """Dequantises pages, a bounded number at a time, into one buffer of keys."""

    def __init__(self, pair_table: torch.Tensor, max_blocks: int) -> None:
        self._table = pair_table
        self._indices = torch.empty(
            (max_blocks, BLOCK_TOKENS, GROUPS, _GROUP_BYTES), dtype=torch.int64, device="cpu"
        )
        self._pairs = torch.empty(self._indices.numel(), dtype=pair_table.dtype, device="cpu")

    def read(self, pages: torch.Tensor, page_ids: torch.Tensor) -> torch.Tensor:
        """Keys of pages.

        Args:
            pages: ``[num_pages, 9216]`` uint8, any page stride.
            page_ids: ``[n]`` int64, n at most ``max_blocks``.

        Returns:
            ``[n * 128, 128]`` of the table's values, valid until the next read.
        """
        taken = pages.index_select(0, page_ids)
        indices = self._indices[: page_ids.shape[0]]
        codes = codes_of(taken).view(indices.shape)
        torch.add(codes, scales_of(taken)[..., None].long(), alpha=256, out=indices)
        pairs = self._pairs[: indices.numel()]
        torch.index_select(self._table, 0, indices.view(-1), out=pairs)
        return torch.view_as_real(pairs).view(-1, HEAD_DIM)
