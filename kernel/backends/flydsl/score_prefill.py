"""Prefill scores of NVFP4 key pages on gfx950.

    scores[head, token, block] = max over the causal tokens t of the block of  q[token, head] . k[t]
    maxima[head, token, group] = max of the scores of 16 consecutive blocks, sentinels included

One workgroup scores one work item of :mod:`kernel.plan`: up to 512 query rows (row = token * H + head, so
that heads share the work on keys) of one request, against a run of the request's blocks. Each block is one
page of 9,216 bytes; the four waves dequantise it together to E4M3 in LDS, a quarter each, while the matrix
units work on the block before.

    memory, 9,216 B a page       registers         LDS, 2 slots of 16 KB        registers
    codes, scales -----------> 32 + 4 B a lane --> E4M3 keys [128][128] ------> A: 16 keys
                  two blocks               LUT     one barrier a block          B: 16 query rows, loaded once
                  ahead                                                         D: fp32 [16 tokens][16 rows]

    lane = 16 g + n     A, B: row n, 16-byte columns g and g + 4 of its 128 bytes
                        D: tokens 4 g .. 4 g + 3 of row n

Keys are A, so that a lane's four accumulators are four consecutive TOKENS of one query row: the max over
tokens stays in the lane until the block is done. N-tile nt of wave w holds the queries

    token = 128 (w div H) + 16 nt + (16 / H) (w mod H) + n div H,     head = n mod H

so a wave's N-tiles lie 16 tokens apart for every H. Then the causal mask of M-tile m depends on nt - m alone,
and with H = 4 the four waves share the work near the diagonal evenly.

The mask is the start value of the accumulators: 0, or so negative that no score reaches it. Blocks that every
row of the item sees whole take an unrolled path without mask or sentinels, four blocks a trip; the rest take
one block a trip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import cast

import flydsl.compiler as flyc
import flydsl.expr as fx

from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl import kernel_names
from kernel.backends.flydsl.ahead import compile_ahead
from kernel.backends.flydsl.score_item import ItemScorer, KernelArguments


def build(heads: int) -> Callable[..., None]:
    """The FlyDSL launcher for ``heads`` index heads.

    Returns:
        A function of :class:`KernelArguments`' fields in order, the number of work items and a stream.
    """

    @flyc.kernel(name=kernel_names.score_prefill(heads), known_block_size=[geo.THREADS, 1, 1])  # type: ignore[untyped-decorator]
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
        work: fx.Int64,
        init_blocks: fx.Int32,
        local_blocks: fx.Int32,
    ) -> None:
        arguments = KernelArguments(
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
            work,
            init_blocks,
            local_blocks,
        )
        ItemScorer(heads, arguments, fx.block_idx.x, fx.thread_idx.x).run()

    @flyc.jit  # type: ignore[untyped-decorator]
    def score_prefill(
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
        work: fx.Int64,
        init_blocks: fx.Int32,
        local_blocks: fx.Int32,
        num_items: fx.Int32,
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
            work,
            init_blocks,
            local_blocks,
            value_attrs={"rocdl.waves_per_eu": geo.WAVES_PER_SIMD},
        ).launch(grid=(num_items, 1, 1), block=(geo.THREADS, 1, 1), stream=stream)

    return cast("Callable[..., None]", score_prefill)


def compile_for(heads: int, objects: Path | None = None) -> str:
    """See :func:`kernel.backends.flydsl.ahead.compile_ahead`."""
    numbers = [*[0] * (len(fields(KernelArguments)) - 2), 0, 1, 1]
    return compile_ahead(build(heads), kernel_names.score_prefill(heads), numbers, objects)
