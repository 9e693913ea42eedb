"""Tensors of an engine as host arrays of their own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from indexer.case.container import Array

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


def host_int32(tensor: torch.Tensor) -> Array:
    """The same of integers, as int32."""
    return host_array(tensor.to(torch.int32))
