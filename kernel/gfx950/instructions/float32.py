"""IEEE single-precision arithmetic of the vector ALU on whole registers: NaN, signed zero and rounding rules.

The mode is the one the metadata is checked for: round to nearest even, denormals kept, ``ieee_mode`` on, so
that a signalling NaN operand gives a quiet NaN. Which NaN payload comes out of an operation is not promised
by the ISA in all cases; here it is the first NaN operand, quieted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Lanes = Any
_QUIET = np.uint32(0x00400000)
_EXPONENT = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_ZERO = np.float32(0)


def _bits(value: Lanes) -> npt.NDArray[np.uint32]:
    return np.asarray(value, np.float32).view(np.uint32)


def _signalling(value: Lanes) -> npt.NDArray[np.bool_]:
    bits = _bits(value)
    found: npt.NDArray[np.bool_] = ((bits & _MAGNITUDE) > _EXPONENT) & ((bits & _QUIET) == 0)
    return found


def quiet(value: Lanes) -> Lanes:
    """Signalling NaNs made quiet, everything else as it is."""
    return np.where(_signalling(value), (_bits(value) | _QUIET).view(np.float32), value)


def _extreme(a: Lanes, b: Lanes, propagating: Any, ignoring: Any, merge: Any) -> Lanes:
    """maxNum and minNum of IEEE 754-2008: a quiet NaN loses, a signalling one wins; +0 is above -0."""
    result = propagating(a, b)
    equal = a == b
    if np.count_nonzero(equal):  # equal patterns merge to themselves, the two zeros to the right one
        result = np.where(equal, merge(_bits(a), _bits(b)).view(np.float32), result)
    if np.count_nonzero(np.isnan(result)):
        kept = np.where(np.isnan(a) & np.isnan(b), quiet(a), ignoring(a, b))
        kept = np.where(_signalling(b), quiet(b), kept)
        kept = np.where(_signalling(a), quiet(a), kept)
        result = np.where(np.isnan(result), kept, result)
    return result


def maximum(a: Lanes, b: Lanes) -> Lanes:
    return _extreme(a, b, np.maximum, np.fmax, np.bitwise_and)


def minimum(a: Lanes, b: Lanes) -> Lanes:
    return _extreme(a, b, np.minimum, np.fmin, np.bitwise_or)


def maximum3(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return maximum(maximum(a, b), c)


def minimum3(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return minimum(minimum(a, b), c)


def median3(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """The middle value; with a NaN among them the minimum of the others (ISA: V_MED3_F32)."""
    any_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    high = maximum(a, b)
    middle = maximum(minimum(a, b), minimum(high, c))
    return np.where(any_nan, minimum3(a, b, c), middle)


def fused_multiply_add(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a * b + c rounded once.

    The product is exact in double. The sum is rounded to odd there (Boldo and Melquiond, "Emulation of FMA
    and correctly rounded sums", 2008), after which rounding to single gives the correctly rounded result.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = np.array(total, np.float64).view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + toward, bits).view(np.float64).astype(np.float32)


def reciprocal(a: Lanes) -> Lanes:
    """Correctly rounded; the device's is within 1 ulp and may differ. Serves integer division."""
    return np.float32(1) / np.asarray(a, np.float32)


def to_unsigned(a: Lanes) -> npt.NDArray[np.uint32]:
    """Truncated and saturated; NaN gives 0."""
    wide = np.trunc(np.asarray(a, np.float64))
    return np.where(np.isnan(wide), 0, np.clip(wide, 0, 0xFFFFFFFF)).astype(np.uint32)


def to_signed(a: Lanes) -> npt.NDArray[np.int32]:
    """Truncated and saturated; NaN gives 0."""
    wide = np.trunc(np.asarray(a, np.float64))
    return np.where(np.isnan(wide), 0, np.clip(wide, -(1 << 31), (1 << 31) - 1)).astype(np.int32)


def clamp(value: Lanes) -> Lanes:
    """The clamp modifier: to [0, 1], and NaN to 0 (``dx10_clamp``, which is always on)."""
    return np.where(np.isnan(value), _ZERO, np.clip(value, _ZERO, np.float32(1)))
