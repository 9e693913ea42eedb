"""Raw page bytes by hand: no quantiser is involved, so a test knows every code and scale it scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CODES_END = 8192
PAGE = 9216
ONE = 0x38
"""E4M3 byte of 1.0."""
LARGEST = 0x7E
"""E4M3 byte of 448, the largest value."""
NAN = 0x7F
EVERY_BYTE = np.arange(256, dtype=np.uint8)
MODERATE_SCALES = np.concatenate([np.arange(0x28, 0x48), np.arange(0xA8, 0xC8)]).astype(np.uint8)
"""Scales of magnitude 2^-2 up to 3.75, every mantissa, both signs."""
ODD_SCALES = np.array([0x00, 0x80, 0x7F, 0xFF], dtype=np.uint8)
"""Zero and NaN scales: they all read as magnitude 0."""


def pack_page(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A page ``[9216]`` of codes ``[128, 128]`` (token, dim) and scale bytes ``[128, 8]`` (token, group)."""
    page = np.empty(PAGE, dtype=np.uint8)
    page[:CODES_END] = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1)
    page[CODES_END:] = scales.reshape(-1)
    return page


def random_page(random: np.random.Generator, scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A page of random codes whose scale bytes are drawn from ``scales``."""
    page = random.integers(0, 256, PAGE, dtype=np.uint8)
    page[CODES_END:] = random.choice(scales, PAGE - CODES_END)
    return page


def poison_tokens(page: NDArray[np.uint8], first_token: int, queries: NDArray[np.uint8]) -> None:
    """Fill a page from a token on with keys that would win: 448 with the signs of the queries, in turn.

    Args:
        page: ``[9216]``, written.
        first_token: 0 to 128.
        queries: ``[n, 128]`` E4M3 bytes; without any, all signs are plus.
    """
    for token in range(first_token, 128):
        signs = queries[token % len(queries)] >> 7 if len(queries) else np.zeros(128, dtype=np.uint8)
        codes = (signs << 3 | 7).astype(np.uint8)
        page[token * 64 : (token + 1) * 64] = codes[0::2] | codes[1::2] << 4
        page[CODES_END + token * 8 : CODES_END + (token + 1) * 8] = LARGEST
