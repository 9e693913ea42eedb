"""The page format: how 128 index keys lie in the 9,216 bytes of one block.

    bytes 0..8191      codes:  token t at t*64; byte i holds dim 2i (low nibble) and dim 2i+1 (high nibble)
    bytes 8192..9215   scales: token t, group g of 16 dims at 8192 + t*8 + g, one E4M3 byte

A cache is ``[num_pages, 9216]`` uint8 whose rows are contiguous and lie ``page_stride`` bytes apart
(9,216 or more, a multiple of 16). Serving engines also shape it ``[num_pages, 128, 72]``; that is only a
shape: row t of it is NOT the 72 bytes of token t.
"""

from __future__ import annotations

import torch

from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUPS, TOKEN_CODE_BYTES

PAGE_STRIDE_ALIGNMENT = 16
"""Bytes the distance between two pages is a multiple of."""


def blocks_of(tokens: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // BLOCK_TOKENS)


def codes_of(pages: torch.Tensor) -> torch.Tensor:
    """The codes of pages ``[..., 9216]`` as a view ``[..., 128, 64]`` uint8 (token, byte)."""
    return pages[..., :CODE_BYTES].view(*pages.shape[:-1], BLOCK_TOKENS, TOKEN_CODE_BYTES)


def scales_of(pages: torch.Tensor) -> torch.Tensor:
    """The scale bytes of pages ``[..., 9216]`` as a view ``[..., 128, 8]`` uint8 (token, group)."""
    return pages[..., CODE_BYTES:].view(*pages.shape[:-1], BLOCK_TOKENS, GROUPS)
