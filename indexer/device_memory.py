"""How much memory a device has, to refuse in time what cannot fit.

A host may promise memory that it does not have and end the process once it is written to, so a failed
allocation alone is no safeguard.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux says how much memory a container may have (control groups 2 and 1)."""


def memory_bytes(device: torch.device) -> int:
    """Bytes of memory that a device has in all; for the host, no more than its container may have."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CONTAINER_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such control group, or "max": no limit
            continue
    return min(limits)
