"""``flydsl-sim``: the ``flydsl`` backend on the simulated gfx950; a CPU interprets every instruction."""

from __future__ import annotations

from kernel.backends.base import Backend, Precision
from kernel.checks import check_precision
from kernel.errors import DeviceUnavailableError, InvalidArgumentError


def probe() -> tuple[bool, str]:
    """Whether this backend can run here, and what it found or lacks; builds, loads and sets nothing."""
    from kernel.backends.flydsl import geometry, kernel_library, runtime, toolchain
    from kernel.gfx950.hip import simulated_device

    try:
        geometry.chosen_layout()
        library = kernel_library.chosen()
        if library is not None:
            kernel_library.check(library)
            source = f"kernel library {library}"
        else:
            source = toolchain.check()
            toolchain.check_cache()
            runtime.check()
        found = simulated_device().check()
    except DeviceUnavailableError as error:
        return False, str(error)
    return True, f"interprets the gfx950 kernels on the CPU, slowly: {source}, {found}"


def create(device: str | None, precision: Precision) -> Backend:
    """Make the backend.

    Args:
        device: ``cpu`` or None.
        precision: either; results are the same.

    Raises:
        InvalidArgumentError: any other device.
        DeviceUnavailableError: something is missing.
    """
    from kernel.backends.flydsl.backend import FlydslBackend
    from kernel.gfx950.hip import simulated_device

    check_precision(precision)
    if device not in (None, "cpu"):
        raise InvalidArgumentError(
            "device", repr(device), "must be 'cpu' for backend 'flydsl-sim'", "leave it out"
        )
    return FlydslBackend("flydsl-sim", simulated_device(), precision)
