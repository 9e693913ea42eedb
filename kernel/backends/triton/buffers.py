"""Device buffers that a backend keeps between calls: they grow to what a call needs, up to fixed limits."""

from __future__ import annotations

import math

import torch

WORKSPACE_BLOCKS = 8192
"""Blocks of keys dequantised at a time: the longest context, 256 MiB as float16."""
_LARGE_DEVICE = 64 << 30
"""Bytes of memory of a GPU on which twice as many scores are kept."""


def score_groups(device: torch.device) -> int:
    """Groups of 16 scores kept for a selection: 256 MiB and 16 MiB of maxima, on a GPU of 64 GiB or more
    twice that. The rows of a selection are as many as fit, and a large GPU needs many to be busy."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= _LARGE_DEVICE
    return 1 << (23 if large else 22)


class Buffers:
    """Named buffers. A call's contents are dead when the next call begins; calls run one after another on
    one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storage: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous buffer, unwritten."""
        size = math.prod(shape) * dtype.itemsize
        storage = self._storage.get(name)
        if storage is None or storage.numel() < size:
            self._storage.pop(name, None)
            storage = torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)
            self._storage[name] = storage
        return storage[:size].view(dtype).view(shape)
