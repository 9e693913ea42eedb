"""The gfx950 kernels' arguments: name, type and order, declared once.

The kernel's parameters, its launcher (:func:`kernel.backends.flydsl.jit.launcher`), the host's arguments and
the argument segment in memory are all made from these classes. Imports no FlyDSL: a process with a kernel
library has none.

Addresses are in bytes, strides in cells unless a comment says bytes. Fields hold ints on the host and FlyDSL
numbers where a kernel is traced.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

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
    init_blocks: I32
    local_blocks: I32


class DecodeArguments(NamedTuple):
    """Of the decode scorer. ``table_rows`` to ``seq_lens`` are int32 arrays of a cell a request."""

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
    table_height: I32
    table_width: I32
    batch: I32
    total_q: I32
    num_pages: I32
    score_blocks: I32  # columns of the scores
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
