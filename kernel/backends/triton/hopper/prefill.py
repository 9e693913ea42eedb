"""The prefill kernel of :mod:`kernel.backends.triton.prefill` on Hopper, its products overlapped with
its maxima.

    a producer warp     brings keys of two blocks at a time (N = 256) by the copy engine, STAGES deep
    two warpgroups      64 rows each: queries (M) in registers, a product at a time, then its maxima

While one warpgroup takes maxima, the tensor cores work for the other. Two blocks cost them 512 cycles a
warpgroup (1,024 in float16), and the maxima, barriers and shuffles about as much. ptxas does not let one
warpgroup do both at once: it serialises products whose accumulators live across a loop's back edge.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernel.backends.triton.e4m3 import DIMS, TOKENS
from kernel.backends.triton.plan import TILE_FIELDS
from kernel.batch import INIT_SCORE, LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, HEAD_DIM

WARPS = 4
"""Warps of a warpgroup: the launch parameter, the others are added by the kernel."""
_FIELDS = gl.constexpr(TILE_FIELDS)
_PRODUCER_REGISTERS = gl.constexpr(24)
_CONSUMER_REGISTERS = gl.constexpr(232)
_INIT = gl.constexpr(INIT_SCORE)
_LOCAL = gl.constexpr(LOCAL_SCORE)


@gluon.jit
def _load_queries(q_ptr, first_row, num_rows, MMA: gl.constexpr, EXACT: gl.constexpr):
    """Queries ``[64, 128]`` as the left operand, in registers and in the order of dims of the keys."""
    W: gl.constexpr = 2 if EXACT else 4
    NATURAL: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, NATURAL))
    dim = gl.arange(0, DIMS, layout=gl.SliceLayout(0, NATURAL))
    offsets = (first_row + row).to(gl.int64)[:, None] * DIMS + dim[None, :]
    octets = gl.load(q_ptr + offsets, mask=(row < num_rows)[:, None], other=0)
    values = octets.to(gl.float8e4nv, bitcast=True)
    if EXACT:
        values = values.to(gl.float16)
    values = (
        values.reshape([64, 16, 4, 2])
        .permute([0, 1, 3, 2])
        .reshape([64, 4, 32 // W, W])
        .permute([0, 2, 1, 3])
        .reshape([64, 128])
    )
    return gl.convert_layout(values, gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=W))


@gluon.jit
def _produce(keys_desc, buffers, full, empty, first_block, pairs, STAGES: gl.constexpr):
    """Bring the pairs of blocks of a program's walk, each once its buffer has been read by both
    warpgroups."""
    for index in range(pairs):
        stage = index % STAGES
        mbarrier.wait(empty.index(stage), ((index // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), keys_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            keys_desc, [first_block * TOKENS + index * 256, 0], full.index(stage), buffers.index(stage)
        )


@gluon.jit
def _pair_maxima(products, block, positions, least_position, MMA: gl.constexpr, ROWS: gl.constexpr):
    """``[64]`` twice: the maxima over the causal tokens of a block and of the next."""
    if block * TOKENS + 255 > least_position:
        token = block * TOKENS + gl.arange(0, 256, layout=gl.SliceLayout(0, MMA))
        causal = gl.where(token[None, :] <= positions[:, None], products, float("-inf"))
        maxima = gl.max(causal.reshape([64, 2, TOKENS]), 2)
    else:
        maxima = gl.max(products.reshape([64, 2, TOKENS]), 2)
    first, second = gl.split(maxima)
    return gl.convert_layout(first, ROWS) + 0.0, gl.convert_layout(second, ROWS) + 0.0


@gluon.jit
def _with_sentinels(score, block, num_blocks, init_blocks, local_blocks):
    """A block's scores ``[64]`` with the values of forced blocks."""
    score = gl.where((block < init_blocks) & (block < num_blocks), _INIT, score)
    return gl.where((block >= num_blocks - local_blocks) & (block < num_blocks), _LOCAL, score)


@gluon.jit
def _store_group(
    out,
    maxima_ptr,
    group,
    block,
    rows,
    valid,
    group_stride,
    rows_total,
    columns,
    GROUPED: gl.constexpr,
    TILE: gl.constexpr,
):
    """Write the group of 16 scores that a block lies in, and its maxima beside it."""
    slot = gl.arange(0, 16, layout=gl.SliceLayout(0, TILE))
    index = (block // 16).to(gl.int64)
    if GROUPED:
        group = gl.where(group == group, group, float("-inf"))  # NaN would confuse the sorting networks
        gl.store(out[:, None] + index * group_stride + slot[None, :], group, mask=valid[:, None])
        gl.store(maxima_ptr + index * rows_total + rows, gl.max(group, 1), mask=valid)
    else:
        column = index * 16 + slot
        gl.store(out[:, None] + column[None, :], group, mask=valid[:, None] & (column < columns)[None, :])


@gluon.jit
def _consume(
    WARPGROUP: gl.constexpr,
    q_ptr,
    buffers,
    full,
    empty,
    tiles,
    out_pointers,
    strides,
    forced,
    begin,
    pairs,
    H: gl.constexpr,
    GROUPED: gl.constexpr,
    EXACT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Score 64 rows of the tile against the blocks of a program's walk."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16 if EXACT else 32]
    )
    TILE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, TILE)
    first_row, num_rows, skipped_rows, prefix, out_row = tiles
    scores_ptr, maxima_ptr, row_info_ptr = out_pointers
    head_stride, token_stride, group_stride, rows_total, columns = strides
    init_blocks, local_blocks = forced
    first_row += WARPGROUP * 64
    num_rows -= WARPGROUP * 64
    skipped_rows += WARPGROUP * 64
    out_row += WARPGROUP * 64

    row = gl.arange(0, 64, layout=ROWS)
    valid = row < num_rows
    if GROUPED:
        out = scores_ptr + (out_row + row).to(gl.int64) * 16
        if begin == 0:
            gl.store(
                row_info_ptr + out_row + row, (prefix + (skipped_rows + row) // H) // TOKENS + 1, mask=valid
            )
            gl.store(row_info_ptr + rows_total + out_row + row, first_row + row, mask=valid)
    else:
        token = (first_row + row) // H
        head = (first_row + row) % H
        out = scores_ptr + head.to(gl.int64) * head_stride + token.to(gl.int64) * token_stride
    positions = prefix + (skipped_rows + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))) // H
    num_blocks = (prefix + (skipped_rows + row) // H) // TOKENS + 1
    least_position = prefix + skipped_rows // H
    least_blocks = least_position // TOKENS + 1
    slot = gl.arange(0, 16, layout=gl.SliceLayout(0, TILE))
    nothing = gl.full([64, 16], float("-inf"), gl.float32, TILE)

    q = _load_queries(q_ptr, first_row, num_rows, MMA, EXACT)
    products = gl.zeros([64, 256], gl.float32, MMA)
    group = nothing
    for index in range(pairs):
        block = begin + 2 * index
        stage = index % STAGES
        mbarrier.wait(full.index(stage), (index // STAGES) & 1)
        keys = buffers.index(stage).permute([1, 0])
        pending = warpgroup_mma(q, keys, products, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(empty.index(stage), count=1)
        first, second = _pair_maxima(products, block, positions, least_position, MMA, ROWS)
        if (block < init_blocks) | (block + 1 >= least_blocks - local_blocks):
            first = _with_sentinels(first, block, num_blocks, init_blocks, local_blocks)
            second = _with_sentinels(second, block + 1, num_blocks, init_blocks, local_blocks)
        pair = gl.where((slot % 2 == 0)[None, :], first[:, None], second[:, None])
        group = gl.where((slot // 2 == block % 16 // 2)[None, :], pair, group)
        if (block % 16 == 14) | (index == pairs - 1):
            _store_group(
                out,
                maxima_ptr,
                group,
                block,
                out_row + row,
                valid,
                group_stride,
                rows_total,
                columns,
                GROUPED,
                TILE,
            )
            group = nothing


@gluon.jit
def score_kernel(
    q_ptr,
    keys_desc,
    tiles_ptr,
    scores_ptr,
    maxima_ptr,
    row_info_ptr,
    head_stride,
    token_stride,
    group_stride,
    rows_total,
    columns,
    init_blocks,
    local_blocks,
    SPLITS: gl.constexpr,
    H: gl.constexpr,
    GROUPED: gl.constexpr,
    EXACT: gl.constexpr,
    STAGES: gl.constexpr,
):
    tile = tiles_ptr + (gl.program_id(0) // SPLITS) * _FIELDS
    split = gl.program_id(0) % SPLITS
    first_row = gl.load(tile)
    num_rows = gl.load(tile + 1)
    skipped_rows = gl.load(tile + 2)
    prefix = gl.load(tile + 3)
    first_block = gl.load(tile + 4)
    out_row = gl.load(tile + 5)
    last_blocks = (prefix + (skipped_rows + num_rows - 1) // H) // TOKENS + 1
    groups = (last_blocks + 15) // 16
    share = ((groups + SPLITS - 1) // SPLITS) * 16
    begin = split * share
    # A last block without a second one is followed by keys that no row sees.
    pairs = gl.maximum(gl.minimum(share, last_blocks - begin) + 1, 0) // 2

    buffers = gl.allocate_shared_memory(keys_desc.dtype, [STAGES, 256, DIMS], keys_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    tiles = (first_row, num_rows, skipped_rows, prefix, out_row)
    out_pointers = (scores_ptr, maxima_ptr, row_info_ptr)
    strides = (head_stride, token_stride, group_stride, rows_total, columns)
    forced = (init_blocks, local_blocks)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0,
                    q_ptr,
                    buffers,
                    full,
                    empty,
                    tiles,
                    out_pointers,
                    strides,
                    forced,
                    begin,
                    pairs,
                    H,
                    GROUPED,
                    EXACT,
                    STAGES,
                ),
            ),
            (
                _consume,
                (
                    1,
                    q_ptr,
                    buffers,
                    full,
                    empty,
                    tiles,
                    out_pointers,
                    strides,
                    forced,
                    begin,
                    pairs,
                    H,
                    GROUPED,
                    EXACT,
                    STAGES,
                ),
            ),
            (_produce, (keys_desc, buffers, full, empty, first_block + begin, pairs, STAGES)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )
    if not GROUPED:
        # The splits share the columns past the tile's last group, which nobody has written.
        TILE: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]
        )
        row = gl.arange(0, 128, layout=gl.SliceLayout(1, TILE))
        token = (first_row + row) // H
        head = (first_row + row) % H
        out = scores_ptr + head.to(gl.int64) * head_stride + token.to(gl.int64) * token_stride
        nothing = gl.full([128, 16], float("-inf"), gl.float32, TILE)
        for column in range(groups * 16 + split * 16, columns, SPLITS * 16):
            _store_group(
                out,
                maxima_ptr,
                nothing,
                column,
                row,
                row < num_rows,
                group_stride,
                rows_total,
                columns,
                GROUPED,
                TILE,
            )


def key_descriptor(keys: torch.Tensor) -> TensorDescriptor:
    """How the copy engine reads pairs of blocks of a workspace ``[blocks * 128, 128]``, float16 or uint8
    (E4M3)."""
    if keys.dtype == torch.uint8:
        keys = keys.view(torch.float8_e4m3fn)
    block = [2 * BLOCK_TOKENS, HEAD_DIM]
    dtype = gl.float16 if keys.dtype == torch.float16 else gl.float8e4nv
    return TensorDescriptor.from_tensor(keys, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
