"""Keys of pages as float32, by table: one gather of a value pair for each code byte."""

from __future__ import annotations

import torch

from kernel.nvfp4 import dequantize
from kernel.page import BLOCK_TOKENS, GROUP_DIMS, GROUPS, HEAD_DIM, codes_of, scales_of


def build_pair_table() -> torch.Tensor:
    """Both values of every (scale byte, code byte): ``[65536]`` complex64, index ``scale * 256 + code``.

    complex64 stands for a pair of float32, so that one gathered element moves both. 512 KiB: it stays in L2.
    """
    scales, codes = torch.meshgrid(*[torch.arange(256, dtype=torch.uint8)] * 2, indexing="ij")
    values = dequantize(codes[..., None].expand(-1, -1, 64), scales[..., None].expand(-1, -1, 8))
    return torch.view_as_complex(values[..., :2].contiguous()).flatten()


class KeyReader:
    """Dequantises the pages of some blocks into one buffer of keys."""

    def __init__(self, pair_table: torch.Tensor, max_blocks: int) -> None:
        self._table = pair_table
        tokens = max_blocks * BLOCK_TOKENS
        self._pairs = torch.empty((tokens, HEAD_DIM // 2), dtype=torch.complex64)
        self._indices = torch.empty((tokens, GROUPS, GROUP_DIMS // 2), dtype=torch.int32)

    def read(self, pages: torch.Tensor, page_ids: torch.Tensor) -> torch.Tensor:
        """Keys of pages.

        Args:
            pages: ``[num_pages, 9216]`` uint8, any page stride.
            page_ids: ``[n]`` int64, n at most ``max_blocks``.

        Returns:
            ``[n * 128, 128]`` float32, valid until the next read.
        """
        tokens = page_ids.shape[0] * BLOCK_TOKENS
        taken = pages[page_ids]
        codes = codes_of(taken).reshape(tokens, GROUPS, GROUP_DIMS // 2)
        scales = scales_of(taken).reshape(tokens, GROUPS, 1)
        indices = self._indices[:tokens]
        torch.add(codes, scales.int(), alpha=256, out=indices)
        pairs = self._pairs[:tokens]
        torch.take(self._table, indices.view(tokens, -1).long(), out=pairs)
        return torch.view_as_real(pairs).flatten(1)
