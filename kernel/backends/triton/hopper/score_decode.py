"""The decode kernel of :mod:`kernel.backends.triton.score_decode` on Hopper: from page to tensor cores in
registers.

    copies          asynchronous, bring pages to a ring in shared memory, STAGES ahead, holding no registers
    a warpgroup     takes a page from the ring to registers, gives its place to another page, makes keys of
                    it and multiplies; four such programs a multiprocessor fill each other's waits
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from kernel.backends.triton.hopper.page_keys import bring_page, half_keys, take_half
from kernel.batch import INIT_SCORE, LOCAL_SCORE

_INIT = gl.constexpr(INIT_SCORE)
_LOCAL = gl.constexpr(LOCAL_SCORE)


@gluon.jit
def _masked(products, first_token, positions, least_position, MMA: gl.constexpr):
    """Products ``[64, N]`` with ``-inf`` where a token lies after a row's position."""
    if first_token + 63 > least_position:
        token = first_token + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
        products = gl.where(token[:, None] <= positions[None, :], products, float("-inf"))
    return products


@gluon.jit
def decode_kernel(
    q_ptr,
    pages_ptr,
    page_lines,
    num_pages,
    table_ptr,
    table_stride,
    table_columns,
    table_rows_ptr,
    query_starts_ptr,
    query_ends_ptr,
    seq_lens_ptr,
    out_starts_ptr,
    table_of_scales_ptr,
    row_bytes,
    scores_ptr,
    head_stride,
    token_stride,
    group_stride,
    columns,
    batch,
    max_queries,
    init_blocks,
    local_blocks,
    H: gl.constexpr,
    N: gl.constexpr,
    BATCH: gl.constexpr,
    GROUPED: gl.constexpr,
    EXACT: gl.constexpr,
    STAGES: gl.constexpr,
):
    W: gl.constexpr = 2 if EXACT else 4
    DTYPE: gl.constexpr = gl.float16 if EXACT else gl.float8e4nv
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16 if EXACT else 32]
    )
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    FLUSH: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, 4], [0, 1])
    WARPS: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    ROWS: gl.constexpr = gl.SliceLayout(0, FLUSH)

    gdc_launch_dependents()  # the selection's programs may start as soon as there is room
    # The blocks of all requests form one line; this program takes an equal share of it.
    request = gl.arange(0, BATCH, layout=LINE)
    listed = request < batch
    all_starts = gl.load(query_starts_ptr + request, mask=listed, other=0)
    all_ends = gl.load(query_ends_ptr + request, mask=listed, other=0)
    all_blocks = (gl.load(seq_lens_ptr + request, mask=listed, other=0) + 127) // 128
    all_blocks = gl.where(all_ends > all_starts, gl.minimum(gl.maximum(all_blocks, 0), table_columns), 0)
    line_ends = gl.associative_scan(all_blocks, 0, _plus)
    total = gl.sum(all_blocks, 0)
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    line_begin = gl.program_id(0) * share
    line_end = gl.minimum(line_begin + share, total)
    first = gl.sum((line_ends <= line_begin).to(gl.int32), 0)
    last = gl.where(line_begin < line_end, gl.sum((line_ends < line_end).to(gl.int32), 0) + 1, first)

    row = gl.arange(0, N, layout=ROWS)
    queries = gl.allocate_shared_memory(
        DTYPE, [N, 128], gl.NVMMASharedLayout.get_default_for([N, 128], DTYPE)
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    maxima = gl.allocate_shared_memory(gl.float32, [16, 4, N], PLAIN)
    all_maxima = maxima._reinterpret(gl.float32, [64, N], PLAIN)
    ring = gl.allocate_shared_memory(gl.uint8, [STAGES, 128, 64], PLAIN)
    scale_ring = gl.allocate_shared_memory(gl.uint16, [STAGES, 16, 32], PLAIN)
    for r in range(first, last):
        blocks_before = gl.sum(gl.where(request < r, all_blocks, 0), 0)
        query_start = gl.load(query_starts_ptr + r)
        num_rows = gl.minimum(gl.load(query_ends_ptr + r) - query_start, max_queries) * H
        seq_len = gl.load(seq_lens_ptr + r)
        request_blocks = gl.minimum((seq_len + 127) // 128, table_columns)
        table_row_ptr = table_ptr + gl.load(table_rows_ptr + r).to(gl.int64) * table_stride
        begin = gl.maximum(line_begin - blocks_before, 0)
        end = gl.minimum(line_end - blocks_before, request_blocks)

        q_row = gl.arange(0, N, layout=gl.SliceLayout(1, QUERIES))
        column = gl.arange(0, 128, layout=gl.SliceLayout(0, QUERIES))
        place = 32 * (column // W % 4) + W * (column // (4 * W)) + column % W
        dim = place // 8 * 8 + place % 4 * 2 + place // 4 % 2
        offsets = (query_start * H + q_row).to(gl.int64)[:, None] * 128 + dim[None, :]
        octets = gl.load(q_ptr + offsets, mask=(q_row < num_rows)[:, None], other=0)
        queries.store(octets.to(gl.float8e4nv, bitcast=True).to(DTYPE))
        fence_async_shared()

        least_position = seq_len - num_rows // H
        positions = least_position + gl.arange(0, N, layout=gl.SliceLayout(0, MMA)) // H
        positions_out = least_position + row // H
        valid = row < num_rows
        out_token = gl.load(out_starts_ptr + r) + row // H
        out = scores_ptr + (row % H).to(gl.int64) * head_stride + out_token.to(gl.int64) * token_stride
        for i in gl.static_range(STAGES):
            page_id = gl.load(table_row_ptr + gl.minimum(begin + i, end - 1))
            bring_page(
                pages_ptr,
                page_lines,
                page_id,
                num_pages,
                ring.index(i),
                scale_ring.index(i),
                begin + i < end,
            )
        next_id = gl.load(table_row_ptr + gl.minimum(begin + STAGES, end - 1))
        place = 0
        for block in range(begin, end):
            async_copy.wait_group(STAGES - 1)
            codes, scales = ring.index(place), scale_ring.index(place)
            first_codes, first_rows = take_half(
                codes.slice(0, 64), scales.slice(0, 8), table_of_scales_ptr, row_bytes
            )
            last_codes, last_rows = take_half(
                codes.slice(64, 64), scales.slice(8, 8), table_of_scales_ptr, row_bytes
            )
            # The tensor cores work on the first half while the lanes make the keys of the second.
            zeros = gl.zeros([64, N], gl.float32, MMA)
            keys = half_keys(first_codes, first_rows, MMA, EXACT)
            first_half = warpgroup_mma(keys, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
            keys = half_keys(last_codes, last_rows, MMA, EXACT)
            last_half = warpgroup_mma(keys, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
            bring_page(pages_ptr, page_lines, next_id, num_pages, codes, scales, block + STAGES < end)
            next_id = gl.load(table_row_ptr + gl.minimum(block + STAGES + 1, end - 1))
            place = (place + 1) % STAGES
            first_half = warpgroup_mma_wait(1, deps=[first_half])
            first_half = _masked(first_half, block * 128, positions, least_position, MMA)
            last_half = warpgroup_mma_wait(0, deps=[last_half])
            last_half = _masked(last_half, block * 128 + 64, positions, least_position, MMA)
            # The maxima of each warp's tokens, without a word to the other warps.
            partial = gl.max(gl.maximum(first_half, last_half).reshape([4, 16, N]), 1)
            maxima.index(block % 16).store(partial)
            if (block + 1 == end) | (block % 16 == 15):
                score = gl.max(all_maxima.load(WARPS).reshape([16, 4, N]), 1) + 0.0
                score = gl.convert_layout(score, FLUSH)
                slot = gl.arange(0, 16, layout=gl.SliceLayout(1, FLUSH))
                cells = block // 16 * 16 + slot
                causal_blocks = (positions_out // 128 + 1)[None, :]
                score = gl.where(
                    (cells < init_blocks)[:, None] & (cells[:, None] < causal_blocks), _INIT, score
                )
                local = (cells[:, None] >= causal_blocks - local_blocks) & (cells[:, None] < causal_blocks)
                score = gl.where(local, _LOCAL, score)
                scored = (cells >= begin) & (cells <= block) & (cells < columns)
                places = gl.cast(block // 16, gl.int64) * group_stride + slot
                gl.store(out[None, :] + places[:, None], score, mask=valid[None, :] & scored[:, None])
        if not GROUPED:
            if end == request_blocks:
                FILL: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
                fill_row = gl.arange(0, N, layout=gl.SliceLayout(1, FILL))
                fill_token = (gl.load(out_starts_ptr + r) + fill_row // H).to(gl.int64)
                start = scores_ptr + (fill_row % H).to(gl.int64) * head_stride + fill_token * token_stride
                cell = gl.arange(0, 128, layout=gl.SliceLayout(0, FILL))
                nothing = gl.full([N, 128], float("-inf"), gl.float32, FILL)
                for first_cell in range(request_blocks, columns, 128):
                    inside = (fill_row < num_rows)[:, None] & (first_cell + cell < columns)[None, :]
                    gl.store(start[:, None] + (first_cell + cell)[None, :], nothing, mask=inside)


@gluon.jit
def _plus(a, b):
    return a + b
