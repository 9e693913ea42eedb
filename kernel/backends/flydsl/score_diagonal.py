"""A block that the diagonal crosses anywhere, where the item's first position is no multiple of 128.

The M-tile ``first`` in which the diagonal of N-tile 0 starts is known at run time only. M-tiles before it are
whole for every N-tile: a loop. From there on, step i = m - first needs a mask for N-tiles i (the diagonal
starts) and i - 1 (it ends), none for later ones, and earlier ones see nothing. So steps 0 .. 8 are nine
pieces of code, each entered when its M-tile lies in the block. Tiles wholly in the future are never
multiplied.

Fewer registers than a block of 64 masked MFMAs, and fewer clocks the less of the block is seen; but the waits
between pieces are not hidden under the wave's own MFMAs.
"""

from __future__ import annotations

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl.device import Value
from kernel.backends.flydsl.score_block import BlockScorer
from kernel.contract import BLOCK_TOKENS, HEAD_DIM

_REDUCE_BEHIND = 2
"""MFMAs between an N-tile's product and its reduction: a result takes about one and a half of them."""


def score_unaligned_diagonal(
    scorer: BlockScorer, slots: tuple[Value, Value], keys: Value, raw: list[Value], block: Value
) -> tuple[list[Value], Value]:
    """Score a block of which the wave's rows see parts.

    Args:
        scorer: the wave.
        slots: LDS offsets of this block's keys and of the next one's.
        keys: this block's first M-tile.
        raw: this lane's part of the next block's page.
        block: the block.

    Returns:
        The scores of this lane's rows and the next block's first M-tile.
    """
    for step in scorer.dequantise_steps(raw, slots[1]):
        step()
    ahead = scorer.wave_position - block * BLOCK_TOKENS
    first = d.shift_right_signed(ahead, 4)
    starts, ends = scorer.diagonal_masks(ahead & (geo.MFMA_ROWS - 1))

    def tile(m: Value, values: list[Value], start_values: dict[int, Value]) -> list[Value]:
        """M-tile m of the N-tiles that have start values; carries the M-tile's keys and the maxima so far."""
        running = values[1:]
        read = d.minimum(m + 1, geo.M_TILES - 1) * (geo.MFMA_ROWS * HEAD_DIM) + d.as_int32(slots[0])
        following = scorer.read_keys(read, 0)
        tile_keys = d.pin(values[0])
        products: dict[int, Value] = {}

        def reduce(nt: int) -> None:
            for i in range(geo.ACCUMULATORS):
                running[nt] = d.max_f32(running[nt], d.element(products[nt], i))
            running[nt] = d.pin(running[nt])

        due: list[int] = []
        for nt, start in start_values.items():
            products[nt] = d.mfma(tile_keys, scorer.queries[nt], start)
            if len(due) == _REDUCE_BEHIND:
                reduce(due.pop(0))
            due.append(nt)
            d.fence()
        for nt in due:
            reduce(nt)
        d.fence()
        return [following, *running]

    whole = dict.fromkeys(range(geo.N_TILES), scorer.zero)
    unseen = [d.f32(float("-inf"))] * geo.N_TILES
    values = d.for_range(0, first, 1, [keys, *unseen], lambda m, carried: tile(m, carried, whole))
    types = [value.type for value in values]
    for i in range(geo.M_TILES + 1):
        m = first + i
        start_values = {i - 1: ends, i: starts, **dict.fromkeys(range(i + 1, geo.N_TILES), scorer.zero)}
        start_values = {nt: start for nt, start in start_values.items() if 0 <= nt < geo.N_TILES}
        before = values
        values = d.if_else(
            (m >= 0) & (m < geo.M_TILES),
            types,
            lambda m=m, before=before, starts=start_values: tile(m, list(before), starts),  # type: ignore[misc]
            lambda before=before: before,  # type: ignore[misc]
        )
    d.lds_barrier()
    following = scorer.read_keys(slots[1], 0)
    return scorer.across_lanes(values[1:]), following
