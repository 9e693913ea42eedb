"""The product of code and scale: not rounded to E4M3, or not saturated at 448."""

from __future__ import annotations

import functools

import numpy as np

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis, by_keys
from indexer.explain.page_keys import Floats, keys_by_table, scale_values
from kernel.backends.reference.formats import E2M1_MAGNITUDES, E4M3_MAX, e4m3_bytes, e4m3_values

FAMILY = "saturation and rounding"
LAST_FINITE = 464
"""Largest product that rounds to 448."""


def hypotheses(_evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    return [
        _reads(
            "keys are not saturated at 448",
            "A product of code and scale beyond 448 is kept; the scored key is at most 448.",
            unsaturated(),
        ),
        _reads(
            "keys beyond 448 are kept as they are",
            "A product of code and scale beyond 448 is neither saturated nor rounded; others are rounded.",
            kept_beyond(),
        ),
        _reads(
            "keys beyond 448 become NaN",
            "The cast to E4M3 overflows to NaN; it must saturate.",
            overflowing(),
        ),
        _reads("keys beyond 448 become 0", "Overflowing keys are dropped; they must saturate.", dropped()),
        _reads(
            "keys are not rounded to E4M3",
            "Code times scale is used as it is, saturated or not; the scored key is an E4M3 value.",
            exact(),
        ),
        _reads(
            "keys are saturated, not rounded", "Code times scale is clamped to 448, unrounded.", clamped()
        ),
        _reads(
            "NaN scales are not zero",
            "Scale bytes 0x7F and 0xFF are read as 480; they count as magnitude 0.",
            nan_as_480(),
        ),
    ]


def _reads(name: str, says: str, table: Floats) -> Hypothesis:
    return Hypothesis(name, FAMILY, says, by_keys(keys_by_table(table)))


@functools.cache
def exact() -> Floats:
    """Neither rounded nor saturated: code times scale, exact in fp32, signs included, ``[256, 16]``."""
    magnitudes = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])
    products = scale_values(np.arange(256, dtype=np.uint8))[:, None] * magnitudes
    return np.asarray(products, dtype=np.float32)


def clamped() -> Floats:
    """Saturated, not rounded."""
    return np.asarray(exact().clip(-E4M3_MAX, E4M3_MAX), dtype=np.float32)


def unsaturated() -> Floats:
    """Rounded to E4M3's four significant bits above 448, too."""
    fraction, exponent = np.frexp(exact())
    beyond = np.ldexp(np.rint(fraction * 16) / 16, exponent)
    return np.where(np.abs(exact()) > E4M3_MAX, beyond, _rounded(exact())).astype(np.float32)


def kept_beyond() -> Floats:
    """Exact above 448."""
    return np.where(np.abs(exact()) > E4M3_MAX, exact(), _rounded(exact()))


def overflowing() -> Floats:
    """NaN beyond the last value that rounds to 448."""
    return np.where(np.abs(exact()) > LAST_FINITE, np.float32(np.nan), _rounded(exact()))


def dropped() -> Floats:
    """0 beyond the last value that rounds to 448."""
    return np.where(np.abs(exact()) > LAST_FINITE, np.float32(0), _rounded(exact()))


def nan_as_480() -> Floats:
    """The two NaN bytes as the magnitude that their bits would be."""
    magnitudes = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES]).astype(np.float32)
    table = _rounded(exact())
    table[0x7F], table[0xFF] = _rounded(480 * magnitudes), _rounded(-480 * magnitudes)
    return table


def _rounded(values: Floats) -> Floats:
    return e4m3_values(e4m3_bytes(values)).astype(np.float32)
