"""Scale bytes looked for in the wrong place of the page."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis, by_keys
from indexer.explain.page_keys import Bytes, Floats, codes_of, keys_of, scales_of, unpacked
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUPS, SCALE_BYTES, TOKEN_CODE_BYTES

FAMILY = "scale order"
ROW_BYTES = TOKEN_CODE_BYTES + GROUPS


def hypotheses(_evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    return [
        Hypothesis(
            "scales are read interleaved with codes",
            FAMILY,
            "Token t is read from the 72 bytes at t*72; its codes are at t*64, its scales at 8192 + t*8.",
            by_keys(interleaved),
        ),
        Hypothesis(
            "scales are read group-major",
            FAMILY,
            "The scale of token t, group g is read at 8192 + g*128 + t; it is at 8192 + t*8 + g.",
            by_keys(group_major),
        ),
        Hypothesis(
            "scales are read swizzled",
            FAMILY,
            "Scales are read in the 128x4 tiles that matrix units take; a page holds them in rows.",
            by_keys(swizzled),
        ),
        Hypothesis(
            "scales are read before the codes",
            FAMILY,
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
