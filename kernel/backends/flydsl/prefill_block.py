"""The scores of one key block: dequantisation into LDS, MFMAs, causal mask and the max over tokens.

A wave multiplies a block's eight M-tiles (16 tokens) by its eight N-tiles (16 query rows). While the matrix
unit works on one M-tile, the vector unit reduces the M-tile before it and dequantises a part of the next
block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import flydsl.expr as fx
from flydsl.expr.typing import T

from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl import ops as d
from kernel.backends.flydsl.ops import Value
from kernel.contract import BLOCK_TOKENS, CODE_BYTES, HEAD_DIM

HIDE_STEP, HIDE_MOST = 2**23 + 1, 0xCD000000 - 2**32
"""Causal mask as integers: step for each position that a token lies after the query, and lower clamp. Read as
fp32, -HIDE_STEP is about -3e38 and HIDE_MOST is -2^27; scores stay within 128 * 448 * 448 < 2^25."""
LOOK_AHEAD = 1
"""MFMAs between the computation of a start value and its use: an MFMA right behind it would wait."""
FILL_TILES = geo.M_TILES - 2
"""M-tiles that hide the next block's dequantisation; its last bytes are written a tile before the barrier."""

StartValue = Callable[[int, int], Value]
"""The accumulators' start value of (M-tile, N-tile)."""


def every_tile(_m: int) -> int:
    """The first N-tile of a fully visible M-tile."""
    return 0


@dataclass
class BlockState:
    """A block between its MFMAs and its scores: ``accumulators`` [M-tile][N-tile], ``running`` maxima
    [N-tile]."""

    accumulators: dict[int, dict[int, Value]]
    running: list[Value]
    scores: list[Value]


class BlockScorer:
    """Traces the work of one wave on one block.

    Args:
        log_heads: log2 of the index heads.
        wave: this wave's number in the workgroup, uniform.
        lane: this lane's number in the wave.
        wave_position: position of the wave's first query, uniform.
    """

    def __init__(self, log_heads: int, wave: fx.Int32, lane: fx.Int32, wave_position: fx.Int32) -> None:
        self.log_heads = log_heads
        self.wave, self.lane = wave, lane
        self.wave_position = wave_position
        self.quarter, self.row = d.shift_right(lane, geo.LOG_MFMA_ROWS), lane & (geo.MFMA_ROWS - 1)
        self.lds = d.shared_memory(geo.LDS_BYTES)
        self.zero = d.pack([d.f32(0.0)] * geo.ACCUMULATORS, T.f32)
        self.queries: list[Value] = []
        self._place_keys()

    def _place_keys(self) -> None:
        """LDS addresses. 16-byte column c of key row t is stored at column c ^ ((t >> 1) & 7), against bank
        conflicts."""
        swizzle = d.shift_right(self.row, 1)
        column = self.quarter ^ swizzle
        self.read_at = [
            d.offset(self.lds, self.row * HEAD_DIM + c * geo.OPERAND_BYTES)
            for c in (column, column ^ geo.COLUMNS // 2)
        ]
        # Lane l of wave w dequantises token 32 w + l / 2, dims 64 (l % 2) .. + 63: columns 4 (l % 2) .. + 3.
        token = self.wave * (BLOCK_TOKENS // geo.WAVES) + d.shift_right(self.lane, 1)
        column = (self.lane & 1) * (geo.COLUMNS // 2) ^ (d.shift_right(token, 1) & (geo.COLUMNS - 1))
        self.write_at = [
            d.offset(self.lds, token * HEAD_DIM + (column ^ j) * geo.OPERAND_BYTES)
            for j in range(geo.COLUMNS // 2)
        ]
        page_lane = self.wave * geo.LANES + self.lane
        self.code_offset = page_lane * geo.LANE_CODE_BYTES
        self.scale_offset = page_lane * geo.LANE_SCALE_BYTES + CODE_BYTES

    # ---- keys ----
    def dequantise_steps(self, raw: list[Value], slot: Value) -> list[Callable[[], None]]:
        """Steps of the dequantisation of this lane's part of a block, to be interleaved with MFMAs."""
        codes = [d.element(raw[k // 4], k % 4) for k in range(8)]
        magnitudes: dict[int, Value] = {}
        words: dict[int, Value] = {}

        def look_up(k: int) -> None:
            entry = d.offset(self.lds, d.lut_offset(raw[2], k))
            magnitudes[k] = d.load(2, d.offset(entry, geo.LUT_AT))

        def even(k: int) -> None:
            words[2 * k] = d.even_dims(codes[k], magnitudes[k // 2])

        def odd(k: int) -> None:
            words[2 * k + 1] = d.odd_dims(codes[k], magnitudes[k // 2])

        def write(column: int) -> None:
            key = d.pack([words[4 * column + k] for k in range(4)], T.i32)
            d.store(key, d.offset(self.write_at[column], slot), geo.OPERAND_BYTES)

        steps: list[Callable[[], None]] = [lambda k=k: look_up(k) for k in range(4)]  # type: ignore[misc]
        for column in range(4):
            for k in (2 * column, 2 * column + 1):
                steps += [lambda k=k: even(k), lambda k=k: odd(k)]  # type: ignore[misc]
            steps.append(lambda column=column: write(column))  # type: ignore[misc]
        return steps

    def read_keys(self, slot: Value, m: int) -> Value:
        """M-tile m of a dequantised block as operand A."""
        columns = [
            d.load(4, d.offset(d.offset(at, slot), m * geo.MFMA_ROWS * HEAD_DIM)) for at in self.read_at
        ]
        return d.concatenate(*columns)

    # ---- one block ----
    def diagonal_masks(self, ahead: fx.Int32) -> list[Value]:
        """Start values of the two M-tiles that the diagonal of an N-tile crosses.

        With ``ahead`` (0 .. 15) how far the N-tile's first query stands after the M-tile's first token, row n
        sees token 4 g + i of that M-tile when

            ahead + n div H - 4 g - i  >=  0

        and of the M-tile after it when 16 less is. clamp(that * HIDE_STEP, HIDE_MOST, 0) as an integer is 0
        or, read as fp32, at most -2^27. Integers on purpose: float additions would be paired into
        v_pk_add_f32, which cannot issue beside an MFMA.
        """
        lane = fx.Int32(d.pin(self.lane))  # else this is computed before the loop and held
        row = d.shift_right(lane & (geo.MFMA_ROWS - 1), self.log_heads)
        ahead = ahead + row - d.shift_right(lane, geo.LOG_MFMA_ROWS) * geo.ACCUMULATORS
        masks = []
        for behind in (0, geo.MFMA_ROWS):
            quad = [(ahead - (i + behind)) * HIDE_STEP for i in range(geo.ACCUMULATORS)]
            masks.append(d.pin(d.as_f32x4([d.min_i32(d.max_i32(x, HIDE_MOST), 0) for x in quad])))
        return masks

    def diagonal_start(self, ahead: fx.Int32) -> StartValue:
        """Start values of a block whose first token is ``ahead`` (0 .. 15) before the wave's first query."""
        masks = self.diagonal_masks(ahead)
        return lambda m, nt: self.zero if nt > m else masks[m - nt]

    def whole_start(self, _m: int, _nt: int) -> Value:
        return self.zero

    def _reduce(self, state: BlockState, m: int, nt: int) -> None:
        """running[nt] = max(running[nt], the 4 tokens of M-tile m that this lane holds)."""
        tokens = [d.element(state.accumulators[m][nt], i) for i in range(geo.ACCUMULATORS)]
        values = tokens if m == 0 else [state.running[nt], *tokens]
        highest = values[0]
        for value in values[1:]:
            highest = d.max_f32(highest, value)
        state.running[nt] = highest

    def _cross_lane_steps(self, state: BlockState) -> list[Callable[[], None]]:
        """Maxima over the four token quarters of all N-tiles; pairing (0, 2), (1, 3) needs 6 swaps and 6
        maxima."""
        half: dict[int, Value] = {}

        def across_32(nt: int) -> None:
            half[nt] = d.fold(32, state.running[nt], state.running[nt + 2])

        def across_16(j: int) -> None:
            state.scores[j] = d.pin(
                d.fold(16, half[4 * j], half[4 * j + 1])
            )  # unpinned, both halves live to the store

        steps: list[Callable[[], None]] = []
        for j in range(geo.REDUCED_ROWS):
            steps += [
                lambda j=j: across_32(4 * j),  # type: ignore[misc]
                lambda j=j: across_32(4 * j + 1),  # type: ignore[misc]
                lambda j=j: across_16(j),  # type: ignore[misc]
            ]
        return steps

    def score(
        self,
        slots: tuple[Value, Value],
        keys: Value,
        raw: list[Value],
        start: StartValue,
        *,
        previous: BlockState | None = None,
        late: Callable[[], None] | None = None,
        first_tile: Callable[[int], int] = every_tile,
    ) -> tuple[BlockState, Value]:
        """MFMAs on the keys in slots[0], interleaved with the next block's dequantisation into slots[1] and
        the previous block's last reduction.

        Args:
            slots: LDS offsets of this block's keys and of the next one's.
            keys: this block's first M-tile.
            raw: this lane's part of the next block's page.
            start: the accumulators' start values.
            previous: the block before, its last M-tile not yet reduced.
            late: traced where the next wait for LDS is farthest away: a scalar load makes that a full wait.
            first_tile: the first N-tile that sees a token of an M-tile; earlier ones are skipped.

        Returns:
            The block, its last M-tile not yet reduced, and the next block's first M-tile.
        """
        state = BlockState({}, [None] * geo.N_TILES, [None] * geo.REDUCED_ROWS)
        pairs = [(m, nt) for m in range(geo.M_TILES) for nt in range(first_tile(m), geo.N_TILES)]
        fill = self.dequantise_steps(raw, slots[1])
        fill_under = sum(m < FILL_TILES for m, _ in pairs)
        filled = 0
        due: list[tuple[BlockState, int, int]] = []
        if previous is not None:
            due = [(previous, geo.M_TILES - 1, nt) for nt in sorted(previous.accumulators[geo.M_TILES - 1])]
        following = keys
        for done, (m, nt) in enumerate(pairs, start=1):
            if nt == first_tile(m):
                keys = following
                last = m == geo.M_TILES - 1
                if last:
                    # Every wave holds its last tile of this block and has written its part of the next one.
                    d.lds_barrier()
                    d.fence()
                following = self.read_keys(slots[1], 0) if last else self.read_keys(slots[0], m + 1)
                if last and late is not None:
                    late()
                keys = d.pin(keys)
                state.accumulators[m] = {}
                tail = self._cross_lane_steps(previous) if previous is not None and m == 1 else []
            left = sum(pair[0] == m for pair in pairs[done - 1 :])
            for _ in range(-(-len(due) // left)):
                of, tile, row_tile = due.pop(0)
                self._reduce(of, tile, row_tile)
                of.running[row_tile] = d.pin(of.running[row_tile])
            state.accumulators[m][nt] = d.mfma(keys, self.queries[nt], start(m, nt))
            if done - 1 + LOOK_AHEAD < len(pairs):
                start(*pairs[done - 1 + LOOK_AHEAD])
            if tail:
                tail.pop(0)()
            while filled < len(fill) and filled * fill_under < done * len(fill):
                fill[filled]()
                filled += 1
            d.fence()
            if left == 1:
                due = [(state, m, column) for column in sorted(state.accumulators[m])]
        return state, following

    def across_lanes(self, running: list[Value]) -> list[Value]:
        """The scores of this lane's rows from each lane's maxima."""
        state = BlockState({}, running, [None] * geo.REDUCED_ROWS)
        for step in self._cross_lane_steps(state):
            step()
        return state.scores

    def finish(self, state: BlockState) -> list[Value]:
        """Completes the reduction that :meth:`score` left to the next block; the scores of this lane's
        rows."""
        for nt in sorted(state.accumulators[geo.M_TILES - 1]):
            self._reduce(state, geo.M_TILES - 1, nt)
        return self.across_lanes(state.running)


# ---- The unaligned diagonal ----

_REDUCE_BEHIND = 2
"""MFMAs between an N-tile's product and its reduction: a result takes about one and a half of them."""


def score_unaligned_diagonal(
    scorer: BlockScorer, slots: tuple[Value, Value], keys: Value, raw: list[Value], block: Value
) -> tuple[list[Value], Value]:
    """Score a block that the diagonal crosses anywhere, where the item's first position starts no block.

    The M-tile ``first`` in which the diagonal of N-tile 0 starts is known at run time only. M-tiles before it
    are fully visible to every N-tile: a loop. From there on, step i = m - first needs a mask for N-tiles i
    (the diagonal starts) and i - 1 (it ends), none for later ones, and earlier ones see nothing: steps 0 .. 8
    are nine branches, each taken when its M-tile lies in the block. Tiles wholly in the future are never
    multiplied.

    Takes fewer registers than a block of 64 masked MFMAs, and fewer clocks the less of the block is visible;
    the waits between steps are not hidden under the wave's own MFMAs.

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
    first = d.shift_right_signed(ahead, geo.LOG_MFMA_ROWS)
    starts, ends = scorer.diagonal_masks(ahead & (geo.MFMA_ROWS - 1))

    def tile(m: Value, values: list[Value], start_values: dict[int, Value]) -> list[Value]:
        """M-tile m of the N-tiles that have start values; carries the M-tile's keys and the maxima so far."""
        running = values[1:]
        read = d.min_i32(m + 1, geo.M_TILES - 1) * (geo.MFMA_ROWS * HEAD_DIM) + d.as_int32(slots[0])
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
