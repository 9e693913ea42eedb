"""Top-k of block scores on gfx950, exact and deterministic. One wave selects one row (head, token).

    block_ids[head, token, :] = the k blocks of the greatest scores[head, token, : num_blocks[token]], ties to
                                the lower id; score descending or ids ascending, -1 behind the last

Two kernels for each class of k (16, 32, 64):

    scan     from the scores: reads the row once, in chunks of 2,048 columns, the next one in flight
    group    from the scores and the maxima of groups of 16 columns: the k best groups, ordered by maximum and
             then by lower id, hold the k best columns, so a row reads its maxima and k groups of 64 bytes

The steps, on columns or on groups:

    bound    each lane keeps the maximum key of what it has seen. The 16th largest of the 64 lanes' maxima is
             a lower bound of the 16th best column. About 18 columns pass it whatever the contrast of the
             scores, because 16 of 64 lanes are hit by 18.4 columns thrown at random
    list     the columns that pass are appended to a list in LDS: ballot, prefix count
    place    of a candidate: the number of candidates that beat it, counted against the list

Waves share nothing: there is no barrier.

Floor at 32,768 rows of 4,096 blocks and 8 TB/s: 1 KB of maxima, 16 groups of 64 to 128 bytes and 64 bytes of
ids a row are 8.6 to 12.9 us; the scores alone, 16 KB a row, 67 us. 250 vector instructions a row are 13 us.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import flydsl.compiler as flyc
import flydsl.expr as fx

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl.ahead import compile_ahead
from kernel.backends.flydsl.geometry import LANES
from kernel.backends.flydsl.topk_candidates import SLICE, State
from kernel.backends.flydsl.topk_row import GROUP_CHUNK, QUAD, ROW_CHUNK, Cells, RowSelector, lds_bytes
from kernel.backends.flydsl.topk_variants import THREADS, WAVES, Variant
from kernel.plan import MAXIMA_BLOCKS


@dataclass(frozen=True)
class KernelArguments:
    """The kernel's arguments, in order; addresses in bytes, strides in cells."""

    scores: fx.Int64
    score_head_stride: fx.Int64
    score_token_stride: fx.Int64
    maxima: fx.Int64
    maxima_head_stride: fx.Int64
    maxima_token_stride: fx.Int64
    num_blocks: fx.Int64
    block_ids: fx.Int64
    id_head_stride: fx.Int64
    id_token_stride: fx.Int64
    columns: fx.Int32
    num_tokens: fx.Int32
    k: fx.Int32
    ascending: fx.Int32


class WaveRows:
    """Traces the kernel's body: the rows of this wave.

    Args:
        variant: which kernel.
        arguments: the kernel's arguments.
        workgroup: its number, and the head's.
        thread: number of this lane in the workgroup.
    """

    def __init__(
        self,
        variant: Variant,
        arguments: KernelArguments,
        workgroup: tuple[d.Value, d.Value],
        thread: d.Value,
    ) -> None:
        self.variant, self.arguments = variant, arguments
        wave = d.uniform(d.shift_right(thread, 6))
        grouped = variant.most_groups is not None
        own_bytes = lds_bytes(variant.best, grouped)
        lds = d.offset(d.shared_memory(WAVES * own_bytes), wave * own_bytes)
        self.selector = RowSelector(variant.best, thread & (LANES - 1), lds, grouped)
        self.first_token = (workgroup[0] * WAVES + wave) * variant.rows_per_wave
        self.head = workgroup[1]

    def run(self) -> None:
        """Select every row of the wave."""
        rows, num_tokens = self.variant.rows_per_wave, self.arguments.num_tokens
        if rows == 1:
            d.if_then(self.first_token < num_tokens, lambda: self._row(self.first_token))
            return

        def trip(token: fx.Int32, _: list[d.Value]) -> list[d.Value]:
            self._row(token)
            return []

        d.for_range(self.first_token, d.minimum(self.first_token + rows, num_tokens), 1, [], trip)

    def _row(self, token: fx.Int32) -> None:
        args, select = self.arguments, self.selector
        num = fx.Int32(d.scalar_load(1, args.num_blocks + d.wide(token) * 4))
        num = d.maximum(d.minimum(num, args.columns), 0)
        scores = Cells.at(
            self._cell(args.scores, args.score_head_stride, args.score_token_stride, token), num
        )
        ids = d.pointer(
            self._cell(args.block_ids, args.id_head_stride, args.id_token_stride, token), d.GLOBAL
        )

        def one_slice() -> list[d.Value]:
            return list(select.scan(scores, QUAD, SLICE, once=True))

        def chunks() -> list[d.Value]:
            return list(select.scan(scores, QUAD, ROW_CHUNK, once=False))

        def groups() -> list[d.Value]:
            maxima = self._cell(args.maxima, args.maxima_head_stride, args.maxima_token_stride, token)
            cells = Cells.at(maxima, d.shift_right(num + (MAXIMA_BLOCKS - 1), 4))
            most = self.variant.most_groups
            # A group a lane and load, not four: a row of few groups still has one in every lane.
            chunk, once = most or GROUP_CHUNK, bool(most)
            found = select.scan(cells, 1, chunk, once)
            bound = select.select_groups(found, most == LANES, select.most_found(chunk, once))
            return list(select.gather(scores, bound))

        grouped = self.variant.most_groups is not None
        types = [d.i32(0).type] * 2
        state = State(*d.if_else(num <= SLICE, types, one_slice, groups if grouped else chunks))
        select.emit(state, not grouped, ids, args.k, args.ascending != 0)

    def _cell(self, base: d.Value, head_stride: d.Value, token_stride: d.Value, token: fx.Int32) -> d.Value:
        """Address of a row's first cell."""
        return base + (d.wide(self.head) * head_stride + d.wide(token) * token_stride) * 4


def build(variant: Variant) -> Callable[..., None]:
    """The FlyDSL launcher of a kernel.

    Returns:
        A function of :class:`KernelArguments`' fields in order, the number of workgroups a head, the number
        of heads and a stream.
    """

    @flyc.kernel(name=variant.name, known_block_size=[THREADS, 1, 1])  # type: ignore[untyped-decorator]
    def kernel(
        scores: fx.Int64,
        score_head_stride: fx.Int64,
        score_token_stride: fx.Int64,
        maxima: fx.Int64,
        maxima_head_stride: fx.Int64,
        maxima_token_stride: fx.Int64,
        num_blocks: fx.Int64,
        block_ids: fx.Int64,
        id_head_stride: fx.Int64,
        id_token_stride: fx.Int64,
        columns: fx.Int32,
        num_tokens: fx.Int32,
        k: fx.Int32,
        ascending: fx.Int32,
    ) -> None:
        arguments = KernelArguments(
            scores,
            score_head_stride,
            score_token_stride,
            maxima,
            maxima_head_stride,
            maxima_token_stride,
            num_blocks,
            block_ids,
            id_head_stride,
            id_token_stride,
            columns,
            num_tokens,
            k,
            ascending,
        )
        WaveRows(variant, arguments, (fx.block_idx.x, fx.block_idx.y), fx.thread_idx.x).run()

    @flyc.jit  # type: ignore[untyped-decorator]
    def topk(
        scores: fx.Int64,
        score_head_stride: fx.Int64,
        score_token_stride: fx.Int64,
        maxima: fx.Int64,
        maxima_head_stride: fx.Int64,
        maxima_token_stride: fx.Int64,
        num_blocks: fx.Int64,
        block_ids: fx.Int64,
        id_head_stride: fx.Int64,
        id_token_stride: fx.Int64,
        columns: fx.Int32,
        num_tokens: fx.Int32,
        k: fx.Int32,
        ascending: fx.Int32,
        workgroups: fx.Int32,
        heads: fx.Int32,
        stream: fx.Stream,
    ) -> None:
        kernel(
            scores,
            score_head_stride,
            score_token_stride,
            maxima,
            maxima_head_stride,
            maxima_token_stride,
            num_blocks,
            block_ids,
            id_head_stride,
            id_token_stride,
            columns,
            num_tokens,
            k,
            ascending,
            value_attrs={"rocdl.waves_per_eu": 3} if variant.most_groups is None else None,
        ).launch(grid=(workgroups, heads, 1), block=(THREADS, 1, 1), stream=stream)

    return cast("Callable[..., None]", topk)


def compile_for(variant: Variant, objects: Path | None = None) -> str:
    """See :func:`kernel.backends.flydsl.ahead.compile_ahead`."""
    numbers = [*[0] * len(fields(KernelArguments)), 1, 1]
    return compile_ahead(build(variant), variant.name, numbers, objects)
