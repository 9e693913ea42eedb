"""E2M1 and E4M3 from their definitions: a sign, an exponent with a bias, a mantissa."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

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

_E4M3_MIDPOINTS = (E4M3_MAGNITUDES[:-1] + E4M3_MAGNITUDES[1:]) / 2
"""What lies halfway between neighbours: exact in fp64."""


def e4m3_values(octets: ArrayLike) -> NDArray[np.float64]:
    """The values of E4M3 bytes (uint8, any shape); 0x7F and 0xFF are NaN."""
    octets = np.asarray(octets, dtype=np.uint8)
    magnitudes = np.append(E4M3_MAGNITUDES, np.nan)[octets & 0x7F]
    values: NDArray[np.float64] = np.where(octets & 0x80, -magnitudes, magnitudes)
    return values


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
