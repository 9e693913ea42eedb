"""One wave's score of one page for up to 16 query rows: loads, dequantisation, MFMAs, the max over tokens.

    lane = 16 g + n     A: key row 16 m + n of M-tile m, B: query row n; both dims 32 g .. 32 g + 31
                        D: tokens 16 m + 4 g .. + 3 of query row n

The order of an MFMA's k is free as long as A and B agree on it, so a lane takes 16 CONSECUTIVE code bytes of
a key row: one load of 16 bytes a lane for each M-tile is the whole operand, 8 whole lines of 128 bytes. Of
each such row it needs 2 of the 8 scale bytes: two loads of 8 bytes a lane bring all scales of the page, and
lanes n, 16 + n, 32 + n, 48 + n exchange them.
"""

from __future__ import annotations

from collections.abc import Callable

import flydsl.expr as fx
from flydsl.expr.typing import T

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl.device import Value
from kernel.backends.flydsl.score_decode_arguments import LUT_AT
from kernel.contract import CODE_BYTES, GROUPS, TOKEN_CODE_BYTES

SCALE_LOADS = 2
PARTS = geo.M_TILES + SCALE_LOADS
"""Loads of a page: the codes of each M-tile, then the scales."""
LOAD_ORDER = (*range(geo.M_TILES, PARTS), *range(geo.M_TILES))
"""Scales come first: they are due first."""
LOOK_AHEAD = 2
"""M-tiles between the look-up of a scale and its use."""
_TILE_BYTES = geo.MFMA_ROWS * TOKEN_CODE_BYTES
_IMMEDIATE_BYTES = 4096
"""What a load's offset may add to its lane's."""
_LOW_HALVES, _HIGH_HALVES = 0x05040100, 0x07060302
"""Byte selectors: the low or high 16 bits of two dwords."""

StartValue = Callable[[int], Value]
"""The accumulators' start value of an M-tile."""


class PageScorer:
    """Traces the work of one wave on one page.

    Args:
        lds: the workgroup's LDS, which holds the LUT.
        lane: this lane's number in the wave.
    """

    def __init__(self, lds: Value, lane: fx.Int32) -> None:
        self.lds = lds
        quarter, row = d.shift_right(lane, 4), lane & (geo.MFMA_ROWS - 1)
        code = row * TOKEN_CODE_BYTES + quarter * geo.OPERAND_BYTES
        self._code_offsets = [fx.Int32(d.pin(code + base)) for base in range(0, CODE_BYTES, _IMMEDIATE_BYTES)]
        scale = quarter * (2 * geo.MFMA_ROWS * GROUPS) + row * GROUPS
        self._scale_offset = fx.Int32(d.pin(scale + CODE_BYTES))
        self.zero = d.pack([d.f32(0.0)] * geo.ACCUMULATORS, T.f32)
        self.queries: Value = None

    def load(self, page: Value, part: int) -> Value:
        """Part 0 .. 7: 16 code bytes of M-tile ``part``; 8, 9: scales of tokens 32 g + n, 32 g + 16 + n."""
        if part < geo.M_TILES:
            base, within = divmod(part * _TILE_BYTES, _IMMEDIATE_BYTES)
            return d.buffer_load(4, page, self._code_offsets[base] + within, d.NON_TEMPORAL)
        within = (part - geo.M_TILES) * geo.MFMA_ROWS * GROUPS
        return d.buffer_load(2, page, self._scale_offset + within, d.NON_TEMPORAL)

    def load_all(self, page: Value) -> list[Value]:
        """Every part, issued in ``LOAD_ORDER``."""
        parts: list[Value] = [None] * PARTS
        for part in LOAD_ORDER:
            parts[part] = self.load(page, part)
            d.fence()  # in the loop's order, or LLVM's waits there are for the worst of both
        return parts

    def score(
        self,
        raw: list[Value],
        following: Value | None,
        start: StartValue | None = None,
        late: Callable[[], None] | None = None,
    ) -> tuple[Value, list[Value]]:
        """The maximum over this lane's tokens of a page.

        Args:
            raw: the page's parts.
            following: descriptor of the page whose parts are loaded in their place.
            start: the accumulators' start values, 0 by default.
            late: runs under the last M-tile.

        Returns:
            The maximum, and the parts of the following page: loads only issued.
        """
        scales = self._spread(*raw[geo.M_TILES :])
        loaded: list[Value] = [None] * PARTS

        def refill(part: int) -> None:
            if following is not None:
                loaded[part] = self.load(following, part)

        refill(geo.M_TILES)
        refill(geo.M_TILES + 1)
        magnitudes = [self._look_up(scales, m) for m in range(LOOK_AHEAD)]
        d.fence()
        highest: Value = None
        accumulators: Value = None
        for m in range(geo.M_TILES):
            if m + LOOK_AHEAD < geo.M_TILES:
                magnitudes.append(self._look_up(scales, m + LOOK_AHEAD))
            keys = _dequantised(raw[m], magnitudes[m])
            refill(m)
            previous = accumulators
            accumulators = d.mfma(keys, self.queries, self.zero if start is None else start(m))
            if previous is not None:
                highest = _reduced(highest, previous)
            if m == geo.M_TILES - 1 and late is not None:
                late()
            d.fence()
        return d.pin(_reduced(highest, accumulators)), loaded

    def _spread(self, low: Value, high: Value) -> list[Value]:
        """The 4 x 4 exchange of scales: lanes hold all groups of M-tiles 2 g and 2 g + 1 and get groups 2 g
        and 2 g + 1 of all M-tiles; dword j has M-tile 2 j in its low half and 2 j + 1 in its high half."""
        even, odd = (d.swap(32, d.element(part, 0), d.element(part, 1)) for part in (low, high))
        spread: list[Value] = []
        for of_even, of_odd in zip(even, odd):
            halves = [d.permute_bytes(of_odd, of_even, half) for half in (_LOW_HALVES, _HIGH_HALVES)]
            spread += d.swap(16, *halves)
        return [d.pin(dword) for dword in spread]

    def _look_up(self, scales: list[Value], m: int) -> list[Value]:
        """The 8 magnitudes of each of this lane's two scales of M-tile m."""
        return [
            d.load(2, d.offset(d.offset(self.lds, d.lut_offset(scales[m // 2], 2 * (m % 2) + half)), LUT_AT))
            for half in range(2)
        ]


def _dequantised(codes: Value, magnitudes: list[Value]) -> Value:
    """16 code bytes as operand A: of each 8 dims the 4 even ones, then the 4 odd ones."""
    words: list[Value] = []
    for k in range(4):
        dword = d.element(codes, k)
        words += [of(dword, magnitudes[k // 2]) for of in (d.even_dims, d.odd_dims)]
    return d.pin(d.pack(words, T.i32))


def _reduced(highest: Value | None, accumulators: Value) -> Value:
    """The maximum of ``highest`` and the 4 tokens that this lane holds."""
    tokens = [d.element(accumulators, i) for i in range(geo.ACCUMULATORS)]
    values = tokens if highest is None else [highest, *tokens]
    # Pinned in twos, each is one instruction that no later MFMA is held up by.
    first = d.max_f32(d.max_f32(values[0], values[1]), values[2])
    rest = values[3:]
    second = d.max_f32(first, rest[0])
    return d.pin(second if len(rest) == 1 else d.max_f32(second, rest[1]))
