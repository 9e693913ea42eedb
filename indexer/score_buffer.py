"""The score buffer of a call: the one tensor that grows with queries times context."""

from __future__ import annotations

import torch

from indexer.device_memory import memory_bytes
from kernel.errors import InvalidArgumentError


def allocate_scores(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """A buffer ``[H, total_q, S]`` float32, unwritten.

    Raises:
        InvalidArgumentError: it is larger than the device's memory, or than what is free of it.
    """
    size = 4 * shape[0] * shape[1] * shape[2]
    if size > memory_bytes(device):
        raise _too_large(shape, size, device)
    try:
        return torch.empty(shape, dtype=torch.float32, device=device)
    except (RuntimeError, MemoryError) as error:
        raise _too_large(shape, size, device) from error


def _too_large(shape: tuple[int, ...], size: int, device: torch.device) -> InvalidArgumentError:
    return InvalidArgumentError(
        "return_scores",
        True,
        f"scores {list(shape)} take {size} bytes, which {device} does not have",
        "pass return_scores=False to get block ids alone, or score fewer queries at a time",
    )
