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

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl.device import Value
from kernel.page import BLOCK_TOKENS, CODE_BYTES, HEAD_DIM

HIDE_STEP, HIDE_MOST = 2**23 + 1, 0xCD000000 - 2**32
"""As integers: what a token adds to the mask for each position that it lies after the query, and where that
ends. Read as fp32, -HIDE_STEP is about -3e38 and HIDE_MOST is -2^27; scores stay within 128 * 448 * 448 <
2^25."""
LOOK_AHEAD = 1
"""MFMAs between the making of a start value and its use: an MFMA right after it would wait."""
FILL_TILES = geo.M_TILES - 2
"""M-tiles that the dequantisation of the next block is spread over; its last bytes are written a tile before
the barrier."""

StartValue = Callable[[int, int], Value]
"""The accumulators' start value of (M-tile, N-tile)."""


@dataclass
class BlockState:
    """A block between its MFMAs and its scores: ``accumulators`` [M-tile][N-tile], ``running`` maxima
    [N-tile]."""

    accumulators: dict[int, list[Value]]
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
        self.quarter, self.row = d.shift_right(lane, 4), lane & (geo.MFMA_ROWS - 1)
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
            d.offset(self.lds, self.row * HEAD_DIM + c * geo.OPERAND_BYTES) for c in (column, column ^ 4)
        ]
        # Lane l of wave w dequantises token 32 w + l / 2, dims 64 (l % 2) .. + 63, which are columns 4 (l %
        # 2) .. + 3.
        token = self.wave * 32 + d.shift_right(self.lane, 1)
        column = (self.lane & 1) * 4 ^ (d.shift_right(token, 1) & 7)
        self.write_at = [
            d.offset(self.lds, token * HEAD_DIM + (column ^ j) * geo.OPERAND_BYTES)
            for j in range(geo.COLUMNS // 2)
        ]
        page_lane = self.wave * geo.LANES + self.lane
        self.code_offset = page_lane * geo.LANE_CODE_BYTES
        self.scale_offset = page_lane * geo.LANE_SCALE_BYTES + CODE_BYTES

    # ---- keys
    # ------------------------------------------------------------------------------------------------
    def dequantise_steps(self, raw: list[Value], slot: Value) -> list[Callable[[], None]]:
        """The dequantisation of this lane's part of a block, as small steps to be spread under MFMAs."""
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

    # ---- one block
    # -------------------------------------------------------------------------------------------
    def causal_start(self, block: Value) -> StartValue:
        """Start values for a block that the diagonal crosses: 0, or hugely negative where the token is after
        the query.

        Token 16 m + 4 g + i is visible from row n of N-tile nt when

            ahead = wave_position - 128 block + n div H - 4 g - i  +  16 (nt - m)  >=  0     (|ahead| <= 254)

        clamp(ahead * HIDE_STEP, HIDE_MOST, 0) as an integer is 0 or, read as fp32, at most -2^27. Two
        instructions a value, and one quad serves every tile with the same nt - m. Integers on purpose: float
        additions would be paired into v_pk_add_f32, which cannot issue beside an MFMA, and float constants
        would be held in scalar registers.
        """
        lane_part = d.shift_right(self.row, self.log_heads) - self.quarter * geo.ACCUMULATORS
        ahead = lane_part + (self.wave_position - block * BLOCK_TOKENS)
        base = [(ahead - i) * HIDE_STEP for i in range(geo.ACCUMULATORS)]
        made: dict[int, Value] = {}

        def start(m: int, nt: int) -> Value:
            diagonal = nt - m
            if diagonal not in made:
                step = geo.MFMA_ROWS * diagonal * HIDE_STEP
                quad = [d.minimum(d.maximum(x + d.i32(step), HIDE_MOST), 0) for x in base]
                made[diagonal] = d.pin(d.as_f32x4(quad))
            return made[diagonal]

        return start

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
        previous: BlockState | None,
        late: Callable[[], None] | None,
    ) -> tuple[BlockState, Value]:
        """64 MFMAs on the keys in slots[0]; under them the next block's dequantisation into slots[1] and the
        last reduction of the previous block.

        Args:
            late: runs where the next wait for LDS is farthest away, since a scalar load makes that a full
            wait.

        Returns:
            The block, its last M-tile not yet reduced, and the next block's first M-tile.
        """
        state = BlockState({}, [None] * geo.N_TILES, [None] * geo.REDUCED_ROWS)
        fill = self.dequantise_steps(raw, slots[1])
        filled = 0
        for m in range(geo.M_TILES):
            last = m == geo.M_TILES - 1
            if last:
                # Every wave holds its last tile of this block and has written its part of the next one.
                d.lds_barrier()
                d.fence()
            following = self.read_keys(slots[1], 0) if last else self.read_keys(slots[0], m + 1)
            if last and late is not None:
                late()
            keys = d.pin(keys)
            state.accumulators[m] = [None] * geo.N_TILES
            tail = self._cross_lane_steps(previous) if previous is not None and m == 1 else []
            for nt in range(geo.N_TILES):
                behind = (state, m - 1) if m > 0 else (previous, geo.M_TILES - 1)
                if behind[0] is not None:
                    self._reduce(behind[0], behind[1], nt)
                    behind[0].running[nt] = d.pin(behind[0].running[nt])
                state.accumulators[m][nt] = d.mfma(keys, self.queries[nt], start(m, nt))
                done = m * geo.N_TILES + nt + 1
                if done - 1 + LOOK_AHEAD < geo.M_TILES * geo.N_TILES:
                    start(*divmod(done - 1 + LOOK_AHEAD, geo.N_TILES))
                if nt < len(tail):
                    tail[nt]()
                while filled < len(fill) and filled * FILL_TILES * geo.N_TILES < done * len(fill):
                    fill[filled]()
                    filled += 1
                d.fence()
            keys = following
        return state, keys

    def finish(self, state: BlockState) -> list[Value]:
        """The reduction that :meth:`score` leaves to the next block, and the scores of this lane's rows."""
        for nt in range(geo.N_TILES):
            self._reduce(state, geo.M_TILES - 1, nt)
        for step in self._cross_lane_steps(state):
            step()
        return state.scores
