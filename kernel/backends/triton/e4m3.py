"""Device helpers: the E4M3 keys of a page's codes and scales, and E4M3 widened to float16.

Order of dims. A thread that feeds a matrix instruction from its registers holds W dims of every 4 * W (W = 2
for float16,
4 for E4M3). The dims of queries and keys are put in an order in which those are 32 dims that lie side by
side in a
page, so that they are read by one 16-byte load and never change threads; and in which the even dims of eight
come
before the odd ones, as the low nibbles and the high nibbles of four bytes:

    column = 4 * W * n + W * c + e   holds place  32 * c + W * n + e        c < 4, e < W
    place  = 8 * w + p               holds dim    8 * w + (0, 2, 4, 6, 1, 3, 5, 7)[p]

The products of a score are thereby added in another order, the same in every kernel.

Widened to float16 every E4M3 value is exact. Without PTX the byte's bits are moved seven places up, which is
the
value times 2^-8, subnormals included: products of widened values must be multiplied by :func:`product_scale`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUPS, HEAD_DIM, TOKEN_CODE_BYTES

TOKENS = tl.constexpr(BLOCK_TOKENS)
DIMS = tl.constexpr(HEAD_DIM)
TOKEN_BYTES = tl.constexpr(TOKEN_CODE_BYTES)
TOKEN_SCALES = tl.constexpr(GROUPS)
SCALES_START = tl.constexpr(CODE_BYTES)
"""The contract's sizes as kernels read them."""


@triton.jit
def load_page(page):
    """The codes ``[128, 64]`` and scales ``[128, 8]`` uint8 of the page at an address."""
    tokens = tl.arange(0, TOKENS)[:, None]
    codes = tl.load(page + tokens * TOKEN_BYTES + tl.arange(0, TOKEN_BYTES)[None, :])
    scales = tl.load(page + SCALES_START + tokens * TOKEN_SCALES + tl.arange(0, TOKEN_SCALES)[None, :])
    return codes, scales


@triton.jit
def permuted_dim(column, W: tl.constexpr):
    """The dim at a column, 0 to 127."""
    place = 32 * (column // W % 4) + W * (column // (4 * W)) + column % W
    return place // 8 * 8 + place % 4 * 2 + place // 4 % 2


@triton.jit
def widened(octets, PTX: tl.constexpr):
    """Finite E4M3 bytes (uint8) as float16; times 2^-8 without PTX."""
    return octets.to(tl.float8e4nv, bitcast=True).to(tl.float16) if PTX else _raised(octets)


@triton.jit
def product_scale(PTX: tl.constexpr):
    """What a product of two widened values must be multiplied by: 1, or 2^16 without PTX."""
    return 1.0 if PTX else 65536.0


@triton.jit
def page_keys(codes, scales, lut_ptr, PTX: tl.constexpr, W: tl.constexpr):
    """The E4M3 bytes of keys, in the order of columns above.

    Args:
        codes: ``[128, 64]`` uint8 as they lie in a page.
        scales: ``[128, 8]`` uint8.
        lut_ptr: ``[256, 8]`` uint8, see :func:`kernel.nvfp4.build_lut`.
        PTX: whether the device converts to E4M3.
        W: 2 or 4.

    Returns:
        ``[128, 128]`` uint8.
    """
    SCALE_BYTES: tl.constexpr = TOKEN_BYTES // TOKEN_SCALES
    spread = tl.broadcast_to(scales.expand_dims(2), (TOKENS, TOKEN_SCALES, SCALE_BYTES))
    spread = spread.reshape(TOKENS, TOKEN_BYTES)
    if PTX:
        # Exact: six significant bits, 2^-10 to 2,688. The conversion saturates at 448.
        scale = _raised(spread) * 256.0
        scale = tl.where((spread & 0x7F) == 0x7F, 0.0, scale)
        even = (_e2m1(codes) * scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        odd = (_e2m1(codes >> 4) * scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        row = lut_ptr + spread.to(tl.int32) * 8
        sign = spread & 0x80
        even = tl.load(row + (codes & 7)) | (((codes << 4) & 0x80) ^ sign)
        odd = tl.load(row + ((codes >> 4) & 7)) | ((codes & 0x80) ^ sign)
    dims = tl.join(even, odd).reshape(TOKENS, 16, 4, 2).permute(0, 1, 3, 2).reshape(TOKENS, 4, 32 // W, W)
    return dims.permute(0, 2, 1, 3).reshape(TOKENS, DIMS)


@triton.jit
def _raised(octets):
    """An E4M3 byte's bits as those of a float16, which is the value times 2^-8."""
    bits = octets.to(tl.uint16)
    return (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)


@triton.jit
def _e2m1(codes):
    """The values of the codes in the low nibbles, float16: their bits as those of a float16 are the value
    times 2^-14."""
    bits = codes.to(tl.uint16)
    return (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.float16, bitcast=True) * 16384.0
