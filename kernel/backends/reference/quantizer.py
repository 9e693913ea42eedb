"""Keys and queries to the bytes that are scored."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernel.backends.base import ScaleChoice
from kernel.backends.reference.formats import E2M1_MAGNITUDES, E4M3_MAX, E4M3_MIN, e4m3_bytes, e4m3_values
from kernel.contract import GROUP_DIMS

CODE_THRESHOLDS: NDArray[np.float64] = (E2M1_MAGNITUDES[:-1] + E2M1_MAGNITUDES[1:]) / 2
"""``.25, .75, 1.25, 1.75, 2.5, 3.5, 5``: a magnitude above the i-th, times the scale, is above code i."""


def quantize_query(queries: ArrayLike) -> NDArray[np.uint8]:
    """Queries (finite, any float type) to E4M3 bytes: saturating, nearest even, no scale."""
    return e4m3_bytes(queries)


def quantize_keys(
    keys: ArrayLike, choice: ScaleChoice = "six"
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Finite keys ``[n, dims]`` to NVFP4, a group of 16 dims at a time.

    Args:
        keys: the keys.
        choice: ``six``: the scale is amax/6. ``four_over_six``: amax/4 for a group whose largest error, as
            it is scored, is strictly smaller with it.

    Returns:
        Codes ``[n, dims]``, one E2M1 code a byte, and scale bytes ``[n, dims / 16]``.
    """
    keys = np.asarray(keys, dtype=np.float64)
    codes, scales = _quantize_groups(keys, 6)
    if choice == "six":
        return codes, scales
    other_codes, other_scales = _quantize_groups(keys, 4)
    better = _largest_errors(keys, other_codes, other_scales) < _largest_errors(keys, codes, scales)
    codes = np.where(np.repeat(better, GROUP_DIMS, axis=1), other_codes, codes)
    return codes, np.where(better, other_scales, scales)


def _quantize_groups(
    keys: NDArray[np.float64], largest_magnitude: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes and scale bytes if the largest value of a group is scaled to ``largest_magnitude``."""
    groups = keys.reshape(len(keys), keys.shape[1] // GROUP_DIMS, GROUP_DIMS)
    largest = np.abs(groups).max(axis=2)
    scale_bytes = e4m3_bytes(np.clip(largest / largest_magnitude, E4M3_MIN, E4M3_MAX))
    # A product of two short significands: exact, so that "strictly exceeds" is decided on true values.
    thresholds = e4m3_values(scale_bytes)[:, :, None] * CODE_THRESHOLDS
    exceeded = np.abs(groups)[:, :, :, None] > thresholds[:, :, None, :]
    codes = exceeded.sum(axis=3) + np.where(groups < 0, 8, 0)
    return codes.reshape(keys.shape).astype(np.uint8), scale_bytes


def _largest_errors(
    keys: NDArray[np.float64], codes: NDArray[np.uint8], scale_bytes: NDArray[np.uint8]
) -> NDArray[np.float64]:
    """``[n, dims / 16]`` largest error of a group's keys as they are scored."""
    errors = np.abs(dequantize_keys(codes, scale_bytes) - keys)
    largest: NDArray[np.float64] = errors.reshape(len(keys), -1, GROUP_DIMS).max(axis=2)
    return largest


def dequantize_keys(codes: NDArray[np.uint8], scale_bytes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What is scored: E4M3 values ``[n, dims]`` of codes ``[n, dims]`` and scale bytes ``[n, dims / 16]``."""
    scales = np.repeat(scale_bytes, GROUP_DIMS, axis=1)
    magnitudes = e4m3_values(magnitude_lut()[scales, codes & 7])
    negative = (codes >> 3) ^ (scales >> 7)
    return np.where(negative, -magnitudes, magnitudes)


@functools.cache
def magnitude_lut() -> NDArray[np.uint8]:
    """``[256, 8]``: for a scale byte, the E4M3 byte of each E2M1 magnitude times that scale.

    The scale's sign bit is left out (it goes to the key's sign) and a NaN scale gives 0.
    """
    scales = np.nan_to_num(e4m3_values(np.arange(256) & 0x7F), nan=0.0)
    return e4m3_bytes(scales[:, None] * E2M1_MAGNITUDES)
