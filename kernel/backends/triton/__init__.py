"""Triton kernels for NVIDIA and AMD GPUs."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import torch

from kernel.backends.base import Precision
from kernel.checks import check_precision
from kernel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kernel.backends.triton.backend import TritonBackend

__all__ = ["create", "probe"]

OLDEST_CAPABILITY = (8, 0)
"""Compute capability of the oldest NVIDIA GPU the kernels compile for."""


def probe() -> tuple[bool, str]:
    """Whether this backend can run here, and why."""
    if importlib.util.find_spec("triton") is None:
        return False, "the package triton is not installed"
    if interpreted():
        return True, "runs in Triton's interpreter (TRITON_INTERPRET=1), for tests"
    if not torch.cuda.is_available():
        return False, "torch sees no GPU"
    name = torch.cuda.get_device_name()
    if torch.version.hip is None and torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        return False, f"{name} is older than compute capability 8.0"
    return True, f"runs on {name}"


def create(device: str | None, precision: Precision) -> TritonBackend:
    """Make the backend.

    Args:
        device: ``cuda`` or ``cuda:N``; None: the current GPU.
        precision: ``exact``, or ``fast`` where the GPU multiplies E4M3 matrices.

    Raises:
        InvalidArgumentError: another device, or a precision that this GPU does not have.
    """
    from kernel.backends.triton.backend import TritonBackend

    wanted = torch.device("cpu" if interpreted() else "cuda") if device is None else torch.device(device)
    if wanted.type != ("cpu" if interpreted() else "cuda"):
        raise InvalidArgumentError(
            "device", repr(device), "must be a GPU for backend 'triton'", "leave it out or use 'cuda'"
        )
    if wanted.type == "cuda":
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        if index >= torch.cuda.device_count():
            raise InvalidArgumentError(
                "device", repr(device), f"torch sees {torch.cuda.device_count()} GPUs", "use one of them"
            )
        wanted = torch.device("cuda", index)
    check_precision(precision)
    backend = TritonBackend(wanted, precision)
    if precision == "fast" and not backend.tuning.fp8_dot:
        raise InvalidArgumentError(
            "precision", "'fast'", "this GPU has no E4M3 matrix product", "use 'exact'"
        )
    return backend


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
