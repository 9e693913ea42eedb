"""What the oracle writes."""

from __future__ import annotations

import torch

from kernel.backends.reference import ReferenceBackend


def oracle_inserted(keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What host pages become when the oracle inserts keys: a copy ``[num_pages, 9216]``."""
    written = pages.clone(memory_format=torch.contiguous_format)
    ReferenceBackend().insert(keys, written, slots)
    return written
