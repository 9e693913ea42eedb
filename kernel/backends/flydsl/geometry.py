"""What kernels and host share: sizes, page staging, kernel variants, symbols, arguments.

Imports no FlyDSL: a process with a kernel library has none. Sizes follow from the page format
(:mod:`kernel.contract`) and the matrix instruction.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_type_hints

import torch

from kernel.contract import BLOCK_TOKENS, CODE_BYTES, GROUPS, HEAD_DIM, MAX_TOPK, SCALE_BYTES, SUPPORTED_HEADS
from kernel.errors import DeviceUnavailableError
from kernel.plan import MAXIMA_BLOCKS, TILE_ROWS


def log2(power: int) -> int:
    """The exponent of a power of two."""
    return power.bit_length() - 1


LANES = 64
"""Lanes of a wave."""
LOG_LANES = log2(LANES)
WAVES = 4
"""Waves of a workgroup, one for each SIMD of a CU."""
THREADS = WAVES * LANES
WAVES_PER_SIMD = 2
"""Waves that must fit a SIMD at once: 512 registers a lane, so 256 for each."""

MFMA_ROWS = 16
"""Query rows (N) and key tokens (M) of one ``v_mfma_f32_16x16x128_f8f6f4``; its K is the head dim."""
LOG_MFMA_ROWS = log2(MFMA_ROWS)
MAX_ROWS = MFMA_ROWS
"""Query rows (``query_len * H``) of a request that the decode scorer takes; requests of more are prefill."""
ACCUMULATORS = MFMA_ROWS * MFMA_ROWS // LANES
"""Accumulators of a lane: consecutive tokens of one query row."""
WAVE_ROWS = TILE_ROWS // WAVES
N_TILES = WAVE_ROWS // MFMA_ROWS
"""MFMA tiles of query rows that a wave owns."""
M_TILES = BLOCK_TOKENS // MFMA_ROWS
"""MFMA tiles of key tokens in a block."""
WAVE_TOKENS = N_TILES * MFMA_ROWS
"""Query tokens from the first to the last row of a wave: its N-tiles lie 16 tokens apart."""
REDUCED_ROWS = 2
"""Query rows whose scores a lane holds once a block is reduced: of N-tile ``lane // 16`` and of the fourth
after it."""
REDUCED_TOKENS = WAVE_TOKENS // REDUCED_ROWS
"""Query tokens from one of these rows to the next."""
LOG_BLOCK = log2(BLOCK_TOKENS)
LOG_MAXIMA = log2(MAXIMA_BLOCKS)

OPERAND_BYTES = 16
"""Bytes of one LDS read or write of keys, a column of a key row."""
COLUMNS = HEAD_DIM // OPERAND_BYTES
LANE_CODE_BYTES = CODE_BYTES // THREADS
LANE_SCALE_BYTES = SCALE_BYTES // THREADS

SLOT_BYTES = BLOCK_TOKENS * HEAD_DIM
"""LDS bytes of a dequantised block; two slots, one read while the other is written."""
LUT_ENTRIES = 256
LUT_ENTRY_BYTES = 8
LUT_AT = 2 * SLOT_BYTES
LDS_BYTES = LUT_AT + LUT_ENTRIES * LUT_ENTRY_BYTES


# ---- Page staging of the decode scorer ----

Layout = Literal["registers", "staged"]
"""Where pages in flight go: to registers, or to LDS by DMA. Scores are the same bits; which is faster only a
benchmark on the device can tell."""
LAYOUTS: tuple[Layout, ...] = ("registers", "staged")
DEFAULT_LAYOUT: Layout = "registers"
VARIABLE = "NVFP4_INDEXER_DECODE_LAYOUT"
"""Setting that chooses the layout."""


def chosen_layout() -> Layout:
    """The layout that the environment names, else the default.

    Raises:
        DeviceUnavailableError: it names another one.
    """
    named = os.environ.get(VARIABLE) or DEFAULT_LAYOUT
    for layout in LAYOUTS:
        if named == layout:
            return layout
    raise DeviceUnavailableError(
        f"{VARIABLE}={named} is no layout of the decode scorer", f"use {' or '.join(LAYOUTS)}, or unset it"
    )


# ---- Insert: a kernel for each type of keys ----

KEYS_PER_WORKGROUP = THREADS // GROUPS
LOAD_BYTES = 16
"""Bytes, and alignment, of a load of keys."""


class KeyType(Enum):
    """Types that keys may have."""

    BFLOAT16 = "bf16"
    FLOAT16 = "fp16"
    FLOAT32 = "fp32"

    @staticmethod
    def of(dtype: torch.dtype) -> KeyType:
        """The type of a tensor's values."""
        return {
            torch.bfloat16: KeyType.BFLOAT16,
            torch.float16: KeyType.FLOAT16,
            torch.float32: KeyType.FLOAT32,
        }[dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of a value."""
        return 4 if self is KeyType.FLOAT32 else 2


# ---- Top-k: kernels by class of k and length of row ----

NO_GROUP = 1 << 25
"""A group past every row: the 32-bit byte offset of its columns lies behind any row's end."""
MAX_BLOCKS = (NO_GROUP - 16) * MAXIMA_BLOCKS
"""Blocks of a row at most, 2 GiB of scores."""
CLASSES = (MAX_TOPK // 4, MAX_TOPK // 2, MAX_TOPK)
"""A kernel selects the best 16, 32 or 64 and gives out the first ``k`` of them."""
_SHORT_ROWS = 4
"""Rows that a wave selects one after the other where they are short: per-lane constants are computed once."""


@dataclass(frozen=True)
class Variant:
    """One compiled kernel.

    Attributes:
        best: class of k: 16, 32 or 64.
        most_groups: groups of a row at most, all of them in registers at once; 0 for rows of any length; None
            where a row is selected from its scores alone.
    """

    best: int
    most_groups: int | None = None

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        if self.most_groups is None:
            return f"topk_scan_k{self.best}"
        blocks = f"_b{self.most_groups * MAXIMA_BLOCKS}" if self.most_groups else ""
        return f"topk_group_k{self.best}{blocks}"

    @property
    def rows_per_wave(self) -> int:
        """Rows that a wave selects one after the other."""
        return 1 if self.most_groups is None else _SHORT_ROWS


VARIANTS = (
    *(Variant(best) for best in CLASSES),
    *(Variant(best, 0) for best in CLASSES),
    *(Variant(CLASSES[0], groups) for groups in (LANES, 2 * LANES, 4 * LANES, 8 * LANES)),
)
"""Every kernel."""


def variant_for(k: int, num_blocks: int, grouped: bool) -> Variant:
    """The kernel for ``k`` ids of rows of ``num_blocks`` blocks at most."""
    best = next(best for best in CLASSES if k <= best)
    fitting = [
        one
        for one in VARIANTS
        if one.best == best
        and (one.most_groups is not None) == grouped
        and (not one.most_groups or num_blocks <= one.most_groups * MAXIMA_BLOCKS)
    ]
    return min(fitting, key=lambda one: one.most_groups or NO_GROUP)


# ---- Symbols; those of top-k are in ``Variant.name`` ----


def prefill_name(heads: int) -> str:
    """Symbol of the prefill scorer for ``heads`` index heads."""
    return f"score_prefill_h{heads}"


def decode_name(heads: int, layout: Layout = DEFAULT_LAYOUT) -> str:
    """Symbol of the decode scorer for ``heads`` index heads and a page staging."""
    return f"score_decode_h{heads}" + ("" if layout == DEFAULT_LAYOUT else f"_{layout}")


def insert_name(key_type: KeyType) -> str:
    """Symbol of the insert kernel for keys of a type."""
    return f"insert_{key_type.value}"


def kernel_names() -> tuple[str, ...]:
    """Symbols of all kernels."""
    return (
        *map(prefill_name, SUPPORTED_HEADS),
        *(decode_name(heads, layout) for layout in LAYOUTS for heads in SUPPORTED_HEADS),
        *(variant.name for variant in VARIANTS),
        *map(insert_name, KeyType),
    )


# ---- Arguments of the kernels: name, type and order ----
#
# The kernel's parameters, its launcher (`jit.launcher`), the host's arguments and the argument segment in
# memory are all made from these classes. Addresses are in bytes, strides in cells unless a comment says
# bytes. Fields hold ints on the host and FlyDSL numbers where a kernel is traced.

Launch: TypeAlias = Callable[..., None]
"""A kernel's launcher: its arguments in order, the workgroups of each grid dimension, the stream."""

I32: TypeAlias = Annotated[Any, "i"]
I64: TypeAlias = Annotated[Any, "q"]


class PrefillArguments(NamedTuple):
    """Of the prefill scorer."""

    q: I64
    pages: I64
    page_stride: I64  # bytes
    lut: I64
    scores: I64
    score_head_stride: I64
    score_token_stride: I64
    maxima: I64  # 0: no maxima wanted
    maxima_head_stride: I64
    maxima_token_stride: I64
    table: I64
    work: I64
    num_pages: I32
    score_blocks: I32  # columns of the scores; a work item's ``fill_end`` ends there
    init_blocks: I32
    local_blocks: I32


class DecodeArguments(NamedTuple):
    """Of the decode scorer. ``table_rows`` to ``seq_lens`` are int32 arrays of a cell a request,
    ``num_blocks`` is one of a cell a query token."""

    q: I64
    pages: I64
    page_stride: I64  # bytes
    lut: I64
    scores: I64
    score_head_stride: I64
    score_token_stride: I64
    maxima: I64  # 0: no maxima wanted
    maxima_head_stride: I64
    maxima_token_stride: I64
    table: I64
    table_rows: I64
    query_starts: I64
    query_ends: I64
    seq_lens: I64
    num_blocks: I64  # 0: not wanted
    table_height: I32
    table_width: I32
    batch: I32
    total_q: I32
    num_pages: I32
    max_query_len: I32  # at most MAX_ROWS / H; further queries of a request are not scored
    max_seq_len: (
        I32  # at most what the table and the scores hold; a longer request is read as if it ended there
    )
    fill_end: I32  # cells past a request's blocks get -inf up to this column; 0: none do
    init_blocks: I32
    local_blocks: I32
    log_workgroups: I32


class TopkArguments(NamedTuple):
    """Of the top-k kernels."""

    scores: I64
    score_head_stride: I64
    score_token_stride: I64
    maxima: I64
    maxima_head_stride: I64
    maxima_token_stride: I64
    num_blocks: I64
    block_ids: I64
    id_head_stride: I64
    id_token_stride: I64
    columns: I32
    num_tokens: I32
    k: I32
    ascending: I32


class InsertArguments(NamedTuple):
    """Of the insert kernels; ``num_slots`` are those of all pages."""

    keys: I64
    key_stride: I64  # bytes
    slots: I64
    pages: I64
    page_stride: I64  # bytes
    num_slots: I64
    num_keys: I32


def formats(arguments: type[Any]) -> dict[str, str]:
    """Each argument's ``struct`` format, by name and in order: ``i`` or ``q``."""
    hints = get_type_hints(arguments, include_extras=True)
    return {name: hints[name].__metadata__[0] for name in arguments._fields}


def packed(arguments: Any) -> bytes:
    """The kernel's argument segment in memory."""
    return struct.pack("@" + "".join(formats(type(arguments)).values()), *arguments)


def offset(arguments: type[Any], name: str) -> int:
    """Byte offset of an argument in the kernel's argument segment."""
    before = "".join(formats(arguments).values())[: arguments._fields.index(name)]
    # native alignment: each argument at a multiple of its size
    return struct.calcsize(f"@{before}0{formats(arguments)[name]}")
