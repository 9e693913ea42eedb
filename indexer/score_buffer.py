"""The score buffer of a call: the one tensor that grows with queries times context."""

from __future__ import annotations

import os

import torch

from kernel.batch import ScoreBatch
from kernel.errors import InvalidArgumentError


def allocate_scores(batch: ScoreBatch) -> torch.Tensor:
    """A buffer ``[H, total_q, S]`` float32 of the least ``S``, unwritten.

    Raises:
        InvalidArgumentError: it is larger than the device's memory, or than what is free of it.
    """
    shape = (batch.num_heads, batch.total_q, batch.num_score_blocks)
    size = 4 * shape[0] * shape[1] * shape[2]
    device = batch.pages.device
    # A host may promise memory that it does not have and then end the process, so ask before allocating.
    if size > memory_bytes(device):
        raise _too_large(shape, size, device)
    try:
        return torch.empty(shape, dtype=torch.float32, device=device)
    except RuntimeError as error:
        raise _too_large(shape, size, device) from error


def memory_bytes(device: torch.device) -> int:
    """Bytes of memory that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _too_large(shape: tuple[int, ...], size: int, device: torch.device) -> InvalidArgumentError:
    return InvalidArgumentError(
        "return_scores",
        True,
        f"scores {list(shape)} take {size} bytes, which {device} does not have",
        "pass return_scores=False to get block ids alone, or score fewer queries at a time",
    )
