"""Gigabytes of which a test touches a few pages."""

from __future__ import annotations

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
