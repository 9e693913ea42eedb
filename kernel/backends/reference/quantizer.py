"""Keys and queries to the bytes that are scored."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernel.backends.base import ScaleChoice
from kernel.contract import CODE_BYTES, GROUP_DIMS, GROUPS, HEAD_DIM, TOKEN_CODE_BYTES

# ---- E2M1 and E4M3 from their definitions: sign, biased exponent, mantissa ----

E4M3_MAX = 448.0
"""Largest finite E4M3 value (byte 0x7E)."""
E4M3_MIN = 2.0**-9
"""Smallest positive E4M3 value (byte 0x01, subnormal)."""


def minifloat(magnitude_bits: int, mantissa_bits: int, bias: int) -> float:
    """The value of an unsigned small float: subnormal when its exponent field is 0."""
    exponent = magnitude_bits >> mantissa_bits
    fraction = (magnitude_bits & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return float(fraction * 2.0 ** (1 - bias))
    return float((1 + fraction) * 2.0 ** (exponent - bias))


E2M1_MAGNITUDES: NDArray[np.float64] = np.array([minifloat(bits, 1, 1) for bits in range(8)])
"""Magnitude of each of the 8 low codes: 0, .5, 1, 1.5, 2, 3, 4, 6."""

E4M3_MAGNITUDES: NDArray[np.float64] = np.array([minifloat(bits, 3, 7) for bits in range(0x7F)])
"""Magnitude of the bytes 0x00..0x7E, ascending; 0x7F is NaN."""

_E4M3_VALUES = np.concatenate([[*E4M3_MAGNITUDES, np.nan], [*-E4M3_MAGNITUDES, -np.nan]])
"""Of every byte."""

_E4M3_MIDPOINTS = (E4M3_MAGNITUDES[:-1] + E4M3_MAGNITUDES[1:]) / 2
"""What lies halfway between neighbours: exact in fp64."""


def e4m3_values(octets: ArrayLike) -> NDArray[np.float64]:
    """The values of E4M3 bytes (uint8, any shape); 0x7F and 0xFF are NaN."""
    return np.asarray(_E4M3_VALUES.take(np.asarray(octets, dtype=np.uint8)), dtype=np.float64)


def e4m3_bytes(values: ArrayLike) -> NDArray[np.uint8]:
    """Round finite or infinite values to E4M3 bytes: to nearest, ties to the even byte, saturating at 448.

    A negative value, -0.0 included, keeps its sign bit.
    """
    values = np.asarray(values, dtype=np.float64)
    magnitudes = np.abs(values)
    below = np.searchsorted(E4M3_MAGNITUDES, magnitudes, side="right") - 1
    has_above = below < len(_E4M3_MIDPOINTS)
    midpoint = _E4M3_MIDPOINTS[np.where(has_above, below, 0)]
    round_up = (magnitudes > midpoint) | ((magnitudes == midpoint) & (below % 2 == 1))
    nearest = below + (has_above & round_up)
    octets: NDArray[np.uint8] = (nearest | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)
    return octets


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
    pairs = np.repeat(scale_bytes.astype(np.uint16) << 4, GROUP_DIMS, axis=1) | codes
    return _key_values().take(pairs)


@functools.cache
def _key_values() -> NDArray[np.float64]:
    """``[4096]``: what is scored for each scale byte, and each code under it."""
    scales, codes = np.divmod(np.arange(4096, dtype=np.uint16), 16)
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


# ---- Keys in and out of a page, byte by byte ----


def write_token(
    page: NDArray[np.uint8], token: int, codes: NDArray[np.uint8], scale_bytes: NDArray[np.uint8]
) -> None:
    """Write one key, codes ``[128]`` and scale bytes ``[8]``, into a page ``[9216]``."""
    first_code = token * TOKEN_CODE_BYTES
    first_scale = CODE_BYTES + token * GROUPS
    page[first_code : first_code + TOKEN_CODE_BYTES] = codes[0::2] | (codes[1::2] << 4)
    page[first_scale : first_scale + GROUPS] = scale_bytes


def read_tokens(page: NDArray[np.uint8], tokens: int) -> NDArray[np.float64]:
    """The first ``tokens`` keys of a page ``[9216]`` as they are scored: ``[tokens, 128]`` E4M3 values."""
    packed = page[: tokens * TOKEN_CODE_BYTES].reshape(tokens, TOKEN_CODE_BYTES)
    codes = np.empty((tokens, HEAD_DIM), dtype=np.uint8)
    codes[:, 0::2] = packed & 0x0F
    codes[:, 1::2] = packed >> 4
    scale_bytes = page[CODE_BYTES : CODE_BYTES + tokens * GROUPS].reshape(tokens, GROUPS)
    return dequantize_keys(codes, scale_bytes)
