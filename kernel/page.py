"""The page format: how 128 index keys lie in the 9,216 bytes of one block.

    bytes 0..8191      codes:  token t at t*64; byte i holds dim 2i (low nibble) and dim 2i+1 (high nibble)
    bytes 8192..9215   scales: token t, group g of 16 dims at 8192 + t*8 + g, one E4M3 byte

A cache is ``[num_pages, 9216]`` uint8 whose rows are contiguous and lie ``page_stride`` bytes apart
(9,216 or more, a multiple of 16). Serving engines also shape it ``[num_pages, 128, 72]``; that is only a
shape: row t of it is NOT the 72 bytes of token t.
"""

from __future__ import annotations

import torch

from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUPS, PAGE_BYTES, TOKEN_CODE_BYTES
from kernel.errors import InvalidArgumentError

PAGE_STRIDE_ALIGNMENT = 16
"""Bytes the distance between two pages is a multiple of."""


def blocks_of(tokens: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // BLOCK_TOKENS)


def as_pages(pages: torch.Tensor) -> torch.Tensor:
    """View a cache as ``[num_pages, 9216]`` uint8 without copying, keeping its page stride.

    Args:
        pages: uint8, ``[num_pages, 9216]`` or any ``[num_pages, ...]`` of 9,216 contiguous bytes a page
            (``[num_pages, 128, 72]`` as engines shape it). ``stride(0)`` may exceed 9,216.

    Raises:
        InvalidArgumentError: wrong dtype, shape, stride or alignment.
    """
    if not isinstance(pages, torch.Tensor):
        raise InvalidArgumentError(
            "pages", type(pages).__name__, "must be a torch.Tensor", "call torch.as_tensor() on it"
        )
    if pages.dtype != torch.uint8:
        raise InvalidArgumentError(
            "pages.dtype", pages.dtype, "must be torch.uint8", "pass pages.view(torch.uint8)"
        )
    if pages.dim() < 2 or pages.shape[1:].numel() != PAGE_BYTES:
        raise InvalidArgumentError(
            "pages.shape", tuple(pages.shape), f"must be [num_pages, {PAGE_BYTES}]", "pass one page a row"
        )
    if (
        pages.dim() == 2
        and pages.shape[0] > 1
        and pages.stride(1) == 1
        and pages.stride(0) >= PAGE_BYTES
        and not (pages.stride(0) | pages.data_ptr()) % PAGE_STRIDE_ALIGNMENT
    ):
        return pages  # as most calls pass them
    expected = 1
    for size, stride in zip(reversed(pages.shape[1:]), reversed(pages.stride()[1:])):
        if size != 1 and stride != expected:
            raise InvalidArgumentError(
                "pages.stride()",
                pages.stride(),
                "the bytes of a page must be contiguous",
                "only stride(0) is free",
            )
        expected *= size
    num_pages = pages.shape[0]
    stride = pages.stride(0) if num_pages > 1 else max(pages.stride(0), PAGE_BYTES)
    if stride < PAGE_BYTES or stride % PAGE_STRIDE_ALIGNMENT:
        raise InvalidArgumentError(
            "pages.stride(0)",
            stride,
            f"must be at least {PAGE_BYTES} and a multiple of {PAGE_STRIDE_ALIGNMENT}",
            "pad each page",
        )
    if pages.data_ptr() % PAGE_STRIDE_ALIGNMENT:
        raise InvalidArgumentError(
            "pages.data_ptr()",
            pages.data_ptr(),
            f"must be a multiple of {PAGE_STRIDE_ALIGNMENT}",
            "start the view at an aligned byte",
        )
    return pages.as_strided((num_pages, PAGE_BYTES), (stride, 1))


def codes_of(pages: torch.Tensor) -> torch.Tensor:
    """The codes of pages ``[..., 9216]`` as a view ``[..., 128, 64]`` uint8 (token, byte)."""
    return pages[..., :CODE_BYTES].view(*pages.shape[:-1], BLOCK_TOKENS, TOKEN_CODE_BYTES)


def scales_of(pages: torch.Tensor) -> torch.Tensor:
    """The scale bytes of pages ``[..., 9216]`` as a view ``[..., 128, 8]`` uint8 (token, group)."""
    return pages[..., CODE_BYTES:].view(*pages.shape[:-1], BLOCK_TOKENS, GROUPS)
