"""The device that kernels are launched on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread for a while; nothing for the interpreter's CPU.

    Triton launches on the current device, on its current stream, wherever the arguments lie.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
