"""Score requests of few queries straight from their pages, bound by memory.

    a block's keys: M = 128 tokens, dequantised in registers       rows of the request: N = 8 to 64
    K = 128 dims, in the order of the prefill kernel: the same bits

The blocks of all requests form one line that is cut into equal shares, one a program, whatever the lengths. A
program finds its requests from the lengths on the device, so a captured launch serves any lengths.

Floor: 9,216 B a block over the bandwidth. At 4.3 TB/s on 132 multiprocessors at 1.7 GHz, 80 % of it leaves
600 cycles for a block's 16,384 keys: 4.7 float-lane instructions an element, or 2.3 of the integer lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel.backends.triton.e4m3 import (
    DIMS,
    TOKENS,
    load_page,
    page_keys,
    permuted_dim,
    product_scale,
    widened,
)
from kernel.backends.triton.launch import Launches
from kernel.backends.triton.plan import Tuning
from kernel.backends.triton.topk import DecodeRows
from kernel.backends.triton.topk_many import clamped, num_queries
from kernel.batch import INIT_SCORE, LOCAL_SCORE

_FEW_ROWS = 16
"""Rows whose products leave room for the tuned number of registers."""
_INIT = tl.constexpr(INIT_SCORE)
_LOCAL = tl.constexpr(LOCAL_SCORE)


@triton.jit
def _load_block(pages_ptr, page_stride, num_pages, table_row_ptr, block):
    page_id = tl.load(table_row_ptr + block)
    page_id = clamped(page_id, num_pages - 1)  # lengths and ids of a captured launch were not checked
    page = pages_ptr + page_id.to(tl.int64) * page_stride
    return load_page(page)


@triton.jit
def _load_queries(q_ptr, first_row, num_rows, N: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr):
    """``[128, N]`` in the order of dims of the keys."""
    row = tl.arange(0, N)
    dims = permuted_dim(tl.arange(0, DIMS), 2 if EXACT else 4)
    offsets = (first_row + row).to(tl.int64)[None, :] * DIMS + dims[:, None]
    octets = tl.load(q_ptr + offsets, mask=(row < num_rows)[None, :], other=0)
    return widened(octets, PTX) if EXACT else octets.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _decode_kernel(
    q_ptr,
    pages_ptr,
    page_stride,
    num_pages,
    table_ptr,
    table_stride,
    table_columns,
    total_q,
    table_rows_ptr,
    query_starts_ptr,
    query_ends_ptr,
    seq_lens_ptr,
    out_starts_ptr,
    lut_ptr,
    scores_ptr,
    head_stride,
    token_stride,
    group_stride,
    columns,
    batch,
    max_queries,
    init_blocks,
    local_blocks,
    H: tl.constexpr,
    N: tl.constexpr,
    BATCH: tl.constexpr,
    GROUPED: tl.constexpr,
    EXACT: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
):
    request = tl.arange(0, BATCH)
    listed = request < batch
    all_starts = tl.load(query_starts_ptr + request, mask=listed, other=0)
    all_ends = tl.load(query_ends_ptr + request, mask=listed, other=0)
    all_keys = tl.load(seq_lens_ptr + request, mask=listed, other=0)
    has_rows = num_queries(all_starts, all_ends, total_q, max_queries) > 0
    all_blocks = (clamped(all_keys, table_columns * TOKENS) + (TOKENS - 1)) // TOKENS
    all_blocks = tl.where(has_rows, all_blocks, 0)
    line_ends = tl.cumsum(all_blocks, 0)
    total = tl.sum(all_blocks, 0)
    share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
    line_begin = tl.program_id(0) * share
    line_end = min(line_begin + share, total)
    first = tl.sum((line_ends <= line_begin).to(tl.int32), 0)
    last = tl.sum((line_ends < line_end).to(tl.int32), 0)

    row = tl.arange(0, N)
    tokens = tl.arange(0, TOKENS)
    for r in range(first, tl.where(line_begin < line_end, last + 1, first)):
        blocks_before = tl.sum(tl.where(request < r, all_blocks, 0), 0)
        query_start = tl.load(query_starts_ptr + r)
        num_rows = num_queries(query_start, tl.load(query_ends_ptr + r), total_q, max_queries) * H
        query_start = clamped(query_start, total_q)
        seq_len = clamped(tl.load(seq_lens_ptr + r), table_columns * TOKENS)
        request_blocks = (seq_len + (TOKENS - 1)) // TOKENS
        table_row_ptr = table_ptr + tl.load(table_rows_ptr + r).to(tl.int64) * table_stride
        begin = max(line_begin - blocks_before, 0)
        end = min(line_end - blocks_before, request_blocks)

        queries = _load_queries(q_ptr, query_start * H, num_rows, N, EXACT, PTX)
        least_position = seq_len - num_rows // H
        positions = least_position + row // H
        num_blocks = tl.where(positions >= 0, positions // TOKENS + 1, 0)
        valid = row < num_rows
        token = clamped(tl.load(out_starts_ptr + r), total_q) + row // H
        out = scores_ptr + (row % H).to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
        for block in tl.range(begin, end, num_stages=STAGES):
            codes, scales = _load_block(pages_ptr, page_stride, num_pages, table_row_ptr, block)
            keys = page_keys(codes, scales, lut_ptr, PTX, 2 if EXACT else 4)
            keys = widened(keys, PTX) if EXACT else keys.to(tl.float8e4nv, bitcast=True)
            products = tl.dot(keys, queries)
            if block * TOKENS + (TOKENS - 1) > least_position:
                causal = block * TOKENS + tokens[:, None] <= positions[None, :]
                products = tl.where(causal, products, float("-inf"))
            score = tl.max(products, 0) * product_scale(PTX or not EXACT) + 0.0
            score = tl.where(block < init_blocks, _INIT, score)
            score = tl.where(block >= num_blocks - local_blocks, _LOCAL, score)
            score = tl.where(block < num_blocks, score, float("-inf"))
            cell = (block // 16) * tl.cast(group_stride, tl.int64) + block % 16
            tl.store(out + cell, score, mask=valid & (block < columns))
        if not GROUPED:
            if end == request_blocks:
                cells = tl.arange(0, 128)
                for column in range(request_blocks, columns, 128):
                    tl.store(
                        out[:, None] + (column + cells)[None, :],
                        tl.full((N, 128), float("-inf"), tl.float32),
                        mask=valid[:, None] & (column + cells < columns)[None, :],
                    )


def decode_table(lut: torch.Tensor, hopper: bool) -> torch.Tensor:
    """What the decode kernel looks scales up in, from ``[256, 8]`` uint8 of
    :func:`kernel.nvfp4.build_lut`."""
    if not hopper:
        return lut
    from kernel.backends.triton.hopper.decode import magnitude_rows

    return magnitude_rows(lut)


def score_requests(
    launches: Launches,
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    lut: torch.Tensor,
    rows: DecodeRows,
    scores: torch.Tensor,
    *,
    grouped: bool,
    exact: bool,
    init_blocks: int,
    local_blocks: int,
    tuning: Tuning,
) -> None:
    """Scores the rows of some requests.

    Args:
        launches: to add to.
        q: ``[total_q, H, 128]`` uint8 (E4M3 bytes), contiguous.
        pages: ``[num_pages, 9216]`` uint8, any page stride.
        block_table: ``[rows, columns]`` int32, contiguous.
        lut: see :func:`decode_table`.
        rows: the requests; most queries of a request, times H at most the columns of one product.
        scores: ``[H, tokens, S]`` float32, ``stride(2) == 1``, where every cell of the requests' rows is
            written; with ``grouped``, ``[groups, rows, 16]`` float32, contiguous, where the rows' blocks are.
        grouped: how the scores lie.
        exact: precision.
        init_blocks: blocks forced at a row's start.
        local_blocks: blocks forced at a row's end.
        tuning: of the device.
    """
    total_q, num_heads, _ = q.shape
    num_requests = rows.seq_lens.shape[0]
    decode = tuning.decode(exact=exact)
    programs = decode.programs(tuning.multiprocessors, rows.total_blocks)
    line = (
        block_table,
        block_table.stride(0),
        rows.num_blocks,
        total_q,
        rows.table_rows,
        rows.query_starts,
        rows.query_ends,
        rows.seq_lens,
        rows.out_starts,
    )
    outputs = (
        scores,
        scores.stride(1) if grouped else scores.stride(0),
        num_heads * scores.stride(1) if grouped else scores.stride(1),
        scores.stride(0) if grouped else 16,
        scores.shape[0] * 16 if grouped else scores.shape[2],
        num_requests,
        rows.max_queries,
        init_blocks,
        local_blocks,
    )
    options = {
        "H": num_heads,
        "N": max(8 if tuning.hopper else 16, triton.next_power_of_2(rows.max_queries * num_heads)),
        "BATCH": triton.next_power_of_2(num_requests),
        "GROUPED": grouped,
        "EXACT": exact,
        "STAGES": decode.stages,
        "num_warps": decode.warps,
    }
    if tuning.hopper:
        from kernel.backends.triton.hopper.decode import ROW_BYTES, decode_kernel

        cache = (q, pages, pages.stride(0) // 16, pages.shape[0])
        launches.add(
            decode_kernel,
            (programs,),
            *cache,
            *line,
            lut,
            ROW_BYTES,
            *outputs,
            **options,
            maxnreg=decode.registers if options["N"] <= _FEW_ROWS else None,
            launch_pdl=True,
        )
    else:
        cache = (q, pages, pages.stride(0), pages.shape[0])
        launches.add(_decode_kernel, (programs,), *cache, *line, lut, *outputs, **options, PTX=tuning.ptx)
