"""One wave's score of one page for up to 16 query rows: dequantisation, MFMAs, the max over tokens.

    lane = 16 g + n     A: key row 16 m + n of M-tile m, B: query row n; both dims 32 g .. 32 g + 31
                        D: tokens 16 m + 4 g .. + 3 of query row n

The order of an MFMA's k is free as long as A and B agree on it, so a lane takes 16 CONSECUTIVE code bytes of
a key row, and 2 of the row's 8 scale bytes. It takes the scales of whole rows, and lanes n, 16 + n, 32 + n,
48 + n exchange them. Page staging differs: :class:`RegisterPages` and :class:`StagedPages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl import ops as d
from kernel.backends.flydsl.geometry import DecodeArguments, formats
from kernel.backends.flydsl.ops import Value
from kernel.contract import CODE_BYTES, GROUPS, PAGE_BYTES, TOKEN_CODE_BYTES

TRIP_BLOCKS = 4
"""Blocks that a wave scores in one trip, and pages that it has in flight."""
SPREAD_GROUPS = 2
"""Most groups of 16 blocks of a workgroup whose four waves share each group."""

PARTIAL_BYTES = geo.WAVES * geo.MAX_ROWS * 4
"""Maxima of a shared group, one of each wave and row."""
PLACE_BYTES = geo.MAX_ROWS * 8
"""Addresses of a shared group's maxima, one of each row; 0 where nothing is to be stored."""
REQUEST_BYTES = 16
"""A request in LDS: table row, first query, end of its queries, length."""
LUT_AT = 0
PARTIALS_AT = LUT_AT + geo.LUT_ENTRIES * geo.LUT_ENTRY_BYTES
PLACES_AT = PARTIALS_AT + SPREAD_GROUPS * PARTIAL_BYTES
REQUESTS_AT = PLACES_AT + SPREAD_GROUPS * PLACE_BYTES
LDS_BYTES = REQUESTS_AT + geo.THREADS * REQUEST_BYTES


def load_argument(name: str) -> Any:
    """An argument of the kernel, read from its argument segment here and now.

    All 40 words do not fit the scalar registers beside the loop's: what is used only before or after the loop
    is read there.
    """
    is_64 = formats(DecodeArguments)[name] == "q"
    words = d.scalar_load(2 if is_64 else 1, _segment() + geo.offset(DecodeArguments, name))
    return fx.Int64(llvm.BitcastOp(T.i64, words).result) if is_64 else fx.Int32(words)


def _segment() -> fx.Int64:
    """Address of the argument segment, opaque to LLVM: a load from it stays where it is traced."""
    kind = ir.Type.parse(f"!llvm.ptr<{d.CONSTANT}>")
    segment = llvm.call_intrinsic(kind, "llvm.amdgcn.kernarg.segment.ptr", [], [], [])
    return fx.Int64(d.pin_scalar(llvm.ptrtoint(T.i64, segment)))


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
    def drain(self) -> None:
        """Wait until no load into a slot is in flight."""

    def load(self, page: Value, slot: int) -> list[Value]:
        """Request a whole page, in the order in which it is due."""
        values: list[Value] = []
        for part in range(-1, geo.M_TILES):
            values += self.load_scales(page, slot) if part < 0 else self.load_codes(page, slot, part)
            d.fence()  # the loop's order: else LLVM's waits there cover the worse of both
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
            late: traced under the last M-tile.

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
        even, odd = (d.permlane_swap(32, d.element(part, 0), d.element(part, 1)) for part in (low, high))
        spread: list[Value] = []
        for of_even, of_odd in zip(even, odd):
            halves = [d.permute_bytes(of_odd, of_even, half) for half in (_LOW_HALVES, _HIGH_HALVES)]
            spread += d.permlane_swap(16, *halves)
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
    # Pinned in pairs, each is one v_max3 that delays no later MFMA.
    first = d.max_f32(d.max_f32(values[0], values[1]), values[2])
    rest = values[3:]
    second = d.max_f32(first, rest[0])
    return d.pin(second if len(rest) == 1 else d.max_f32(second, rest[1]))


# ---- Page staging ----

_SCALE_LOADS = 2
_TILE_BYTES = geo.MFMA_ROWS * TOKEN_CODE_BYTES
_TILE_SCALE_BYTES = geo.MFMA_ROWS * GROUPS
_IMMEDIATE_BYTES = 4096
"""Range of a load's immediate offset; a DMA adds it in memory and in LDS alike."""


class RegisterPages(PageScorer):
    """Pages in registers.

    For each M-tile one load of 16 bytes a lane is the whole operand, 8 whole lines of 128 bytes; two loads of
    8 bytes a lane bring the scales. Four pages in flight take 144 registers of a lane. Neighbouring lanes
    read 64 bytes apart; the address unit's cost of that is not known without the device.

    Args:
        lds: the workgroup's LDS, which holds the LUT.
        lane: this lane's number in the wave.
    """

    depth = 4
    values = _SCALE_LOADS + geo.M_TILES

    def __init__(self, lds: Value, lane: fx.Int32) -> None:
        super().__init__(lds)
        quarter, row = d.shift_right(lane, geo.LOG_MFMA_ROWS), lane & (geo.MFMA_ROWS - 1)
        code = row * TOKEN_CODE_BYTES + quarter * geo.OPERAND_BYTES
        self._code_offsets = [fx.Int32(d.pin(code + base)) for base in range(0, CODE_BYTES, _IMMEDIATE_BYTES)]
        scale = quarter * (_SCALE_LOADS * _TILE_SCALE_BYTES) + row * GROUPS
        self._scale_offset = fx.Int32(d.pin(scale + CODE_BYTES))

    def load_scales(self, page: Value, slot: int) -> list[Value]:  # noqa: ARG002
        """Scales of tokens 32 g + n, and of 32 g + 16 + n."""
        return [
            d.buffer_load(2, page, self._scale_offset + k * _TILE_SCALE_BYTES, d.NON_TEMPORAL)
            for k in range(_SCALE_LOADS)
        ]

    def load_codes(self, page: Value, slot: int, m: int) -> list[Value]:  # noqa: ARG002
        base, within = divmod(m * _TILE_BYTES, _IMMEDIATE_BYTES)
        return [d.buffer_load(4, page, self._code_offsets[base] + within, d.NON_TEMPORAL)]

    def scales(self, page: list[Value], slot: int, younger: int) -> tuple[Value, Value]:  # noqa: ARG002
        low, high = page[:_SCALE_LOADS]
        return low, high

    def codes(self, page: list[Value], slot: int, m: int, younger: int) -> Value:  # noqa: ARG002
        return page[_SCALE_LOADS + m]

    def drain(self) -> None:
        """Loads into registers write in order."""


_DEPTH = 2
STAGED_LDS_BYTES = LDS_BYTES + geo.WAVES * _DEPTH * PAGE_BYTES


class StagedPages(PageScorer):
    """Pages in LDS, written by DMA.

    A DMA writes the 64 lanes' 16 bytes one after the other, so neighbouring lanes can read neighbouring
    memory: the friendliest order for the address unit, at 144 clocks of LDS a page and CU (prediction). LDS
    holds two pages of each of eight waves.

        LDS of an M-tile    16-byte slot 4 n + (g ^ (n >> 2 & 3)) holds bytes 16 g .. 16 g + 15 of key row n

    so that the 16 lanes that read one column touch each bank once.

    LLVM would wait for every DMA in flight before any LDS read, look-ups included. Inline assembly hides the
    DMA from it, and the waits are traced here: a DMA is complete when no more than the ``younger`` ones are
    in flight. It writes no register, so no hazard of the matrix unit is hidden with it.

    Args:
        lds: the workgroup's LDS, of ``STAGED_LDS_BYTES``.
        wave: number of this wave in the workgroup, uniform.
        lane: this lane's number in the wave.
    """

    depth = _DEPTH
    values = 0

    def __init__(self, lds: Value, wave: fx.Int32, lane: fx.Int32) -> None:
        super().__init__(lds)
        self._pages_at = wave * (_DEPTH * PAGE_BYTES) + LDS_BYTES
        row, chunk = d.shift_right(lane, 2), lane & 3
        swizzled = row * TOKEN_CODE_BYTES + (chunk ^ (d.shift_right(row, 2) & 3)) * geo.OPERAND_BYTES
        self._code_from = [
            fx.Int32(d.pin(swizzled + base)) for base in range(0, CODE_BYTES, _IMMEDIATE_BYTES)
        ]
        self._scales_from = fx.Int32(d.pin(lane * geo.OPERAND_BYTES + CODE_BYTES))
        quarter, row = d.shift_right(lane, geo.LOG_MFMA_ROWS), lane & (geo.MFMA_ROWS - 1)
        column = (quarter ^ d.shift_right(row, 2)) * geo.OPERAND_BYTES
        self._codes_at = d.offset(lds, fx.Int32(d.pin(self._pages_at + row * TOKEN_CODE_BYTES + column)))
        scales = quarter * (2 * _TILE_SCALE_BYTES) + row * GROUPS + CODE_BYTES
        self._scales_at = d.offset(lds, fx.Int32(d.pin(self._pages_at + scales)))

    def load_scales(self, page: Value, slot: int) -> list[Value]:
        self._dma(slot * PAGE_BYTES + CODE_BYTES, self._scales_from, page, 0)
        return []

    def load_codes(self, page: Value, slot: int, m: int) -> list[Value]:
        base, within = divmod(m * _TILE_BYTES, _IMMEDIATE_BYTES)
        self._dma(slot * PAGE_BYTES + base * _IMMEDIATE_BYTES, self._code_from[base], page, within)
        return []

    def scales(self, page: list[Value], slot: int, younger: int) -> tuple[Value, Value]:  # noqa: ARG002
        _wait_for_dma(younger)
        at = d.offset(self._scales_at, slot * PAGE_BYTES)
        return d.load(2, at), d.load(2, d.offset(at, _TILE_SCALE_BYTES))

    def codes(self, page: list[Value], slot: int, m: int, younger: int) -> Value:  # noqa: ARG002
        _wait_for_dma(younger)
        return d.load(4, d.offset(self._codes_at, slot * PAGE_BYTES + m * _TILE_BYTES))

    def _dma(self, lds_at: int, from_offset: fx.Int32, page: Value, immediate: int) -> None:
        """16 bytes of each lane, from its offset in the page to LDS one lane after the other."""
        text = (
            f"s_add_i32 m0, $0, {lds_at}\ns_nop 0\n"
            f"buffer_load_dwordx4 $1, $2, 0 offen offset:{immediate} nt lds"
        )
        operands = [as_ir_value(x) for x in (self._pages_at, from_offset, _words(page))]
        llvm.inline_asm(None, operands, text, "s,v,s,~{scc}", has_side_effects=True)

    def drain(self) -> None:
        _wait_for_dma(0)


def _words(descriptor: Value) -> Value:
    bits = llvm.ptrtoint(ir.IntegerType.get_signless(128), as_ir_value(descriptor))
    return llvm.BitcastOp(d.vector_type(4, T.i32), bits).result


def _wait_for_dma(left: int) -> None:
    d.fence()
    fx.rocdl.s_waitcnt(vmcnt=left)
    d.fence()
