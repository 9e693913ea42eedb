"""The gfx950 backend: kernels in FlyDSL on an MI350X or MI355X under ROCm (``flydsl``), or on the simulated
gfx950, where a CPU interprets every instruction (``flydsl-sim``).

Nothing here imports FlyDSL or needs a GPU until a backend is made.
"""

from __future__ import annotations

import torch

from kernel.backends.base import Backend, Precision
from kernel.backends.flydsl import runtime
from kernel.backends.flydsl.runtime import RocmDevice
from kernel.checks import check_precision
from kernel.errors import DeviceUnavailableError, InvalidArgumentError

__all__ = ["create", "create_simulated", "probe", "probe_simulated"]


def probe() -> tuple[bool, str]:
    """Whether ``flydsl`` can run here, and why or why not."""
    return _probe(simulated=False)


def probe_simulated() -> tuple[bool, str]:
    """Whether ``flydsl-sim`` can run here, and what it found or lacks; builds, loads and sets nothing."""
    return _probe(simulated=True)


def _probe(*, simulated: bool) -> tuple[bool, str]:
    from kernel.backends.flydsl import geometry, kernel_library, toolchain

    try:
        geometry.chosen_layout()
        device = None if simulated else RocmDevice(torch.device("cuda"))
        library = kernel_library.chosen()
        if library is None:
            source = toolchain.check()
            toolchain.check_cache()
            runtime.check()
            if device is not None:
                runtime.preflight(device)
        else:
            source = f"kernel library {library}"
            if device is None:
                kernel_library.check(library)
            else:
                kernel_library.load(library, device)
        if device is None:
            from kernel.gfx950.hip import simulated_device

            found = simulated_device().check()
            return True, f"interprets the gfx950 kernels on the CPU, slowly: {source}, {found}"
    except DeviceUnavailableError as error:
        return False, str(error)
    return True, f"{device.torch_device} is a gfx950 with {device.compute_units} compute units"


def create(device: str | None, precision: Precision) -> Backend:
    """Make ``flydsl``.

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


def create_simulated(device: str | None, precision: Precision) -> Backend:
    """Make ``flydsl-sim``: as :func:`create`, with the same results; ``device`` is ``cpu`` or None."""
    from kernel.backends.flydsl.backend import FlydslBackend
    from kernel.gfx950.hip import simulated_device

    check_precision(precision)
    if device not in (None, "cpu"):
        raise InvalidArgumentError(
            "device", repr(device), "must be 'cpu' for backend 'flydsl-sim'", "leave it out"
        )
    return FlydslBackend("flydsl-sim", simulated_device(), precision)
