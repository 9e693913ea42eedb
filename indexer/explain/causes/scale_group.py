"""The scale of another group of dims, or of another token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis, by_keys
from indexer.explain.page_keys import DIMS_TO_GROUPS, PageKeys, codes_of, keys_of, scales_of
from kernel.contract import BLOCK_TOKENS, GROUPS, HEAD_DIM

FAMILY = "scale group"
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


def hypotheses(_evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    found = [Hypothesis(name, FAMILY, says, by_keys(grouped(groups))) for name, says, groups in GROUPINGS]
    for name, shift in (("next", -1), ("previous", 1)):
        found.append(
            Hypothesis(
                f"each token has the {name} token's scales",
                FAMILY,
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
