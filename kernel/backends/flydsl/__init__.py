"""The gfx950 backend: kernels in FlyDSL on an MI350X or MI355X under ROCm.

Nothing here imports FlyDSL or needs a GPU until :func:`create` does.
"""

from __future__ import annotations

import torch

from kernel.backends.base import Backend, Precision
from kernel.backends.flydsl.runtime import RocmDevice, preflight
from kernel.checks import check_precision
from kernel.errors import DeviceUnavailableError, InvalidArgumentError

__all__ = ["create", "probe"]


def probe() -> tuple[bool, str]:
    """Whether this backend can run here, and why or why not."""
    from kernel.backends.flydsl import geometry, kernel_library, toolchain

    try:
        geometry.chosen_layout()
        device = RocmDevice(torch.device("cuda"))
        library = kernel_library.chosen()
        if library is not None:
            kernel_library.load(library, device)
        else:
            toolchain.check()
            toolchain.check_cache()
            preflight(device)
    except DeviceUnavailableError as error:
        return False, str(error)
    return True, f"{device.torch_device} is a gfx950 with {device.compute_units} compute units"


def create(device: str | None, precision: Precision) -> Backend:
    """Make the backend.

    Args:
        device: ``cuda`` or ``cuda:n``; PyTorch's current GPU when None.
        precision: either; the accumulation is fp32 and meets both bounds.

    Raises:
        InvalidArgumentError: any other device.
        DeviceUnavailableError: something is missing.
    """
    from kernel.backends.flydsl.backend import FlydslBackend

    check_precision(precision)
    if device is not None and device.split(":")[0] != "cuda":
        raise InvalidArgumentError(
            "device", repr(device), "must be 'cuda' or 'cuda:n' for backend 'flydsl'", "leave it out"
        )
    return FlydslBackend("flydsl", RocmDevice(torch.device(device or "cuda")), precision)
