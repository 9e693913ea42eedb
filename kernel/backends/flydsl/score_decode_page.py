"""One wave's score of one page for up to 16 query rows: dequantisation, MFMAs, the max over tokens.

    lane = 16 g + n     A: key row 16 m + n of M-tile m, B: query row n; both dims 32 g .. 32 g + 31
                        D: tokens 16 m + 4 g .. + 3 of query row n

The order of an MFMA's k is free as long as A and B agree on it, so a lane takes 16 CONSECUTIVE code bytes of
a key row, and 2 of the row's 8 scale bytes. It takes the scales of whole rows, and lanes n, 16 + n, 32 + n,
48 + n exchange them. How pages come to the lanes differs: ``score_decode_registers.py`` and
``score_decode_staged.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from flydsl.expr.typing import T

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl.device import Value
from kernel.backends.flydsl.score_decode_arguments import LUT_AT

LOOK_AHEAD = 2
"""M-tiles between the look-up of a scale and its use."""
_LOW_HALVES, _HIGH_HALVES = 0x05040100, 0x07060302
"""Byte selectors: the low or high 16 bits of two dwords."""

StartValue = Callable[[int], Value]
"""The accumulators' start value of an M-tile."""


class PageScorer(ABC):
    """Traces the work of one wave on one page.

    Args:
        lds: the workgroup's LDS, which holds the LUT.
    """

    depth: ClassVar[int]
    """Pages that a wave has in flight, each in a slot of its own."""
    values: ClassVar[int]
    """Values that a page in flight is carried in."""

    def __init__(self, lds: Value) -> None:
        self.lds = lds
        self.zero = d.pack([d.f32(0.0)] * geo.ACCUMULATORS, T.f32)
        self.queries: Value = None

    @abstractmethod
    def load_scales(self, page: Value, slot: int) -> list[Value]:
        """Request a page's scales into a slot: the first ``values`` of the page."""

    @abstractmethod
    def load_codes(self, page: Value, slot: int, m: int) -> list[Value]:
        """Request the codes of M-tile m: the next values."""

    @abstractmethod
    def scales(self, page: list[Value], slot: int, younger: int) -> tuple[Value, Value]:
        """The 8 scales of tokens 32 g + n and 32 g + 16 + n, two dwords each.

        Args:
            page: its values.
            slot: its slot.
            younger: M-tiles of codes requested after them, at least; and of pages, whose scales count as one.
        """

    @abstractmethod
    def codes(self, page: list[Value], slot: int, m: int, younger: int) -> Value:
        """16 code bytes of M-tile m; ``younger`` as for :meth:`scales`."""

    @abstractmethod
    def settle(self) -> None:
        """Before slots are loaded anew: nothing may be on its way into them."""

    def load(self, page: Value, slot: int) -> list[Value]:
        """Request a whole page, in the order in which it is due."""
        values: list[Value] = []
        for part in range(-1, geo.M_TILES):
            values += self.load_scales(page, slot) if part < 0 else self.load_codes(page, slot, part)
            d.fence()  # in the loop's order, or LLVM's waits there are for the worst of both
        return values

    def score(
        self,
        page: list[Value],
        slot: int,
        following: Value | None,
        *,
        pages_after: int,
        start: StartValue | None = None,
        late: Callable[[], None] | None = None,
    ) -> tuple[Value, list[Value]]:
        """The maximum over this lane's tokens of a page.

        Args:
            page: the page's values.
            slot: where it is.
            following: descriptor of the page that is requested into its place, part by part.
            pages_after: pages requested after this one, at least.
            start: the accumulators' start values, 0 by default.
            late: runs under the last M-tile.

        Returns:
            The maximum, and the values of the following page.
        """
        loaded: list[Value] = []
        requested = 0
        after = pages_after * (1 + geo.M_TILES)

        def younger(part: int) -> int:
            return geo.M_TILES - 1 - part + after + requested

        scales = self._spread(*self.scales(page, slot, younger(-1)))
        if following is not None:
            loaded += self.load_scales(following, slot)
            requested += 1
        codes = [self.codes(page, slot, 0, younger(0))]
        magnitudes = [self._look_up(scales, m) for m in range(LOOK_AHEAD)]
        d.fence()
        highest: Value = None
        accumulators: Value = None
        for m in range(geo.M_TILES):
            if m + 1 < geo.M_TILES:
                codes.append(self.codes(page, slot, m + 1, younger(m + 1)))
            if m + LOOK_AHEAD < geo.M_TILES:
                magnitudes.append(self._look_up(scales, m + LOOK_AHEAD))
            keys = _dequantised(codes[m], magnitudes[m])
            if following is not None:
                loaded += self.load_codes(following, slot, m)
                requested += 1
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
