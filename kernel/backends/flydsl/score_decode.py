"""Decode scores of NVFP4 key pages on gfx950, bound by memory.

    scores[head, token, block] = max over the causal tokens t of the block of  q[token, head] . k[t]
    maxima[head, token, group] = max of the scores of 16 consecutive blocks, sentinels included

A request has at most 16 query rows (row = token * H + head): one N-tile of the matrix instruction. A wave
reads its own pages, each byte once and by one wave, and dequantises in the layout that the MFMA wants:
nothing is shared but the look-up table.

    memory, 9,216 B a page        in flight: 4 pages in registers            registers
    codes, scales --------------> or 2 in LDS, by wave         --LUT in LDS--> A: 16 keys (8 times a page)
                  non-temporal    refilled part by part                      B: 16 query rows
                                                                             D: fp32 [16 tokens][16 rows]

Which of the two ``Layout`` s is faster only the device can tell: the scores are the same bits.

The speed limit is memory: 9,216 B a page at 8 TB/s over 256 CUs are about 700 clocks of a CU, and a page's
302 vector instructions, 4 clocks each and spread over four SIMDs, are about 302.

The grid depends on no length (``score_decode_share.py``), so that a captured launch serves any lengths;
lengths and page ids read from memory are not believed, and nothing is read or written outside the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import cast

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import T

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl import kernel_names
from kernel.backends.flydsl.ahead import compile_ahead
from kernel.backends.flydsl.decode_layout import DEFAULT, Layout
from kernel.backends.flydsl.score_decode_arguments import LDS_BYTES, LUT_AT, DecodeArguments
from kernel.backends.flydsl.score_decode_output import clear_spread_maxima, store_spread_maxima
from kernel.backends.flydsl.score_decode_registers import RegisterPages
from kernel.backends.flydsl.score_decode_request import RequestScorer
from kernel.backends.flydsl.score_decode_share import Share
from kernel.backends.flydsl.score_decode_staged import STAGED_LDS_BYTES, StagedPages


def trace(
    heads: int, layout: Layout, arguments: DecodeArguments, workgroup: fx.Int32, thread: fx.Int32
) -> None:
    """Trace the kernel's body for one lane."""
    lane, wave = thread & (geo.LANES - 1), d.uniform(d.shift_right(thread, 6))
    lds = d.shared_memory(LDS_BYTES if layout == "registers" else STAGED_LDS_BYTES)
    lut_offset = thread * geo.LUT_ENTRY_BYTES
    entry = d.load(2, d.offset(d.pointer(arguments.lut, d.GLOBAL), d.wide(lut_offset)))
    share = Share(arguments, workgroup, wave, lane, lds)
    # The LUT holds magnitudes; the sign bit of a scale byte, the upper half of the entries, goes in here.
    signs = d.shift_right(thread, 7) * d.as_int32(0x80808080)
    entry = d.pack([fx.Int32(d.element(entry, k)) ^ signs for k in range(2)], T.i32)
    d.store(entry, d.offset(d.offset(lds, lut_offset), LUT_AT), geo.LUT_ENTRY_BYTES)
    clear_spread_maxima(lds, thread)
    d.lds_barrier()
    page = RegisterPages(lds, lane) if layout == "registers" else StagedPages(lds, wave, lane)
    share.for_each(lambda part: RequestScorer(heads, arguments, share, part, page).run())
    store_spread_maxima(share)


def build(heads: int, layout: Layout) -> Callable[..., None]:
    """The FlyDSL launcher for ``heads`` index heads.

    Returns:
        A function of :class:`DecodeArguments`' fields in order, the number of workgroups and a stream.
    """

    @flyc.kernel(name=kernel_names.score_decode(heads, layout), known_block_size=[geo.THREADS, 1, 1])  # type: ignore[untyped-decorator]
    def kernel(
        q: fx.Int64,
        pages: fx.Int64,
        page_stride: fx.Int64,
        lut: fx.Int64,
        scores: fx.Int64,
        score_head_stride: fx.Int64,
        score_token_stride: fx.Int64,
        maxima: fx.Int64,
        maxima_head_stride: fx.Int64,
        maxima_token_stride: fx.Int64,
        table: fx.Int64,
        table_rows: fx.Int64,
        query_starts: fx.Int64,
        query_ends: fx.Int64,
        seq_lens: fx.Int64,
        table_height: fx.Int32,
        table_width: fx.Int32,
        batch: fx.Int32,
        total_q: fx.Int32,
        num_pages: fx.Int32,
        score_blocks: fx.Int32,
        fill_end: fx.Int32,
        init_blocks: fx.Int32,
        local_blocks: fx.Int32,
        log_workgroups: fx.Int32,
    ) -> None:
        arguments = DecodeArguments(
            q,
            pages,
            page_stride,
            lut,
            scores,
            score_head_stride,
            score_token_stride,
            maxima,
            maxima_head_stride,
            maxima_token_stride,
            table,
            table_rows,
            query_starts,
            query_ends,
            seq_lens,
            table_height,
            table_width,
            batch,
            total_q,
            num_pages,
            score_blocks,
            fill_end,
            init_blocks,
            local_blocks,
            log_workgroups,
        )
        trace(heads, layout, arguments, fx.block_idx.x, fx.thread_idx.x)

    @flyc.jit  # type: ignore[untyped-decorator]
    def score_decode(
        q: fx.Int64,
        pages: fx.Int64,
        page_stride: fx.Int64,
        lut: fx.Int64,
        scores: fx.Int64,
        score_head_stride: fx.Int64,
        score_token_stride: fx.Int64,
        maxima: fx.Int64,
        maxima_head_stride: fx.Int64,
        maxima_token_stride: fx.Int64,
        table: fx.Int64,
        table_rows: fx.Int64,
        query_starts: fx.Int64,
        query_ends: fx.Int64,
        seq_lens: fx.Int64,
        table_height: fx.Int32,
        table_width: fx.Int32,
        batch: fx.Int32,
        total_q: fx.Int32,
        num_pages: fx.Int32,
        score_blocks: fx.Int32,
        fill_end: fx.Int32,
        init_blocks: fx.Int32,
        local_blocks: fx.Int32,
        log_workgroups: fx.Int32,
        workgroups: fx.Int32,
        stream: fx.Stream,
    ) -> None:
        kernel(
            q,
            pages,
            page_stride,
            lut,
            scores,
            score_head_stride,
            score_token_stride,
            maxima,
            maxima_head_stride,
            maxima_token_stride,
            table,
            table_rows,
            query_starts,
            query_ends,
            seq_lens,
            table_height,
            table_width,
            batch,
            total_q,
            num_pages,
            score_blocks,
            fill_end,
            init_blocks,
            local_blocks,
            log_workgroups,
            value_attrs={"rocdl.waves_per_eu": geo.WAVES_PER_SIMD},
        ).launch(grid=(workgroups, 1, 1), block=(geo.THREADS, 1, 1), stream=stream)

    return cast("Callable[..., None]", score_decode)


def compile_for(heads: int, objects: Path | None = None, layout: Layout = DEFAULT) -> str:
    """See :func:`kernel.backends.flydsl.ahead.compile_ahead`."""
    numbers = [*[0] * len(fields(DecodeArguments)), 1]
    return compile_ahead(build(heads, layout), kernel_names.score_decode(heads, layout), numbers, objects)
