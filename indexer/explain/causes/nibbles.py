"""Codes of a byte in the wrong order."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis, by_keys
from indexer.explain.page_keys import Bytes, Floats, codes_of, keys_of, scales_of

FAMILY = "nibble order"


def hypotheses(_evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    return [
        Hypothesis(
            "nibbles are swapped",
            FAMILY,
            "Dim 2i is taken from the high nibble of byte i; it is in the low one.",
            by_keys(swapped),
        ),
        Hypothesis(
            "nibbles are planar",
            FAMILY,
            "Low nibbles are taken for dims 0..63 and high ones for 64..127; they alternate.",
            by_keys(planar),
        ),
        Hypothesis(
            "nibbles are planar in each group",
            FAMILY,
            "Low nibbles are taken for a group's first 8 dims and high ones for its last; they alternate.",
            by_keys(planar_in_groups),
        ),
    ]


def swapped(pages: Bytes) -> Floats:
    """High nibble first."""
    codes = codes_of(pages)
    return keys_of(codes.reshape(*codes.shape[:2], 64, 2)[..., ::-1].reshape(codes.shape), scales_of(pages))


def planar(pages: Bytes) -> Floats:
    """All low nibbles, then all high ones."""
    codes = codes_of(pages)
    return keys_of(np.concatenate([codes[..., 0::2], codes[..., 1::2]], axis=-1), scales_of(pages))


def planar_in_groups(pages: Bytes) -> Floats:
    """The low nibbles of a group's 8 bytes, then the high ones."""
    codes = codes_of(pages)
    groups = codes.reshape(*codes.shape[:2], 8, 8, 2).swapaxes(-1, -2)
    return keys_of(groups.reshape(codes.shape), scales_of(pages))
