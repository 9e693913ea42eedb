"""The arguments and sizes of the decode scorer. See ``score_decode.py``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl.expr.typing import T

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl import geometry as geo

MAX_ROWS = geo.MFMA_ROWS
"""Query rows (``query_len * H``) of a request that the kernel scores."""
TRIP_BLOCKS = 4
"""Blocks that a wave scores in one trip, and pages that it has in flight."""
SPREAD_GROUPS = 2
"""Most groups of 16 blocks of a workgroup whose four waves share each group."""

PARTIAL_BYTES = geo.WAVES * MAX_ROWS * 4
"""Maxima of a shared group, one of each wave and row."""
PLACE_BYTES = MAX_ROWS * 8
"""Addresses of a shared group's maxima, one of each row; 0 where nothing is to be stored."""
REQUEST_BYTES = 16
"""What a wave keeps of a request: table row, first query, end of its queries, length."""
LUT_AT = 0
PARTIALS_AT = LUT_AT + geo.LUT_ENTRIES * geo.LUT_ENTRY_BYTES
PLACES_AT = PARTIALS_AT + SPREAD_GROUPS * PARTIAL_BYTES
REQUESTS_AT = PLACES_AT + SPREAD_GROUPS * PLACE_BYTES
LDS_BYTES = REQUESTS_AT + geo.THREADS * REQUEST_BYTES


@dataclass(frozen=True)
class DecodeArguments:
    """The kernel's arguments, in order; addresses in bytes, strides in cells unless they say bytes."""

    q: fx.Int64
    pages: fx.Int64
    page_stride: fx.Int64
    lut: fx.Int64
    scores: fx.Int64
    score_head_stride: fx.Int64
    score_token_stride: fx.Int64
    maxima: fx.Int64
    """0 where no maxima are wanted."""
    maxima_head_stride: fx.Int64
    maxima_token_stride: fx.Int64
    table: fx.Int64
    table_rows: fx.Int64
    """Row of the block table of each request, int32; so are the next three."""
    query_starts: fx.Int64
    query_ends: fx.Int64
    seq_lens: fx.Int64
    table_height: fx.Int32
    table_width: fx.Int32
    batch: fx.Int32
    total_q: fx.Int32
    num_pages: fx.Int32
    score_blocks: fx.Int32
    """Columns of the scores."""
    fill_end: fx.Int32
    """Column before which cells past a request's blocks get ``-inf``; 0 for none."""
    init_blocks: fx.Int32
    local_blocks: fx.Int32
    log_workgroups: fx.Int32

    @staticmethod
    def late(name: str) -> Any:
        """An argument read from the kernel's argument segment here and now.

        All 40 words of them do not fit the scalar registers beside what the loop needs: those that are used
        before or after it only are read when they are.
        """
        at = 0
        for field in fields(DecodeArguments):
            wide = field.type == "fx.Int64"
            at += -at % (8 if wide else 4)
            if field.name == name:
                words = d.scalar_load(2 if wide else 1, _segment() + at)
                return fx.Int64(llvm.BitcastOp(T.i64, words).result) if wide else fx.Int32(words)
            at += 8 if wide else 4
        raise AttributeError(name)


def _segment() -> fx.Int64:
    """Address of the kernel's arguments, hidden from LLVM: what is loaded from it is loaded there."""
    kind = ir.Type.parse(f"!llvm.ptr<{d.CONSTANT}>")
    segment = llvm.call_intrinsic(kind, "llvm.amdgcn.kernarg.segment.ptr", [], [], [])
    return fx.Int64(d.pin_scalar(llvm.ptrtoint(T.i64, segment)))
