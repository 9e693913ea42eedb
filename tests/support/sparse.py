"""Gigabytes of which a test touches a few pages."""

from __future__ import annotations

import math
import mmap

import torch

MAP_NORESERVE = 0x4000
"""Linux: take no swap for it. Python's mmap names it from 3.13 on."""


def sparse_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """``[num_bytes]`` uint8 zeros: on the CPU only what is touched takes memory."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


def sparse_pages(num_pages: int, page_stride: int, device: torch.device) -> torch.Tensor:
    """``[num_pages, 9216]`` uint8 zeros, ``page_stride`` bytes apart; the cache ends with its last page."""
    storage = sparse_bytes((num_pages - 1) * page_stride + 9216, device)
    return storage.as_strided((num_pages, 9216), (page_stride, 1))


def sparse_scores(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """``[H, tokens, cells]`` fp32 zeros."""
    return sparse_bytes(4 * math.prod(shape), device).view(torch.float32).view(shape)
