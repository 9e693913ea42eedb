"""The embedded default: blocked float32 torch on any CPU, bounded memory, all cores."""

from __future__ import annotations

from kernel.backends.base import Precision, ScaleChoice
from kernel.backends.cpu.backend import CpuBackend
from kernel.checks import check_precision
from kernel.errors import InvalidArgumentError

__all__ = ["CpuBackend", "create", "probe"]


def probe() -> tuple[bool, str]:
    """Whether this backend can run here, and why."""
    return True, "runs wherever torch does"


def create(device: str | None, precision: Precision, scale_choice: ScaleChoice = "six") -> CpuBackend:
    """Make the backend.

    Args:
        device: ``cpu`` or None.
        precision: either; float32 accumulation meets both bounds, and results are the same.
        scale_choice: of the keys that it inserts.

    Raises:
        InvalidArgumentError: any other device.
    """
    if device not in (None, "cpu"):
        raise InvalidArgumentError("device", repr(device), "must be 'cpu' for backend 'cpu'", "leave it out")
    check_precision(precision)
    return CpuBackend(precision, scale_choice)
