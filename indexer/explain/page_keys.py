"""Page bytes as keys, in the right way and with each step open to be done wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kernel.backends.reference.formats import E2M1_MAGNITUDES, e4m3_bytes, e4m3_values
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUP_DIMS, GROUPS, HEAD_DIM, TOKEN_CODE_BYTES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
PageKeys = Callable[[Bytes], Floats]
"""Pages ``[n, 9216]`` to keys ``[n, 128, 128]`` (token, dim)."""

DIMS_TO_GROUPS = np.arange(HEAD_DIM) // GROUP_DIMS


def codes_of(pages: Bytes) -> Bytes:
    """``[n, 128, 128]``, one E2M1 code a byte."""
    return unpacked(pages[:, :CODE_BYTES].reshape(-1, BLOCK_TOKENS, TOKEN_CODE_BYTES))


def unpacked(packed: Bytes) -> Bytes:
    """Codes ``[..., 128]`` of bytes ``[..., 64]``, low nibble first."""
    codes = np.empty((*packed.shape[:-1], HEAD_DIM), dtype=np.uint8)
    codes[..., 0::2] = packed & 0x0F
    codes[..., 1::2] = packed >> 4
    return codes


def scales_of(pages: Bytes) -> Bytes:
    """``[n, 128, 8]`` scale bytes."""
    return pages[:, CODE_BYTES:].reshape(-1, BLOCK_TOKENS, GROUPS)


def keys_of(codes: Bytes, scales: Bytes, groups: NDArray[np.int64] = DIMS_TO_GROUPS) -> Floats:
    """Scored keys of codes ``[..., 128]`` and scales ``[..., 8]``; ``groups`` says whose scale a dim has."""
    place = np.left_shift(scales, 4, dtype=np.uint16)[..., groups] | codes
    return np.asarray(right_table().reshape(-1).take(place), dtype=np.float32)


def right_keys(pages: Bytes) -> Floats:
    """Keys by the contract."""
    return _keys_by_pairs(pages, _right_pairs())


def keys_by_table(table: Floats) -> PageKeys:
    """Keys by another table ``[256, 16]`` of scale byte and code."""
    pairs = _pairs(table)
    return lambda pages: _keys_by_pairs(pages, pairs)


def _keys_by_pairs(pages: Bytes, pairs: NDArray[np.uint64]) -> Floats:
    packed = pages[:, :CODE_BYTES].reshape(-1, BLOCK_TOKENS, GROUPS, GROUP_DIMS // 2)
    place = np.left_shift(scales_of(pages)[..., None], 8, dtype=np.uint16) | packed
    return pairs.take(place).view(np.float32).reshape(-1, BLOCK_TOKENS, HEAD_DIM)


def _pairs(table: Floats) -> NDArray[np.uint64]:
    """``[65536]``: the values of a byte of codes under a scale byte, the two in one: one look-up for two
    keys, and nothing is unpacked."""
    byte = np.arange(256)
    both = np.stack([table[:, byte & 0x0F], table[:, byte >> 4]], axis=2).astype(np.float32)
    return np.ascontiguousarray(both).view(np.uint64).reshape(-1)


@functools.cache
def _right_pairs() -> NDArray[np.uint64]:
    return _pairs(right_table())


def scale_values(scales: Bytes) -> NDArray[np.float64]:
    """Scales as they multiply: NaN as 0, the sign kept."""
    return np.nan_to_num(e4m3_values(scales), nan=0.0)


@functools.cache
def right_table() -> Floats:
    """``[256, 16]``: the scored value of a scale byte and a code."""
    magnitudes = np.abs(scale_values(np.arange(256, dtype=np.uint8)))[:, None] * E2M1_MAGNITUDES
    values = e4m3_values(e4m3_bytes(magnitudes))
    both = np.concatenate([values, -values], axis=1)
    return np.where(np.arange(256)[:, None] & 0x80, -both, both).astype(np.float32)
