"""The product of code and scale: not rounded to E4M3, or not saturated at 448."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis, by_keys
from indexer.explain.page_keys import Bytes, Floats, PageKeys, codes_of, scale_values, scales_of
from kernel.backends.reference.formats import E2M1_MAGNITUDES, E4M3_MAX, e4m3_bytes, e4m3_values
from kernel.contract import GROUP_DIMS

FAMILY = "saturation and rounding"


def hypotheses(_evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    return [
        _reads(
            "keys are not saturated at 448",
            "A product of code and scale beyond 448 is kept; the scored key is at most 448.",
            unsaturated,
        ),
        _reads(
            "keys beyond 448 become NaN", "The cast to E4M3 overflows to NaN; it must saturate.", overflowing
        ),
        _reads("keys beyond 448 become 0", "Overflowing keys are dropped; they must saturate.", dropped),
        _reads(
            "keys are not rounded to E4M3",
            "Code times scale is used as it is, saturated or not; the scored key is an E4M3 value.",
            exact,
        ),
        _reads("keys are saturated, not rounded", "Code times scale is clamped to 448, unrounded.", clamped),
        _reads(
            "NaN scales are not zero",
            "Scale bytes 0x7F and 0xFF are read as 480; they count as magnitude 0.",
            nan_as_480,
        ),
    ]


def _reads(name: str, says: str, keys: PageKeys) -> Hypothesis:
    return Hypothesis(name, FAMILY, says, by_keys(keys))


def products(pages: Bytes) -> Floats:
    """Code times scale, exact in fp32, signs included."""
    magnitudes = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])
    scales = np.repeat(scale_values(scales_of(pages)), GROUP_DIMS, axis=2)
    return (magnitudes[codes_of(pages)] * scales).astype(np.float32)


def exact(pages: Bytes) -> Floats:
    """Neither rounded nor saturated."""
    return products(pages)


def clamped(pages: Bytes) -> Floats:
    """Saturated, not rounded."""
    return products(pages).clip(-E4M3_MAX, E4M3_MAX).astype(np.float32)


def unsaturated(pages: Bytes) -> Floats:
    """Rounded to E4M3's four significant bits above 448, too."""
    values = products(pages)
    fraction, exponent = np.frexp(values)
    beyond = np.ldexp(np.rint(fraction * 16) / 16, exponent)
    return np.where(np.abs(values) > E4M3_MAX, beyond, _rounded(values)).astype(np.float32)


def overflowing(pages: Bytes) -> Floats:
    """NaN beyond the last value that rounds to 448."""
    values = products(pages)
    return np.where(np.abs(values) > 464, np.float32(np.nan), _rounded(values))


def dropped(pages: Bytes) -> Floats:
    """0 beyond the last value that rounds to 448."""
    values = products(pages)
    return np.where(np.abs(values) > 464, np.float32(0), _rounded(values))


def nan_as_480(pages: Bytes) -> Floats:
    """The two NaN bytes as the magnitude that their bits would be."""
    magnitudes = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])
    scales = scales_of(pages)
    values = np.where(scales == 0x7F, 480.0, np.where(scales == 0xFF, -480.0, scale_values(scales)))
    return _rounded((magnitudes[codes_of(pages)] * np.repeat(values, GROUP_DIMS, axis=2)).astype(np.float32))


def _rounded(values: Floats) -> Floats:
    return e4m3_values(e4m3_bytes(values)).astype(np.float32)
