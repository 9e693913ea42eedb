"""Tensors of an engine as host arrays of their own."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import torch

from indexer.case.container import Array

GATHER_BYTES = 64 << 20
"""Memory of the engine's device that a capture takes for pages, at most."""
# numpy knows these types only through ml_dtypes, torch knows nothing of that: they cross as integers.
_CROSSING = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
}


def host_array(tensor: torch.Tensor) -> Array:
    """A copy on the host, contiguous, that the engine cannot write to. Waits for that copy and no other."""
    tensor = tensor.detach().contiguous()
    copy = tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
    crossing = _CROSSING.get(copy.dtype)
    if crossing is None:
        return copy.numpy()
    return copy.view(crossing[0]).numpy().view(crossing[1])


def gather_pages(pages: torch.Tensor, ids: Array) -> torch.Tensor:
    """Pages ``[len(ids), ...]`` on the host: a copy, so the engine may go on writing.

    Args:
        pages: ``[num_pages, ...]`` with any strides, on any device.
        ids: int64, each below ``num_pages``.
    """
    found = torch.empty((len(ids), *pages.shape[1:]), dtype=pages.dtype, device="cpu")
    # A GPU that serves has little memory left: only so much of it is taken at a time.
    step = max(1, GATHER_BYTES // max(1, math.prod(pages.shape[1:]) * pages.element_size()))
    for first in range(0, len(ids), step):
        places = torch.from_numpy(ids[first : first + step]).to(pages.device)
        found[first : first + step] = pages.detach().index_select(0, places)
    return found
