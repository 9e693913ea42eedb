"""The oracle: the contract in numpy and fp64, slow and obvious, sharing no numerics with any other backend.

Every E4M3 x E4M3 product is a multiple of 2^-18 below 2^18, so a sum of 128 of them fits the 53 bits of a
double: the oracle's dot products are exact, whatever the order numpy adds in. Its score is that exact value
rounded once to float32.
"""

from __future__ import annotations

from kernel.backends.base import Precision, ScaleChoice
from kernel.backends.reference.backend import ReferenceBackend
from kernel.errors import InvalidArgumentError

__all__ = ["ReferenceBackend", "create", "probe"]


def probe() -> tuple[bool, str]:
    """Whether it can run here (always), and why."""
    return True, "numpy on any CPU"


def create(device: str | None, precision: Precision, scale_choice: ScaleChoice = "six") -> ReferenceBackend:
    """Make the oracle.

    Raises:
        InvalidArgumentError: a device other than the CPU, or a precision other than ``exact``.
    """
    if device not in (None, "cpu"):
        raise InvalidArgumentError("device", repr(device), "must be 'cpu'", "the reference backend is numpy")
    if precision != "exact":
        raise InvalidArgumentError(
            "precision", repr(precision), "must be 'exact'", "the reference backend has no faster arithmetic"
        )
    return ReferenceBackend(scale_choice)
