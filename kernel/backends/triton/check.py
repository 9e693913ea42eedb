"""The values of a paged call brought to the host in one copy, its checks done by one launch on the way.

out: cu_seqlens_q [batch + 1], seq_lens [batch], not finite, outside    int32, the last two 0 or 1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel.backends.triton.launch import launch
from kernel.contract import BLOCK_TOKENS

_TOKENS = tl.constexpr(BLOCK_TOKENS)
_CELLS = 2048
_PROGRAMS = 264


@triton.jit
def _check_kernel(
    q_ptr,
    q_cells,
    table_ptr,
    table_stride,
    table_columns,
    offsets_ptr,
    lens_ptr,
    out_ptr,
    batch,
    num_pages,
    FP8: tl.constexpr,
    CELLS: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    cell = tl.arange(0, CELLS)
    wrong = tl.zeros((CELLS,), tl.int32)
    for first in range(program * CELLS, q_cells, programs * CELLS):
        values = tl.load(q_ptr + tl.cast(first, tl.int64) + cell, mask=cell < q_cells - first, other=0)
        if FP8:
            wrong |= ((values & 0x7F) == 0x7F).to(tl.int32)
        else:
            wrong |= (tl.abs(values.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1
    if tl.max(wrong, 0) > 0:
        tl.atomic_or(out_ptr + 2 * batch + 1, 1)
    for row in range(program, batch, programs):
        keys = tl.load(lens_ptr + row)
        has_rows = tl.load(offsets_ptr + row + 1) > tl.load(offsets_ptr + row)
        used = tl.minimum(tl.maximum(keys, 0) // _TOKENS + (tl.maximum(keys, 0) % _TOKENS > 0), table_columns)
        used = tl.where(has_rows, used, 0)
        outside = tl.zeros((CELLS,), tl.int32)
        for first in range(0, used, CELLS):
            cells = table_ptr + tl.cast(row, tl.int64) * table_stride + first + cell
            page_ids = tl.load(cells, mask=cell < used - first, other=0)
            listed = cell < used - first
            outside |= (((page_ids < 0) | (page_ids >= num_pages)) & listed).to(tl.int32)
        if tl.max(outside, 0) > 0:
            tl.atomic_or(out_ptr + 2 * batch + 2, 1)
    if program == 0:
        for first in range(0, batch + 1, CELLS):
            own = cell < batch + 1 - first
            offsets = tl.load(offsets_ptr + first + cell, mask=own, other=0)
            tl.store(out_ptr + first + cell, offsets, mask=own)
            own = cell < batch - first
            lens = tl.load(lens_ptr + first + cell, mask=own, other=0)
            tl.store(out_ptr + batch + 1 + first + cell, lens, mask=own)


def call_values(
    q: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    num_pages: int,
) -> torch.Tensor:
    """See :meth:`kernel.backends.base.Backend.call_values`."""
    batch = seq_lens.shape[0]
    out = torch.zeros(2 * batch + 3, dtype=torch.int32, device=q.device)
    fp8 = q.dtype == torch.float8_e4m3fn
    rows = q.contiguous().view(torch.uint8) if fp8 else q.contiguous()
    launch(
        _check_kernel,
        (max(1, min(_PROGRAMS, triton.cdiv(rows.numel(), _CELLS) + batch)),),
        rows,
        rows.numel(),
        block_table,
        block_table.stride(0),
        block_table.shape[1],
        cu_seqlens_q,
        seq_lens,
        out,
        batch,
        num_pages,
        FP8=fp8,
        CELLS=_CELLS,
        num_warps=4,
    )
    return out
