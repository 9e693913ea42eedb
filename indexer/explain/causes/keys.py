"""Faults in how a page's bytes are read as keys: nibbles, scales, signs, and the cast to E4M3."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from indexer.explain.evidence import (
    DIMS_TO_GROUPS,
    Evidence,
    PageKeys,
    Prediction,
    Steps,
    by_keys,
    by_steps,
    codes_of,
    keys_by_table,
    keys_of,
    right_keys,
    scale_values,
    scales_of,
    unpacked,
)
from indexer.explain.match import Family
from indexer.explain.verdict import Bytes, Floats, Ints
from kernel.backends.reference.quantizer import E2M1_MAGNITUDES, E4M3_MAX, e4m3_bytes, e4m3_values
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUPS, HEAD_DIM, SCALE_BYTES, TOKEN_CODE_BYTES

# ---- Codes of a byte in the wrong order ----

NIBBLES = Family("nibble order", by_keys)


@NIBBLES.cause("nibbles are swapped", "Dim 2i is taken from the high nibble of byte i; it is in the low one.")
def swapped(pages: Bytes) -> Floats:
    """High nibble first."""
    codes = codes_of(pages)
    return keys_of(codes.reshape(*codes.shape[:2], 64, 2)[..., ::-1].reshape(codes.shape), scales_of(pages))


@NIBBLES.cause(
    "nibbles are planar",
    "Low nibbles are taken for dims 0..63 and high ones for 64..127; they alternate.",
)
def planar(pages: Bytes) -> Floats:
    """All low nibbles, then all high ones."""
    codes = codes_of(pages)
    return keys_of(np.concatenate([codes[..., 0::2], codes[..., 1::2]], axis=-1), scales_of(pages))


@NIBBLES.cause(
    "nibbles are planar in each group",
    "Low nibbles are taken for a group's first 8 dims and high ones for its last; they alternate.",
)
def planar_in_groups(pages: Bytes) -> Floats:
    """The low nibbles of a group's 8 bytes, then the high ones."""
    codes = codes_of(pages)
    groups = codes.reshape(*codes.shape[:2], 8, 8, 2).swapaxes(-1, -2)
    return keys_of(groups.reshape(codes.shape), scales_of(pages))


# ---- Scale bytes read from the wrong place of the page ----

SCALE_ORDER = Family("scale order", by_keys)
_TOKEN, _GROUP = np.arange(BLOCK_TOKENS)[:, None], np.arange(GROUPS)
_IN_TILES = _GROUP // 4 * 512 + _TOKEN % 32 * 16 + _TOKEN // 32 * 4 + _GROUP % 4
"""Where tiles of 128 rows by 4 columns have the scale of a token and group, ``[128, 8]``: byte
``row % 32 * 16 + row // 32 * 4 + column`` of a tile, as cuBLAS lays out block scales."""


@SCALE_ORDER.cause(
    "scales are read interleaved with codes",
    "Token t is read from the 72 bytes at t*72; its codes are at t*64, its scales at 8192 + t*8.",
)
def interleaved(pages: Bytes) -> Floats:
    """Rows of 64 code bytes and 8 scale bytes."""
    rows = pages.reshape(-1, BLOCK_TOKENS, TOKEN_CODE_BYTES + GROUPS)
    return keys_of(unpacked(rows[..., :TOKEN_CODE_BYTES]), rows[..., TOKEN_CODE_BYTES:])


@SCALE_ORDER.cause(
    "scales are read group-major",
    "The scale of token t, group g is read at 8192 + g*128 + t; it is at 8192 + t*8 + g.",
)
def group_major(pages: Bytes) -> Floats:
    """Scales ``[8, 128]``."""
    scales = pages[:, CODE_BYTES:].reshape(-1, GROUPS, BLOCK_TOKENS).swapaxes(1, 2)
    return keys_of(codes_of(pages), scales)


@SCALE_ORDER.cause(
    "scales are read swizzled",
    "Scales are read in the 128x4 tiles that matrix units take; a page holds them in rows.",
)
def swizzled(pages: Bytes) -> Floats:
    """Scales in tiles."""
    return keys_of(codes_of(pages), pages[:, CODE_BYTES:][:, _IN_TILES])


@SCALE_ORDER.cause(
    "swizzled scales are read by token",
    "Scales are laid out in the 128x4 tiles that matrix units take, and byte t*8 + g is read for token t, "
    "group g.",
)
def swizzled_by_token(pages: Bytes) -> Floats:
    """The rows of a page, laid out in tiles, and read as rows."""
    scales = scales_of(pages)
    tiles = np.empty_like(scales).reshape(-1, SCALE_BYTES)
    tiles[:, _IN_TILES] = scales
    return keys_of(codes_of(pages), tiles.reshape(scales.shape))


@SCALE_ORDER.cause(
    "scales are read before the codes",
    "The page is read as 1,024 scale bytes and then codes; codes come first.",
)
def scales_first(pages: Bytes) -> Floats:
    """Scales at byte 0, codes after them."""
    codes = unpacked(pages[:, SCALE_BYTES:].reshape(-1, BLOCK_TOKENS, TOKEN_CODE_BYTES))
    return keys_of(codes, pages[:, :SCALE_BYTES].reshape(scales_of(pages).shape))


# ---- The scale of another group of dims, or of another token ----


def grouped(groups: Ints) -> PageKeys:
    """Keys with another map of dims ``[128]`` to scales."""
    return lambda pages: keys_of(codes_of(pages), scales_of(pages), groups)


def of_another_token(shift: int) -> PageKeys:
    """Keys with the scales of the token ``shift`` places before, in a circle."""
    return lambda pages: keys_of(codes_of(pages), np.roll(scales_of(pages), shift % BLOCK_TOKENS, axis=1))


SCALE_GROUP = Family("scale group", by_keys)
_DIMS = np.arange(HEAD_DIM)
GROUPINGS: tuple[tuple[str, str, Ints], ...] = (
    (
        "each group has the next group's scale",
        "The group index is one too high.",
        (DIMS_TO_GROUPS + 1) % GROUPS,
    ),
    ("each group has the group's before", "The group index is one too low.", (DIMS_TO_GROUPS - 1) % GROUPS),
    ("groups are in reverse", "Scale 0 is applied to the last 16 dims.", GROUPS - 1 - DIMS_TO_GROUPS),
    (
        "pairs of groups are exchanged",
        "Scales are read in 16-bit halves of the other byte order.",
        DIMS_TO_GROUPS ^ 1,
    ),
    ("halves of groups are exchanged", "Dims 0..63 are scaled with scales 4..7.", DIMS_TO_GROUPS ^ 4),
    (
        "groups have 32 dims",
        "Four scales are used, as MXFP4 has them; NVFP4 has one for 16 dims.",
        _DIMS // 32,
    ),
    ("groups have 8 dims", "Eight scales are spent on the first 64 dims.", _DIMS // 8 % GROUPS),
    ("groups are strided", "Dim i has scale i mod 8; it has scale i // 16.", _DIMS % GROUPS),
    ("one scale a token", "Scale 0 is applied to all dims.", _DIMS * 0),
)
"""Name, advice, and the scale ``[128]`` that each dim is multiplied by."""
for _name, _says, _groups in GROUPINGS:
    SCALE_GROUP.add(_name, _says, grouped(_groups))
for _name, _shift in (("next", -1), ("previous", 1)):
    SCALE_GROUP.add(
        f"each token has the {_name} token's scales",
        "Codes and scales are of two different tokens.",
        of_another_token(_shift),
    )


# ---- The sign of a key: lost, inverted, or taken from the wrong bit ----

SIGN = Family("sign", by_keys)


@SIGN.cause("keys lose their sign", "Bit 3 of a code is dropped: every key is taken as positive.")
def unsigned(pages: Bytes) -> Floats:
    """Magnitudes."""
    return np.abs(right_keys(pages))


@SIGN.cause("keys have the other sign", "The sign bit is inverted, or applied twice.")
def negated(pages: Bytes) -> Floats:
    """The other sign."""
    return -right_keys(pages)


@SIGN.cause(
    "the sign is taken from bit 0",
    "A code is read as magnitude in its upper three bits and sign in the lowest.",
)
def low_sign(pages: Bytes) -> Floats:
    """Magnitude in bits 1..3, sign in bit 0."""
    codes = codes_of(pages)
    return keys_of((codes >> 1 | (codes & 1) << 3).astype(np.uint8), scales_of(pages))


def _has_signed_scales(evidence: Evidence) -> bool:
    table = evidence.table[np.unique(evidence.request)]
    return bool((evidence.pages[np.unique(table[table >= 0]), CODE_BYTES:] & 0x80).any())


@SIGN.cause(
    "the scale's sign is lost", "Bit 7 of a scale byte must flip the sign of its keys.", _has_signed_scales
)
def plain_scale(pages: Bytes) -> Floats:
    """Scales without their sign."""
    return keys_of(codes_of(pages), (scales_of(pages) & 0x7F).astype(np.uint8))


# ---- The product of code and scale: not rounded to E4M3, or not saturated at 448 ----


def _by_table(table: Callable[[], Floats]) -> Callable[[Evidence], Prediction]:
    """Predicts from another table ``[256, 16]`` of scored values by scale byte and code."""
    keys = functools.cache(lambda: keys_by_table(table()))
    return by_steps(lambda _: Steps(keys=keys()))


SATURATION = Family("saturation and rounding", _by_table)
LAST_FINITE = 464
"""Largest product that rounds to 448."""
_VALUES = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES]).astype(np.float32)
"""Of the 16 codes."""


def _rounded(values: Floats) -> Floats:
    return e4m3_values(e4m3_bytes(values)).astype(np.float32)


@SATURATION.cause(
    "keys are not saturated at 448",
    "A product of code and scale beyond 448 is kept; the scored key is at most 448.",
)
def unsaturated() -> Floats:
    """Rounded to E4M3's four significant bits above 448, too."""
    fraction, exponent = np.frexp(exact())
    beyond = np.ldexp(np.rint(fraction * 16) / 16, exponent)
    return np.where(np.abs(exact()) > E4M3_MAX, beyond, _rounded(exact())).astype(np.float32)


@SATURATION.cause(
    "keys beyond 448 are kept as they are",
    "A product of code and scale beyond 448 is neither saturated nor rounded; others are rounded.",
)
def kept_beyond() -> Floats:
    """Exact above 448."""
    return np.where(np.abs(exact()) > E4M3_MAX, exact(), _rounded(exact()))


@SATURATION.cause("keys beyond 448 become NaN", "The cast to E4M3 overflows to NaN; it must saturate.")
def overflowing() -> Floats:
    """NaN beyond the last value that rounds to 448."""
    return np.where(np.abs(exact()) > LAST_FINITE, np.float32(np.nan), _rounded(exact()))


@SATURATION.cause("keys beyond 448 become 0", "Overflowing keys are dropped; they must saturate.")
def dropped() -> Floats:
    """0 beyond the last value that rounds to 448."""
    return np.where(np.abs(exact()) > LAST_FINITE, np.float32(0), _rounded(exact()))


@SATURATION.cause(
    "keys are not rounded to E4M3",
    "Code times scale is used as it is, saturated or not; the scored key is an E4M3 value.",
)
@functools.cache
def exact() -> Floats:
    """Code times scale, exact in fp32, signs included."""
    products = scale_values(np.arange(256, dtype=np.uint8))[:, None] * _VALUES
    return np.asarray(products, dtype=np.float32)


@SATURATION.cause("keys are saturated, not rounded", "Code times scale is clamped to 448, unrounded.")
def clamped() -> Floats:
    """Saturated, not rounded."""
    return np.asarray(exact().clip(-E4M3_MAX, E4M3_MAX), dtype=np.float32)


@SATURATION.cause(
    "NaN scales are not zero", "Scale bytes 0x7F and 0xFF are read as 480; they count as magnitude 0."
)
def nan_as_480() -> Floats:
    """The two NaN bytes as the magnitude that their bits would be."""
    table = _rounded(exact())
    table[0x7F], table[0xFF] = _rounded(480 * _VALUES), _rounded(-480 * _VALUES)
    return table
