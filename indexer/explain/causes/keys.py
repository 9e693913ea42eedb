"""Codes of a byte in the wrong order."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import (
    DIMS_TO_GROUPS,
    Bytes,
    Evidence,
    Floats,
    PageKeys,
    codes_of,
    keys_by_table,
    keys_of,
    right_keys,
    scale_values,
    scales_of,
    unpacked,
)
from indexer.explain.match import Hypothesis, by_keys
from kernel.backends.reference.quantizer import E2M1_MAGNITUDES, E4M3_MAX, e4m3_bytes, e4m3_values
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUPS, HEAD_DIM, SCALE_BYTES, TOKEN_CODE_BYTES

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


# The product of code and scale: not rounded to E4M3, or not saturated at 448.

SATURATION_FAMILY = "saturation and rounding"
LAST_FINITE = 464
"""Largest product that rounds to 448."""


def saturation_hypotheses(_evidence: Evidence) -> list[Hypothesis]:
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
    return Hypothesis(name, SATURATION_FAMILY, says, by_keys(keys_by_table(table)))


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


# The scale of another group of dims, or of another token.

SCALE_GROUP_FAMILY = "scale group"
_DIMS = np.arange(HEAD_DIM)
GROUPINGS: tuple[tuple[str, str, NDArray[np.int64]], ...] = (
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


def scale_group_hypotheses(_evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    found = [
        Hypothesis(name, SCALE_GROUP_FAMILY, says, by_keys(grouped(groups)))
        for name, says, groups in GROUPINGS
    ]
    for name, shift in (("next", -1), ("previous", 1)):
        found.append(
            Hypothesis(
                f"each token has the {name} token's scales",
                SCALE_GROUP_FAMILY,
                "Codes and scales are of two different tokens.",
                by_keys(of_another_token(shift)),
            )
        )
    return found


def grouped(groups: NDArray[np.int64]) -> PageKeys:
    """Keys with another map of dims ``[128]`` to scales."""
    return lambda pages: keys_of(codes_of(pages), scales_of(pages), groups)


def of_another_token(shift: int) -> PageKeys:
    """Keys with the scales of the token ``shift`` places before, in a circle."""
    return lambda pages: keys_of(codes_of(pages), np.roll(scales_of(pages), shift % BLOCK_TOKENS, axis=1))


# Scale bytes looked for in the wrong place of the page.

SCALE_ORDER_FAMILY = "scale order"
ROW_BYTES = TOKEN_CODE_BYTES + GROUPS


def scale_order_hypotheses(_evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    return [
        Hypothesis(
            "scales are read interleaved with codes",
            SCALE_ORDER_FAMILY,
            "Token t is read from the 72 bytes at t*72; its codes are at t*64, its scales at 8192 + t*8.",
            by_keys(interleaved),
        ),
        Hypothesis(
            "scales are read group-major",
            SCALE_ORDER_FAMILY,
            "The scale of token t, group g is read at 8192 + g*128 + t; it is at 8192 + t*8 + g.",
            by_keys(group_major),
        ),
        Hypothesis(
            "scales are read swizzled",
            SCALE_ORDER_FAMILY,
            "Scales are read in the 128x4 tiles that matrix units take; a page holds them in rows.",
            by_keys(swizzled),
        ),
        Hypothesis(
            "scales are read before the codes",
            SCALE_ORDER_FAMILY,
            "The page is read as 1,024 scale bytes and then codes; codes come first.",
            by_keys(scales_first),
        ),
    ]


def interleaved(pages: Bytes) -> Floats:
    """Rows of 64 code bytes and 8 scale bytes."""
    rows = pages.reshape(-1, BLOCK_TOKENS, ROW_BYTES)
    return keys_of(unpacked(rows[..., :TOKEN_CODE_BYTES]), rows[..., TOKEN_CODE_BYTES:])


def group_major(pages: Bytes) -> Floats:
    """Scales ``[8, 128]``."""
    scales = pages[:, CODE_BYTES:].reshape(-1, GROUPS, BLOCK_TOKENS).swapaxes(1, 2)
    return keys_of(codes_of(pages), scales)


def swizzled(pages: Bytes) -> Floats:
    """Scales in tiles of 128 rows by 4 columns, byte ``row % 32 * 16 + row // 32 * 4 + column`` of a tile."""
    token, group = np.arange(BLOCK_TOKENS)[:, None], np.arange(GROUPS)
    place = group // 4 * 512 + token % 32 * 16 + token // 32 * 4 + group % 4
    return keys_of(codes_of(pages), pages[:, CODE_BYTES:][:, place])


def scales_first(pages: Bytes) -> Floats:
    """Scales at byte 0, codes after them."""
    codes = unpacked(pages[:, SCALE_BYTES:].reshape(-1, BLOCK_TOKENS, TOKEN_CODE_BYTES))
    return keys_of(codes, pages[:, :SCALE_BYTES].reshape(scales_of(pages).shape))


# The sign of a key: lost, inverted, or taken from the wrong bit.

SIGN_FAMILY = "sign"


def sign_hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    found = [
        _sign_reads(
            "keys lose their sign", "Bit 3 of a code is dropped: every key is taken as positive.", unsigned
        ),
        _sign_reads("keys have the other sign", "The sign bit is inverted, or applied twice.", negated),
        _sign_reads(
            "the sign is taken from bit 0",
            "A code is read as magnitude in its upper three bits and sign in the lowest.",
            low_sign,
        ),
    ]
    table = evidence.table[np.unique(evidence.request)]
    if (evidence.pages[np.unique(table[table >= 0]), 8192:] & 0x80).any():
        found.append(
            _sign_reads(
                "the scale's sign is lost",
                "Bit 7 of a scale byte must flip the sign of its keys.",
                plain_scale,
            )
        )
    return found


def _sign_reads(name: str, says: str, keys: PageKeys) -> Hypothesis:
    return Hypothesis(name, SIGN_FAMILY, says, by_keys(keys))


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
