"""The decode kernel of :mod:`kernel.backends.triton.score_decode` on Hopper, keys from a page to the tensor cores in registers.

A thread loads 16 bytes of codes (32 dims) of a token and their two scales, and makes of them what a warpgroup's matrix
instruction wants from it as left operand, without shared memory and without a shuffle:

    lane of four     0             1             2             3
    bytes of codes   0..15         16..31        32..47        48..63       of a token, 64 contiguous bytes
    scales           0, 1          2, 3          4, 5          6, 7

The codes of the next page are under way while a page is multiplied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernel.batch import INIT_SCORE, LOCAL_SCORE

_INIT = gl.constexpr(INIT_SCORE)
_LOCAL = gl.constexpr(LOCAL_SCORE)

# Registers of the asm blocks: codes $4, $5 (four bytes each) and a scale byte $6. A scale's eight magnitudes are made by
# exact float16 products (six significant bits) and a saturating conversion, and lie in m0 and m1. A nibble of codes is
# then a selector of prmt. Its sign bit, which prmt takes as a wish to replicate the sign of the selected byte, selects
# 0x80 or 0xFF (0x40 or 0x00 where the scale is negative): bit 6 is the sign of the key.
_MAGNITUDES = """
    .reg .pred p;
    .reg .b32 s, a, b, c, d, m0, m1, t, w, x, y;
    .reg .b16 ha, hb, hc, hd;
    and.b32 s, SCALE, 0x7F;
    setp.eq.u32 p, s, 0x7F;
    selp.b32 s, 0, s, p;
    mul.lo.u32 s, s, 0x00800080;
    mov.b32 a, 0x58000000;
    mov.b32 b, 0x5E005C00;
    mov.b32 c, 0x62006000;
    mov.b32 d, 0x66006400;
    mul.f16x2 a, a, s;
    mul.f16x2 b, b, s;
    mul.f16x2 c, c, s;
    mul.f16x2 d, d, s;
    cvt.rn.satfinite.e4m3x2.f16x2 ha, a;
    cvt.rn.satfinite.e4m3x2.f16x2 hb, b;
    cvt.rn.satfinite.e4m3x2.f16x2 hc, c;
    cvt.rn.satfinite.e4m3x2.f16x2 hd, d;
    mov.b32 m0, {ha, hb};
    mov.b32 m1, {hc, hd};
    and.b32 t, SCALE, 0x80;
    setp.ne.u32 p, t, 0;
    selp.b32 t, 0x40404040, 0x80808080, p;
"""
_FOUR_KEYS = """
    prmt.b32 x, m0, m1, w;
    prmt.b32 y, t, t, SIGNS;
    shl.b32 y, y, 1;
    lop3.b32 x, x, y, 0x80808080, 0xF8;
"""
_WIDEN = """
    mov.b32 {ha, hb}, x;
    cvt.rn.f16x2.e4m3x2 FIRST, ha;
    cvt.rn.f16x2.e4m3x2 SECOND, hb;
"""


def _sixteen_keys(exact: bool) -> str:
    """PTX that turns eight bytes of codes and a scale into 16 keys, in the order of their dims."""
    codes, scale = (("$8", "$9"), "$10") if exact else (("$4", "$5"), "$6")
    lines = [_MAGNITUDES.replace("SCALE", scale)]
    out = 0
    for word in codes:
        lines.append(f"and.b32 w, {word}, 0x77777777;\n")
        for half in range(2):
            signs = word
            if half:
                lines.append(f"shr.u32 w, w, 16;\nshr.u32 d, {word}, 16;\n")
                signs = "d"
            lines.append(_FOUR_KEYS.replace("SIGNS", signs))
            if exact:
                lines.append(_WIDEN.replace("FIRST", f"${out}").replace("SECOND", f"${out + 1}"))
                out += 2
            else:
                lines.append(f"mov.b32 ${out}, x;\n")
                out += 1
    return "{" + "".join(lines) + "}"


_EXACT_ASM = gl.constexpr(_sixteen_keys(exact=True))
_EXACT_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))
_FAST_ASM = gl.constexpr(_sixteen_keys(exact=False))
_FAST_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 4))


@gluon.jit
def _load_page(pages_ptr, page_stride, page_id):
    """Codes ``[128, 64]`` and scales ``[128, 8]`` of a page, as the threads want them."""
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [64, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[128, 64],
    )
    SPREAD: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [8, 0, 0], [64, 0, 0]],
        lane_bases=[[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[128, 8, 8],
    )
    page = pages_ptr + page_id.to(gl.int64) * page_stride
    token = gl.arange(0, 128, layout=gl.SliceLayout(1, CODES))
    octet = gl.arange(0, 64, layout=gl.SliceLayout(0, CODES))
    codes = gl.load(page + token[:, None] * 64 + octet[None, :])
    SCALES: gl.constexpr = gl.SliceLayout(2, SPREAD)
    token = gl.arange(0, 128, layout=gl.SliceLayout(1, SCALES))
    group = gl.arange(0, 8, layout=gl.SliceLayout(0, SCALES))
    scales = gl.load(page + 8192 + token[:, None] * 8 + group[None, :])
    return codes, scales


@gluon.jit
def _keys(codes, scales, MMA: gl.constexpr, EXACT: gl.constexpr):
    """The keys of a page ``[128, 128]`` as the left operand, in the order of dims of :mod:`kernel.backends.triton.e4m3`."""
    spread = scales.expand_dims(2).broadcast_to([128, 8, 8]).reshape([128, 64])
    spread = gl.convert_layout(spread, codes.type.layout, assert_trivial=True)
    if EXACT:
        first, second = gl.inline_asm_elementwise(
            _EXACT_ASM, _EXACT_CONSTRAINTS, [codes, spread], (gl.float16, gl.float16), is_pure=True, pack=8
        )
    else:
        first, second = gl.inline_asm_elementwise(
            _FAST_ASM, _FAST_CONSTRAINTS, [codes, spread], (gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=8
        )
    W: gl.constexpr = 2 if EXACT else 4
    # first holds dims 0..7 of each group and second dims 8..15.
    dims = gl.join(first, second).reshape([128, 8, 8, 2]).permute([0, 1, 3, 2]).reshape([128, 4, 32 // W, W])
    keys = dims.permute([0, 2, 1, 3]).reshape([128, 128])
    return gl.convert_layout(keys, gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=W), assert_trivial=True)


@gluon.jit
def _page_id(table_row_ptr, block, num_pages):
    """A page id; ids and lengths of a captured launch were not checked, so it is kept inside the cache."""
    return gl.minimum(gl.maximum(gl.load(table_row_ptr + block), 0), num_pages - 1)


@gluon.jit
def decode_kernel(
    q_ptr,
    pages_ptr,
    page_stride,
    num_pages,
    table_ptr,
    table_stride,
    table_columns,
    table_rows_ptr,
    query_starts_ptr,
    query_ends_ptr,
    seq_lens_ptr,
    out_starts_ptr,
    scores_ptr,
    row_info_ptr,
    head_stride,
    token_stride,
    group_stride,
    rows_total,
    columns,
    batch,
    init_blocks,
    local_blocks,
    H: gl.constexpr,
    N: gl.constexpr,
    BATCH: gl.constexpr,
    GROUPED: gl.constexpr,
    EXACT: gl.constexpr,
):
    W: gl.constexpr = 2 if EXACT else 4
    DTYPE: gl.constexpr = gl.float16 if EXACT else gl.float8e4nv
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16 if EXACT else 32]
    )
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(0, MMA)

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
    token = gl.arange(0, 128, layout=gl.SliceLayout(1, MMA))
    queries = gl.allocate_shared_memory(DTYPE, [N, 128], gl.NVMMASharedLayout.get_default_for([N, 128], DTYPE))
    for r in range(first, last):
        blocks_before = gl.sum(gl.where(request < r, all_blocks, 0), 0)
        query_start = gl.load(query_starts_ptr + r)
        num_rows = gl.minimum((gl.load(query_ends_ptr + r) - query_start) * H, N)
        seq_len = gl.load(seq_lens_ptr + r)
        request_blocks = gl.minimum((seq_len + 127) // 128, table_columns)
        table_row_ptr = table_ptr + gl.load(table_rows_ptr + r).to(gl.int64) * table_stride
        begin = gl.maximum(line_begin - blocks_before, 0)
        end = gl.minimum(line_end - blocks_before, request_blocks)

        codes, scales = _load_page(pages_ptr, page_stride, _page_id(table_row_ptr, begin, num_pages))
        next_id = _page_id(table_row_ptr, gl.minimum(begin + 1, end - 1), num_pages)

        q_row = gl.arange(0, N, layout=gl.SliceLayout(1, QUERIES))
        column = gl.arange(0, 128, layout=gl.SliceLayout(0, QUERIES))
        dim = 32 * (column // W % 4) + W * (column // (4 * W)) + column % W
        offsets = (query_start * H + q_row).to(gl.int64)[:, None] * 128 + dim[None, :]
        octets = gl.load(q_ptr + offsets, mask=(q_row < num_rows)[:, None], other=0)
        queries.store(octets.to(gl.float8e4nv, bitcast=True).to(DTYPE))
        fence_async_shared()

        least_position = seq_len - num_rows // H
        positions = least_position + row // H
        num_blocks = positions // 128 + 1
        valid = row < num_rows
        out_token = gl.load(out_starts_ptr + r) + row // H
        out = scores_ptr + (row % H).to(gl.int64) * head_stride + out_token.to(gl.int64) * token_stride
        if GROUPED:
            if begin == 0:
                out_row = out_token * H + row % H
                gl.store(row_info_ptr + out_row, num_blocks, mask=valid)
                gl.store(row_info_ptr + rows_total + out_row, query_start * H + row, mask=valid)
        for block in range(begin, end):
            next_codes, next_scales = _load_page(pages_ptr, page_stride, next_id)
            next_id = _page_id(table_row_ptr, gl.minimum(block + 2, end - 1), num_pages)
            keys = _keys(codes, scales, MMA, EXACT)
            zeros = gl.zeros([128, N], gl.float32, MMA)
            pending = warpgroup_mma(keys, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(0, deps=[pending])
            if block * 128 + 127 > least_position:
                causal = block * 128 + token[:, None] <= positions[None, :]
                score = gl.max(gl.where(causal, products, float("-inf")), 0) + 0.0
            else:
                score = gl.max(products, 0) + 0.0
            if (block < init_blocks) | (block >= least_position // 128 + 1 - local_blocks):
                score = gl.where((block < init_blocks) & (block < num_blocks), _INIT, score)
                score = gl.where((block >= num_blocks - local_blocks) & (block < num_blocks), _LOCAL, score)
            cell = (block // 16).to(gl.int64) * group_stride + block % 16
            gl.store(out + cell, score, mask=valid & (block < columns))
            codes, scales = next_codes, next_scales
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
