"""Keys in and out of a page, byte by byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernel.backends.reference.quantizer import dequantize_keys
from kernel.contract import CODE_BYTES, GROUPS, HEAD_DIM, TOKEN_CODE_BYTES


def write_token(
    page: NDArray[np.uint8], token: int, codes: NDArray[np.uint8], scale_bytes: NDArray[np.uint8]
) -> None:
    """Write one key, codes ``[128]`` and scale bytes ``[8]``, into a page ``[9216]``."""
    first_code = token * TOKEN_CODE_BYTES
    first_scale = CODE_BYTES + token * GROUPS
    page[first_code : first_code + TOKEN_CODE_BYTES] = codes[0::2] | (codes[1::2] << 4)
    page[first_scale : first_scale + GROUPS] = scale_bytes


def read_tokens(page: NDArray[np.uint8], tokens: int) -> NDArray[np.float64]:
    """The first ``tokens`` keys of a page ``[9216]`` as they are scored: ``[tokens, 128]`` E4M3 values."""
    packed = page[: tokens * TOKEN_CODE_BYTES].reshape(tokens, TOKEN_CODE_BYTES)
    codes = np.empty((tokens, HEAD_DIM), dtype=np.uint8)
    codes[:, 0::2] = packed & 0x0F
    codes[:, 1::2] = packed >> 4
    scale_bytes = page[CODE_BYTES : CODE_BYTES + tokens * GROUPS].reshape(tokens, GROUPS)
    return dequantize_keys(codes, scale_bytes)
