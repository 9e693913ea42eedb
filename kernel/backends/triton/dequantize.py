"""Dequantise pages to a workspace of keys in block order: ``[blocks * 128, 128]``, float16 or E4M3 bytes.

Prefill reads every key once a row tile, hundreds of times, so a page is dequantised once a call. Reading 72
bytes
a key and writing 256 (128 for E4M3) it is bound by memory: 0.04 ms for 524,288 keys at 4.3 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel.backends.triton.e4m3 import page_keys, widened


@triton.jit
def _dequantize_kernel(
    pages_ptr, page_stride, page_ids_ptr, lut_ptr, keys_ptr, EXACT: tl.constexpr, PTX: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    page = pages_ptr + tl.load(page_ids_ptr + block).to(tl.int64) * page_stride
    tokens = tl.arange(0, 128)[:, None]
    codes = tl.load(page + tokens * 64 + tl.arange(0, 64)[None, :])
    scales = tl.load(page + 8192 + tokens * 8 + tl.arange(0, 8)[None, :])
    keys = page_keys(codes, scales, lut_ptr, PTX, 2 if EXACT else 4)
    if EXACT:
        keys = widened(keys, PTX)
    tl.store(keys_ptr + block * 16384 + tokens * 128 + tl.arange(0, 128)[None, :], keys)


def dequantize_pages(
    pages: torch.Tensor, page_ids: torch.Tensor, lut: torch.Tensor, keys: torch.Tensor, ptx: bool
) -> None:
    """Write the keys of some pages, in the order of dims that :mod:`kernel.backends.triton.e4m3` describes.

    Args:
        pages: ``[num_pages, 9216]`` uint8, any page stride.
        page_ids: ``[blocks]`` int32.
        lut: ``[256, 8]`` uint8.
        keys: ``[at least blocks * 128, 128]`` float16 or uint8 (E4M3), contiguous, written.
        ptx: whether the device executes PTX for sm_89 or newer.
    """
    exact = keys.dtype == torch.float16
    _dequantize_kernel[(page_ids.numel(),)](
        pages, pages.stride(0), page_ids, lut, keys, EXACT=exact, PTX=ptx, num_warps=4
    )
