"""Quantise keys to NVFP4 and scatter them into pages.

A program takes 64 keys. Floor: 256 B of a bfloat16 key in, 72 B out; 65,536 keys are 21.5 MB, 5 us at 4.3
TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel.backends.triton.e4m3 import DIMS, SCALES_START, TOKEN_BYTES, TOKEN_SCALES, TOKENS
from kernel.backends.triton.launch import launch
from kernel.contract import BLOCK_TOKENS

_KEYS = 64


@triton.jit
def _scale_bytes(largest):
    """``e4m3_rne(clamp(largest / 6, 2^-9, 448))`` by integer arithmetic, the same on every device."""
    # Correctly rounded: next to a midpoint of two E4M3 values the quotient never rounds onto it.
    scale = tl.div_rn(largest, tl.full(largest.shape, 6.0, tl.float32))
    scale = tl.minimum(tl.maximum(scale, 0.001953125), 448.0)
    bits = scale.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponent bias 127 to 7, 3 mantissa bits
    subnormal = ((scale * 512.0 + 8388608.0) - 8388608.0).to(tl.int32)  # 2^23: rounds to the nearest even
    return tl.where(scale < 0.015625, subnormal, normal)


@triton.jit
def _scale_values(octets):
    """The values of positive E4M3 bytes, float32."""
    normal = ((octets + 960) << 20).to(tl.float32, bitcast=True)
    return tl.where(octets < 8, octets.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _exceeds(magnitude, limit, PTX: tl.constexpr):
    """1.0 where a magnitude strictly exceeds its limit, else 0.0.

    The limit, a product of 3 significant bits and 4, is exact. With PTX a saturating fused multiply-add,
    which
    runs at twice the rate of a comparison: 2^100 times the difference is at least 1 or at most 0, its sign
    exact.
    """
    if PTX:
        scaled = tl.broadcast_to(limit * -1.2676506002282294e30, magnitude.shape)
        above = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0f71800000, $2;",
            "=f,f,f",
            [magnitude, scaled],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        above = (magnitude > limit).to(tl.float32)
    return above


@triton.jit
def _insert_kernel(
    keys_ptr, slots_ptr, pages_ptr, page_stride, num_keys, num_slots, KEYS: tl.constexpr, PTX: tl.constexpr
):
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    slot = tl.load(slots_ptr + key, mask=key < num_keys, other=-1)
    dims = tl.arange(0, DIMS)
    present = key < num_keys
    x = tl.load(keys_ptr + key.to(tl.int64)[:, None] * DIMS + dims[None, :], mask=present[:, None], other=0.0)
    x = x.to(tl.float32)
    magnitude = tl.abs(x).reshape(KEYS, TOKEN_SCALES, DIMS // TOKEN_SCALES)
    octets = _scale_bytes(tl.max(magnitude, 2))
    limit = _scale_values(octets)[:, :, None]
    code = _exceeds(magnitude, limit * 0.25, PTX) + _exceeds(magnitude, limit * 0.75, PTX)
    code += _exceeds(magnitude, limit * 1.25, PTX) + _exceeds(magnitude, limit * 1.75, PTX)
    code += _exceeds(magnitude, limit * 2.5, PTX) + _exceeds(magnitude, limit * 3.5, PTX)
    code += _exceeds(magnitude, limit * 5.0, PTX)
    # Adding 2^23 leaves a small integer in the low bits.
    code = (code + 8388608.0).to(tl.int32, bitcast=True) & 7
    code = code.reshape(KEYS, DIMS) | ((x < 0).to(tl.int32) << 3)
    low, high = tl.split(code.reshape(KEYS, TOKEN_BYTES, 2))
    page = pages_ptr + (slot // TOKENS) * page_stride
    token = slot % TOKENS
    written = ((slot >= 0) & (slot < num_slots))[:, None]
    tl.store(
        (page + token * TOKEN_BYTES)[:, None] + tl.arange(0, TOKEN_BYTES)[None, :],
        (low | (high << 4)).to(tl.uint8),
        mask=written,
    )
    scales = (page + SCALES_START + token * TOKEN_SCALES)[:, None] + tl.arange(0, TOKEN_SCALES)[None, :]
    tl.store(scales, octets.to(tl.uint8), mask=written)


def insert_keys(
    keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, *, ptx: bool, hopper: bool
) -> None:
    """See :meth:`kernel.backends.base.Backend.insert`. ``keys`` and ``slots`` are contiguous.

    ``ptx``: whether the device executes PTX; ``hopper``: whether it is of compute capability 9.0.
    """
    if not keys.shape[0]:
        return
    if hopper and keys.dtype == torch.bfloat16:
        from kernel.backends.triton.hopper.insert import insert_bfloat16

        insert_bfloat16(keys, pages, slots)
        return
    launch(
        _insert_kernel,
        (triton.cdiv(keys.shape[0], _KEYS),),
        keys,
        slots,
        pages,
        pages.stride(0),
        keys.shape[0],
        pages.shape[0] * BLOCK_TOKENS,
        KEYS=_KEYS,
        PTX=ptx,
        num_warps=4,
    )
