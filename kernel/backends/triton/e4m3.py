"""Device helpers: the E4M3 keys of a page's codes and scales, and E4M3 widened to float16.

Order of dims. Four bytes of codes hold eight dims, and a byte permute turns either half of them into four E4M3
bytes at once. So keys come as two halves, ``low`` and ``high`` ``[tokens, 64]``:

    low[:, j]  is dim 8 * (j // 4) + j % 4          high[:, j] is dim 8 * (j // 4) + 4 + j % 4

Queries are loaded in the same order (:func:`permuted_dim`), and the products do not notice.

Widened to float16 every E4M3 value is exact. Without PTX the byte's bits are moved seven places up, which is the
value times 2^-8, subnormals included: products of widened values must be multiplied by :func:`product_scale`.
"""

from __future__ import annotations

import triton
import triton.language as tl

@triton.jit
def permuted_dim(column):
    """The dim at a column of ``[low | high]``, 0 to 127."""
    within = column % 64
    return 8 * (within // 4) + 4 * (column // 64) + within % 4


@triton.jit
def widened(octets, PTX: tl.constexpr):
    """Finite E4M3 bytes (uint8) as float16; times 2^-8 without PTX."""
    if PTX:
        values = octets.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = octets.to(tl.uint16)
        values = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
    return values


@triton.jit
def product_scale(PTX: tl.constexpr):
    """What a product of two widened values must be multiplied by: 1, or 2^16 without PTX."""
    return 1.0 if PTX else 65536.0


@triton.jit
def key_halves(codes, scales, lut_ptr, PTX: tl.constexpr):
    """The E4M3 bytes of keys.

    Args:
        codes: ``[tokens, 64]`` uint8 as they lie in a page.
        scales: ``[tokens, 8]`` uint8.
        lut_ptr: ``[256, 8]`` uint8, see :func:`kernel.nvfp4.build_lut`.
        PTX: whether the device executes PTX for sm_89 or newer.

    Returns:
        ``low, high``: ``[tokens, 64]`` uint8 each.
    """
    TOKENS: tl.constexpr = codes.shape[0]
    spread = tl.broadcast_to(scales.expand_dims(2), (TOKENS, 8, 8)).reshape(TOKENS, 64)
    if PTX:
        low, high = _key_halves_ptx(codes, spread)
    else:
        low, high = _key_halves_lut(codes, spread, lut_ptr)
    return low, high


@triton.jit
def _key_halves_lut(codes, scales, lut_ptr):
    """By look-up: an E4M3 byte for each nibble, then the halves gathered from even and odd dims."""
    row = lut_ptr + scales.to(tl.int32) * 8
    sign = scales & 0x80
    even = tl.load(row + (codes & 7)) | (((codes << 4) & 0x80) ^ sign)
    odd = tl.load(row + ((codes >> 4) & 7)) | ((codes & 0x80) ^ sign)
    TOKENS: tl.constexpr = codes.shape[0]
    dims = tl.join(even, odd).reshape(TOKENS, 16, 2, 4)
    low, high = tl.split(dims.permute(0, 1, 3, 2))
    return low.reshape(TOKENS, 64), high.reshape(TOKENS, 64)


@triton.jit
def _key_halves_ptx(codes, scales):
    """Eight bytes of codes and their scale at a time, about 40 instructions for 16 dims.

    The eight magnitudes of a scale are made by exact float16 products (six significant bits) and a saturating
    conversion, and lie in two registers. A nibble of codes is then a selector of ``prmt``. Its sign bit, which
    ``prmt`` takes as a wish to replicate the sign of the selected byte, selects 0x80 or 0xFF (0x40 or 0x00 where the
    scale is negative): bit 6 is the sign of the key.
    """
    low, high = tl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b32 s, a, b, c, d, m0, m1, t, w, x, y;
        .reg .b16 ha, hb, hc, hd;
        and.b32 s, $6, 0x7F;
        setp.eq.u32 p, s, 0x7F;
        selp.b32 s, 0, s, p;
        mul.lo.u32 s, s, 0x00800080;
        mov.b32 a, 0x58000000;
        mul.f16x2 a, a, s;
        mov.b32 b, 0x5E005C00;
        mul.f16x2 b, b, s;
        mov.b32 c, 0x62006000;
        mul.f16x2 c, c, s;
        mov.b32 d, 0x66006400;
        mul.f16x2 d, d, s;
        cvt.rn.satfinite.e4m3x2.f16x2 ha, a;
        cvt.rn.satfinite.e4m3x2.f16x2 hb, b;
        cvt.rn.satfinite.e4m3x2.f16x2 hc, c;
        cvt.rn.satfinite.e4m3x2.f16x2 hd, d;
        mov.b32 m0, {ha, hb};
        mov.b32 m1, {hc, hd};
        and.b32 t, $6, 0x80;
        setp.ne.u32 p, t, 0;
        selp.b32 t, 0x40404040, 0x80808080, p;

        and.b32 w, $4, 0x77777777;
        prmt.b32 x, m0, m1, w;
        prmt.b32 y, t, t, $4;
        shl.b32 y, y, 1;
        lop3.b32 $0, x, y, 0x80808080, 0xF8;
        shr.u32 w, w, 16;
        shr.u32 y, $4, 16;
        prmt.b32 x, m0, m1, w;
        prmt.b32 y, t, t, y;
        shl.b32 y, y, 1;
        lop3.b32 $2, x, y, 0x80808080, 0xF8;

        and.b32 w, $5, 0x77777777;
        prmt.b32 x, m0, m1, w;
        prmt.b32 y, t, t, $5;
        shl.b32 y, y, 1;
        lop3.b32 $1, x, y, 0x80808080, 0xF8;
        shr.u32 w, w, 16;
        shr.u32 y, $5, 16;
        prmt.b32 x, m0, m1, w;
        prmt.b32 y, t, t, y;
        shl.b32 y, y, 1;
        lop3.b32 $3, x, y, 0x80808080, 0xF8;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [codes, scales],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=8,
    )
    return low, high
