"""Score row tiles against a workspace of keys: ``score = max over the causal tokens of a block of q . k``.

    grid (tiles, splits)          tile: 128 rows (token, head) of one request, M of the product
    keys of a block: N = 128      K = 128 dims: one product, so a score's bits depend on its row and block
    only

A program walks over its share of the key blocks, whole groups of 16. Blocks before every row's own need no
mask
and run in a pipelined loop; the few around the diagonal are masked in a second one. 16 maxima are kept in
registers and written as 64 bytes a row, with their own maximum beside them (a group maximum, for top-k).

FLOP: 2 * 128 * 128 a row and block. On an H200 the E4M3 product of a tile and a block takes 512 cycles of a
multiprocessor's tensor cores, and the maxima 256 of its 64 lanes: one has to be hidden behind the other.
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
from kernel.backends.triton.plan import TILE_FIELDS, TILE_ROWS, PrefillTuning
from kernel.batch import INIT_SCORE, LOCAL_SCORE

_ROWS = tl.constexpr(TILE_ROWS)
_FIELDS = tl.constexpr(TILE_FIELDS)
_INIT = tl.constexpr(INIT_SCORE)
_LOCAL = tl.constexpr(LOCAL_SCORE)


@triton.jit
def load_queries(q_ptr, rows, valid, EXACT: tl.constexpr, PTX: tl.constexpr):
    """Queries ``[rows, 128]`` in the order of dims of the keys; rows that are not valid are zero."""
    columns = tl.arange(0, DIMS)
    offsets = rows.to(tl.int64)[:, None] * DIMS + permuted_dim(columns, 2 if EXACT else 4)[None, :]
    octets = tl.load(q_ptr + offsets, mask=valid[:, None], other=0)
    return widened(octets, PTX) if EXACT else octets.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _load_keys(keys_ptr, block, EXACT: tl.constexpr):
    """Keys ``[128 tokens, 128]`` of a block of the workspace."""
    offsets = tl.arange(0, TOKENS)[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
    keys = tl.load(keys_ptr + block.to(tl.int64) * (TOKENS * DIMS) + offsets)
    return keys if EXACT else keys.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _score_kernel(
    q_ptr,
    keys_ptr,
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
    SPLITS: tl.constexpr,
    H: tl.constexpr,
    GROUPED: tl.constexpr,
    EXACT: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile = tiles_ptr + (tl.program_id(0) // SPLITS) * _FIELDS
    split = tl.program_id(0) % SPLITS
    first_row = tl.load(tile)
    num_rows = tl.load(tile + 1)
    skipped_rows = tl.load(tile + 2)
    prefix = tl.load(tile + 3)
    first_block = tl.load(tile + 4)
    out_row = tl.load(tile + 5)

    row = tl.arange(0, _ROWS)
    valid = row < num_rows
    positions = prefix + (skipped_rows + row) // H
    num_blocks = positions // TOKENS + 1
    q = load_queries(q_ptr, first_row + row, valid, EXACT, PTX)
    if GROUPED:
        out = scores_ptr + (out_row + row).to(tl.int64) * 16
        if split == 0:
            tl.store(row_info_ptr + out_row + row, num_blocks, mask=valid)
            tl.store(row_info_ptr + rows_total + out_row + row, first_row + row, mask=valid)
    else:
        token = (first_row + row) // H
        head = (first_row + row) % H
        out = scores_ptr + head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride

    least_position = prefix + skipped_rows // H
    last_blocks = (prefix + (skipped_rows + num_rows - 1) // H) // TOKENS + 1
    groups = (last_blocks + 15) // 16
    share = (groups + SPLITS - 1) // SPLITS
    begin = split * share * 16
    end = min(begin + share * 16, last_blocks)
    # Blocks that every row sees whole and that are no row's local block.
    whole = max(min((least_position + 1) // TOKENS, least_position // TOKENS + 1 - local_blocks), begin)
    whole = min(whole, end)

    slots = tl.arange(0, 16)
    group = tl.full((_ROWS, 16), float("-inf"), tl.float32)
    for block in tl.range(begin, whole, num_stages=STAGES):
        keys = _load_keys(keys_ptr, first_block + block, EXACT)
        score = tl.max(tl.dot(q, keys.T), 1) * product_scale(PTX or not EXACT) + 0.0
        score = tl.where(block < init_blocks, _INIT, score)
        group = tl.where(slots[None, :] == block % 16, score[:, None], group)
        if block % 16 == 15:
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
            )
            group = tl.full((_ROWS, 16), float("-inf"), tl.float32)
    tokens = tl.arange(0, TOKENS)
    for block in tl.range(whole, end, num_stages=1):
        keys = _load_keys(keys_ptr, first_block + block, EXACT)
        products = tl.dot(q, keys.T)
        products = tl.where(block * TOKENS + tokens[None, :] <= positions[:, None], products, float("-inf"))
        score = tl.max(products, 1) * product_scale(PTX or not EXACT) + 0.0
        score = tl.where(block < init_blocks, _INIT, score)
        score = tl.where(block >= num_blocks - local_blocks, _LOCAL, score)
        score = tl.where(block < num_blocks, score, float("-inf"))
        group = tl.where(slots[None, :] == block % 16, score[:, None], group)
        if (block % 16 == 15) | (block == end - 1):
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
            )
            group = tl.full((_ROWS, 16), float("-inf"), tl.float32)
    if not GROUPED:
        # The splits share the columns past the tile's last group, which nobody has written.
        group = tl.full((_ROWS, 16), float("-inf"), tl.float32)
        for column in range(groups * 16 + split * 16, columns, SPLITS * 16):
            _store_group(
                out, maxima_ptr, group, column, row, valid, group_stride, rows_total, columns, GROUPED
            )


@triton.jit
def _store_group(
    out, maxima_ptr, group, block, rows, valid, group_stride, rows_total, columns, GROUPED: tl.constexpr
):
    """Write the group of 16 scores that a block lies in, and its maxima beside it."""
    slots = tl.arange(0, 16)
    if GROUPED:
        group = tl.where(group == group, group, float("-inf"))  # NaN would confuse the sorting networks
        cells = out[:, None] + (block // 16) * tl.cast(group_stride, tl.int64) + slots[None, :]
        tl.store(cells, group, mask=valid[:, None])
        tl.store(
            maxima_ptr + (block // 16) * tl.cast(rows_total, tl.int64) + rows, tl.max(group, 1), mask=valid
        )
    else:
        column = (block // 16) * 16 + slots
        tl.store(out[:, None] + column[None, :], group, mask=valid[:, None] & (column < columns)[None, :])


def score_tiles(
    launches: Launches,
    q: torch.Tensor,
    keys: torch.Tensor,
    tiles: torch.Tensor,
    scores: torch.Tensor,
    maxima: torch.Tensor | None,
    row_info: torch.Tensor | None,
    *,
    num_heads: int,
    init_blocks: int,
    local_blocks: int,
    splits: int,
    tuning: PrefillTuning,
    ptx: bool,
    hopper: bool,
) -> None:
    """Score the tiles of a chunk.

    Args:
        launches: to add to.
        q: ``[total_q, H, 128]`` uint8 (E4M3 bytes), contiguous.
        keys: the workspace, see :mod:`kernel.backends.triton.prefill`; its dtype decides the precision.
        tiles: ``[n, TILE_FIELDS]`` int32, see :mod:`kernel.backends.triton.plan`.
        scores: ``[H, total_q, S]`` float32 with ``stride(2) == 1``, where every cell of the tiles' rows is
            written; with ``maxima``, ``[groups, rows, 16]`` float32, contiguous, where the blocks of the
            tiles' rows are.
        maxima: ``[groups, rows]`` float32, contiguous, the maxima of each group of 16.
        row_info: ``[2, rows]`` int32, contiguous, with ``maxima``: each row's ``nb``, and its number in
            ``q``.
        num_heads: H.
        init_blocks: blocks forced at a row's start.
        local_blocks: blocks forced at a row's end.
        splits: parts that a tile's keys are cut into.
        tuning: launch parameters.
        ptx: whether the device converts to E4M3.
        hopper: whether to use the kernel for compute capability 9.0.
    """
    grouped = maxima is not None
    exact = keys.dtype == torch.float16
    arguments = (
        tiles,
        scores,
        maxima if grouped else scores,
        row_info if grouped else tiles,
        0 if grouped else scores.stride(0),
        0 if grouped else scores.stride(1),
        scores.stride(0) if grouped else 0,
        scores.shape[1] if grouped else 0,
        scores.shape[2],
        init_blocks,
        local_blocks,
    )
    options = {"SPLITS": splits, "H": num_heads, "GROUPED": grouped, "EXACT": exact, "STAGES": tuning.stages}
    grid = (tiles.shape[0] * splits,)
    if hopper:
        from kernel.backends.triton.hopper import prefill

        descriptor = prefill.key_descriptor(keys)
        launches.add(
            prefill.score_kernel, grid, q, descriptor, *arguments, **options, num_warps=prefill.WARPS
        )
    else:
        launches.add(_score_kernel, grid, q, keys, *arguments, **options, PTX=ptx, num_warps=tuning.warps)


# ---- Dequantisation to a workspace ``[blocks * 128, 128]`` in block order, float16 or E4M3 bytes ----
#
# Prefill reads every key once a row tile, hundreds of times, so a page is dequantised once a call. Reading 72
# bytes
# a key and writing 256 (128 for E4M3) it is bound by memory: 0.04 ms for 524,288 keys at 4.3 TB/s.


@triton.jit
def _dequantize_kernel(
    pages_ptr,
    page_stride,
    num_pages,
    table_ptr,
    table_cells_ptr,
    lut_ptr,
    keys_ptr,
    EXACT: tl.constexpr,
    PTX: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    page_id = tl.load(table_ptr + tl.load(table_cells_ptr + block))
    page_id = min(max(page_id, 0), num_pages - 1)  # a plan does not read the block table
    page = pages_ptr + page_id.to(tl.int64) * page_stride
    codes, scales = load_page(page)
    keys = page_keys(codes, scales, lut_ptr, PTX, 2 if EXACT else 4)
    if EXACT:
        keys = widened(keys, PTX)
    tokens = tl.arange(0, TOKENS)[:, None]
    tl.store(keys_ptr + block * (TOKENS * DIMS) + tokens * DIMS + tl.arange(0, DIMS)[None, :], keys)


def dequantize_pages(
    launches: Launches,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    table_cells: torch.Tensor,
    lut: torch.Tensor,
    keys: torch.Tensor,
    ptx: bool,
) -> None:
    """Write the keys of some pages, in the order of dims that :mod:`kernel.backends.triton.e4m3` describes.

    Args:
        launches: to add to.
        pages: ``[num_pages, 9216]`` uint8, any page stride.
        block_table: ``[rows, columns]`` int32, contiguous; ids are clamped to the cache.
        table_cells: ``[blocks]`` int64, cells of the flattened table.
        lut: ``[256, 8]`` uint8.
        keys: ``[at least blocks * 128, 128]`` float16 or uint8 (E4M3), contiguous, written.
        ptx: whether the device executes PTX for sm_89 or newer.
    """
    exact = keys.dtype == torch.float16
    launches.add(
        _dequantize_kernel,
        (table_cells.numel(),),
        pages,
        pages.stride(0),
        pages.shape[0],
        block_table,
        table_cells,
        lut,
        keys,
        EXACT=exact,
        PTX=ptx,
        num_warps=4,
    )
