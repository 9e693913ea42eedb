"""How much memory a device has, to refuse in time what cannot fit.

A host may promise memory that it does not have and end the process once it is written to, so a failed
allocation alone is no safeguard.
"""

from __future__ import annotations

import os

import torch


def memory_bytes(device: torch.device) -> int:
    """Bytes of memory that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
