"""The decode kernel of :mod:`kernel.backends.triton.decode` on Hopper: from page to tensor cores in
registers.

    copies          asynchronous, bring pages to a ring in shared memory, STAGES ahead, holding no registers
    a warpgroup     takes a page from the ring to registers, gives its place to another page, makes keys of
                    it and multiplies; four such programs a multiprocessor fill each other's waits
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernel.backends.triton.e4m3 import DIMS, SCALES_START, TOKEN_BYTES, TOKENS
from kernel.batch import INIT_SCORE, LOCAL_SCORE

# ---- Page staging to shared memory, and keys in a warpgroup's registers ----
#
# A thread takes 16 bytes of codes (32 dims) of a token and their two scales, and makes of them what a
# warpgroup's matrix instruction wants from it as left operand, without a shuffle:
#
#     lane of four     0             1             2             3
#     bytes of codes   0..15         16..31        32..47        48..63       of a token, 64 contiguous bytes
#     scales           0, 1          2, 3          4, 5          6, 7

# The integer lanes are what limits decode (64 a cycle and multiprocessor on Hopper, half of the float lanes),
# so a scale's eight E4M3 magnitudes come from a table (two registers), and a nibble of codes selects one by
# prmt. The four magnitudes of even dims and of odd dims are put together, where their signs are one shift
# away or in place. All bytes of a table row have the scale's sign in bit 7; the code's is added to it.
_WORD = """
    and.b32 w, WORD, 0x77777777;
    prmt.b32 x, m0, m1, w;
    mul.hi.u32 w, w, 65536;
    prmt.b32 y, m0, m1, w;
    prmt.b32 even, x, y, 0x6420;
    prmt.b32 odd, x, y, 0x7531;
    mul.lo.u32 w, WORD, 16;
    lop3.b32 even, even, w, 0x80808080, 0x78;
    lop3.b32 odd, odd, WORD, 0x80808080, 0x78;
"""
_WIDEN = """
    mov.b32 {ha, hb}, SOURCE;
    cvt.rn.f16x2.e4m3x2 FIRST, ha;
    cvt.rn.f16x2.e4m3x2 SECOND, hb;
"""


def _sixteen_keys(exact: bool) -> str:
    """PTX that turns eight bytes of codes and a table row into 16 keys: for each word the even dims, then
    the odd ones."""
    outputs = 8 if exact else 4
    lines = [
        ".reg .b32 m0, m1, w, x, y, even, odd;",
        ".reg .b16 ha, hb;",
        f"mov.b64 {{m0, m1}}, ${outputs + 2};",
    ]
    out = 0
    for word in (f"${outputs}", f"${outputs + 1}"):
        lines.append(_WORD.replace("WORD", word))
        for source in ("even", "odd"):
            if exact:
                widen = _WIDEN.replace("SOURCE", source)
                lines.append(widen.replace("FIRST", f"${out}").replace("SECOND", f"${out + 1}"))
                out += 2
            else:
                lines.append(f"mov.b32 ${out}, {source};")
                out += 1
    return "{" + "\n".join(lines) + "}"


def _constraints(outputs: int) -> str:
    return ",".join(["=&r"] * outputs + ["r"] * 2 + ["l"] * 8)


_EXACT_ASM = gl.constexpr(_sixteen_keys(exact=True))
_EXACT_CONSTRAINTS = gl.constexpr(_constraints(8))
_FAST_ASM = gl.constexpr(_sixteen_keys(exact=False))
_FAST_CONSTRAINTS = gl.constexpr(_constraints(4))


# From a token's two scales, a pair of bytes, to their table rows, all by multiplications: the float lanes do
# them, which have time. A multiplier known to be 8 would become additions of the integer lanes. The table
# lies at a multiple of its size, so that the upper half of an address is the table's.
_ROWS_ASM = gl.constexpr("""{
    .reg .b32 first, second, low, high;
    .reg .b64 cell;
    mul.hi.u32 second, $2, 0x1000000;
    mad.lo.s32 first, second, -256, $2;
    mov.b64 {low, high}, $4;
    mad.lo.u32 first, first, $3, low;
    mad.lo.u32 second, second, $3, low;
    mov.b64 cell, {first, high};
    ld.global.nc.b64 $0, [cell];
    mov.b64 cell, {second, high};
    ld.global.nc.b64 $1, [cell];
}""")
ROW_BYTES = 8
"""Bytes of a table row."""


def magnitude_rows(lut: torch.Tensor) -> torch.Tensor:
    """The table ``[256]`` int64 of a look-up table ``[256, 8]`` uint8: its rows, the scale's sign in every
    byte, at an address that is a multiple of 2,048."""
    rows = lut.clone()
    rows[128:] |= 0x80
    size = rows.numel()
    room = torch.empty(2 * size, dtype=torch.uint8, device=lut.device)
    start = -room.data_ptr() % size
    table = room[start : start + size]
    table.copy_(rows.flatten())
    return table.view(torch.int64)


@gluon.jit
def bring_page(pages_ptr, page_lines, page_id, num_pages, codes, scales, wanted):
    """Ask for a page, in a group of asynchronous copies of its own.

    A page id is kept inside the cache: those of a captured launch were not checked.
    """
    CODES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    page_id = gl.minimum(gl.maximum(page_id, 0), num_pages - 1)
    page = pages_ptr + page_id.to(gl.int64) * page_lines * 16  # so that the compiler knows the alignment
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, CODES))
    octet = gl.arange(0, TOKEN_BYTES, layout=gl.SliceLayout(0, CODES))
    line = gl.arange(0, 16, layout=gl.SliceLayout(1, SCALES))
    pair = gl.arange(0, 32, layout=gl.SliceLayout(0, SCALES))
    if wanted:
        async_copy.async_copy_global_to_shared(codes, page + (token[:, None] * TOKEN_BYTES + octet[None, :]))
        first = (page + SCALES_START).to(gl.pointer_type(gl.uint16), bitcast=True)
        async_copy.async_copy_global_to_shared(scales, first + (line[:, None] * 32 + pair[None, :]))
    async_copy.commit_group()


@gluon.jit
def take_half(codes, scales, table_of_scales_ptr, row_bytes):
    """Codes ``[64, 64]`` and the table rows ``[64, 8]`` of the scales of half a page that is there, as the
    threads want them."""
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
    # Eight tokens a line of 64 bytes, two scales an element.
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1, 0]],
        lane_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[2, 0], [4, 0]],
        block_bases=[],
        shape=[8, 32],
    )
    SPREAD: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [8, 0, 0]],
        lane_bases=[[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 8, 8],
    )
    first, second = gl.inline_asm_elementwise(
        _ROWS_ASM,
        "=&l,=&l,r,r,l",
        [scales.load(SCALES).to(gl.uint32), row_bytes, table_of_scales_ptr.to(gl.int64)],
        (gl.int64, gl.int64),
        is_pure=True,
        pack=1,
    )
    rows = gl.join(first, second).reshape([64, 8])
    rows = gl.convert_layout(rows, gl.SliceLayout(2, SPREAD), assert_trivial=True)
    return codes.load(CODES), rows


@gluon.jit
def half_keys(codes, rows, MMA: gl.constexpr, EXACT: gl.constexpr):
    """The keys of half a page ``[64, 128]`` as the left operand, in the order of dims of
    :mod:`kernel.backends.triton.e4m3`.

    Args:
        codes: ``[64, 64]`` uint8.
        rows: ``[64, 8]`` int64, the table rows of the scales.
    """
    spread = rows.expand_dims(2).broadcast_to([64, 8, 8]).reshape([64, 64])
    spread = gl.convert_layout(spread, codes.type.layout, assert_trivial=True)
    if EXACT:
        first, second = gl.inline_asm_elementwise(
            _EXACT_ASM, _EXACT_CONSTRAINTS, [codes, spread], (gl.float16, gl.float16), is_pure=True, pack=8
        )
    else:
        first, second = gl.inline_asm_elementwise(
            _FAST_ASM,
            _FAST_CONSTRAINTS,
            [codes, spread],
            (gl.float8e4nv, gl.float8e4nv),
            is_pure=True,
            pack=8,
        )
    W: gl.constexpr = 2 if EXACT else 4
    # first holds the keys of a group's first word, second those of its second.
    keys = gl.join(first, second).reshape([64, 8, 8, 2]).permute([0, 1, 3, 2]).reshape([64, 4, 32 // W, W])
    keys = keys.permute([0, 2, 1, 3]).reshape([64, 128])
    return gl.convert_layout(
        keys, gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=W), assert_trivial=True
    )


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
    total_q,
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

    # Launched while the kernel before still runs, which may write keys, queries, lengths or tables.
    gdc_wait()
    gdc_launch_dependents()  # the selection's programs may start as soon as there is room
    # The blocks of all requests form one line; this program takes an equal share of it.
    request = gl.arange(0, BATCH, layout=LINE)
    listed = request < batch
    all_starts = gl.load(query_starts_ptr + request, mask=listed, other=0)
    all_ends = gl.load(query_ends_ptr + request, mask=listed, other=0)
    all_keys = gl.load(seq_lens_ptr + request, mask=listed, other=0)
    has_rows = _num_queries(all_starts, all_ends, total_q, max_queries) > 0
    all_blocks = (_clamped(all_keys, table_columns * TOKENS) + (TOKENS - 1)) // TOKENS
    all_blocks = gl.where(has_rows, all_blocks, 0)
    line_ends = gl.associative_scan(all_blocks, 0, _plus)
    total = gl.sum(all_blocks, 0)
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    line_begin = gl.program_id(0) * share
    line_end = gl.minimum(line_begin + share, total)
    first = gl.sum((line_ends <= line_begin).to(gl.int32), 0)
    last = gl.where(line_begin < line_end, gl.sum((line_ends < line_end).to(gl.int32), 0) + 1, first)

    row = gl.arange(0, N, layout=ROWS)
    queries = gl.allocate_shared_memory(
        DTYPE, [N, DIMS], gl.NVMMASharedLayout.get_default_for([N, DIMS], DTYPE)
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    maxima = gl.allocate_shared_memory(gl.float32, [16, 4, N], PLAIN)
    all_maxima = maxima._reinterpret(gl.float32, [64, N], PLAIN)
    ring = gl.allocate_shared_memory(gl.uint8, [STAGES, TOKENS, TOKEN_BYTES], PLAIN)
    scale_ring = gl.allocate_shared_memory(gl.uint16, [STAGES, 16, 32], PLAIN)
    for r in range(first, last):
        blocks_before = gl.sum(gl.where(request < r, all_blocks, 0), 0)
        query_start = gl.load(query_starts_ptr + r)
        num_rows = _num_queries(query_start, gl.load(query_ends_ptr + r), total_q, max_queries) * H
        query_start = _clamped(query_start, total_q)
        seq_len = _clamped(gl.load(seq_lens_ptr + r), table_columns * TOKENS)
        request_blocks = (seq_len + (TOKENS - 1)) // TOKENS
        table_row_ptr = table_ptr + gl.load(table_rows_ptr + r).to(gl.int64) * table_stride
        begin = gl.maximum(line_begin - blocks_before, 0)
        end = gl.minimum(line_end - blocks_before, request_blocks)

        q_row = gl.arange(0, N, layout=gl.SliceLayout(1, QUERIES))
        column = gl.arange(0, DIMS, layout=gl.SliceLayout(0, QUERIES))
        place = 32 * (column // W % 4) + W * (column // (4 * W)) + column % W
        dim = place // 8 * 8 + place % 4 * 2 + place // 4 % 2
        offsets = (query_start * H + q_row).to(gl.int64)[:, None] * DIMS + dim[None, :]
        octets = gl.load(q_ptr + offsets, mask=(q_row < num_rows)[:, None], other=0)
        queries.store(octets.to(gl.float8e4nv, bitcast=True).to(DTYPE))
        fence_async_shared()

        least_position = seq_len - num_rows // H
        positions = least_position + gl.arange(0, N, layout=gl.SliceLayout(0, MMA)) // H
        positions_out = least_position + row // H
        valid = row < num_rows
        out_token = _clamped(gl.load(out_starts_ptr + r), total_q) + row // H
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
            first_half = _masked(first_half, block * TOKENS, positions, least_position, MMA)
            last_half = warpgroup_mma_wait(0, deps=[last_half])
            last_half = _masked(last_half, block * TOKENS + 64, positions, least_position, MMA)
            # The maxima of each warp's tokens, without a word to the other warps.
            partial = gl.max(gl.maximum(first_half, last_half).reshape([4, 16, N]), 1)
            maxima.index(block % 16).store(partial)
            if (block + 1 == end) | (block % 16 == 15):
                score = gl.max(all_maxima.load(WARPS).reshape([16, 4, N]), 1) + 0.0
                score = gl.convert_layout(score, FLUSH)
                slot = gl.arange(0, 16, layout=gl.SliceLayout(1, FLUSH))
                cells = block // 16 * 16 + slot
                causal_blocks = gl.where(positions_out >= 0, positions_out // TOKENS + 1, 0)[None, :]
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
                fill_token = (_clamped(gl.load(out_starts_ptr + r), total_q) + fill_row // H).to(gl.int64)
                start = scores_ptr + (fill_row % H).to(gl.int64) * head_stride + fill_token * token_stride
                cell = gl.arange(0, 128, layout=gl.SliceLayout(0, FILL))
                nothing = gl.full([N, 128], float("-inf"), gl.float32, FILL)
                for first_cell in range(request_blocks, columns, 128):
                    inside = (fill_row < num_rows)[:, None] & (first_cell + cell < columns)[None, :]
                    gl.store(start[:, None] + (first_cell + cell)[None, :], nothing, mask=inside)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _clamped(value, most):
    return gl.minimum(gl.maximum(value, 0), most)


@gluon.jit
def _num_queries(start, end, total_q, max_queries):
    """Queries of a request, see :func:`kernel.backends.triton.topk_many.num_queries`."""
    return gl.minimum(gl.maximum(_clamped(end, total_q) - _clamped(start, total_q), 0), max_queries)
