"""The sign of a key: lost, inverted, or taken from the wrong bit."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis, by_keys
from indexer.explain.page_keys import Bytes, Floats, PageKeys, codes_of, keys_of, right_keys, scales_of

FAMILY = "sign"


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    found = [
        _reads(
            "keys lose their sign", "Bit 3 of a code is dropped: every key is taken as positive.", unsigned
        ),
        _reads("keys have the other sign", "The sign bit is inverted, or applied twice.", negated),
        _reads(
            "the sign is taken from bit 0",
            "A code is read as magnitude in its upper three bits and sign in the lowest.",
            low_sign,
        ),
    ]
    table = evidence.table[np.unique(evidence.request)]
    if (evidence.pages[np.unique(table[table >= 0]), 8192:] & 0x80).any():
        found.append(
            _reads(
                "the scale's sign is lost",
                "Bit 7 of a scale byte must flip the sign of its keys.",
                plain_scale,
            )
        )
    return found


def _reads(name: str, says: str, keys: PageKeys) -> Hypothesis:
    return Hypothesis(name, FAMILY, says, by_keys(keys))


def unsigned(pages: Bytes) -> Floats:
    """Magnitudes."""
    return np.abs(right_keys(pages))


def negated(pages: Bytes) -> Floats:
    """The other sign."""
    return -right_keys(pages)


def low_sign(pages: Bytes) -> Floats:
    """Magnitude in bits 1..3, sign in bit 0."""
    codes = codes_of(pages)
    return keys_of((codes >> 1 | (codes & 1) << 3).astype(np.uint8), scales_of(pages))


def plain_scale(pages: Bytes) -> Floats:
    """Scales without their sign."""
    return keys_of(codes_of(pages), (scales_of(pages) & 0x7F).astype(np.uint8))
