"""Pages that go from memory straight into the registers that they are used from.

For each M-tile one load of 16 bytes a lane is the whole operand, 8 whole lines of 128 bytes; two loads of 8
bytes a lane bring the scales. Four pages in flight take 144 registers of a lane. Lanes that lie side by side
read 64 bytes apart: what the address unit makes of that is not known without the device.
"""

from __future__ import annotations

import flydsl.expr as fx

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl.device import Value
from kernel.backends.flydsl.score_decode_page import PageScorer
from kernel.contract import CODE_BYTES, GROUPS, TOKEN_CODE_BYTES

_SCALE_LOADS = 2
_TILE_BYTES = geo.MFMA_ROWS * TOKEN_CODE_BYTES
_TILE_SCALE_BYTES = geo.MFMA_ROWS * GROUPS
_IMMEDIATE_BYTES = 4096
"""What a load's offset may add to its lane's."""


class RegisterPages(PageScorer):
    """Pages in registers.

    Args:
        lds: the workgroup's LDS, which holds the LUT.
        lane: this lane's number in the wave.
    """

    depth = 4
    values = _SCALE_LOADS + geo.M_TILES

    def __init__(self, lds: Value, lane: fx.Int32) -> None:
        super().__init__(lds)
        quarter, row = d.shift_right(lane, 4), lane & (geo.MFMA_ROWS - 1)
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

    def settle(self) -> None:
        """Loads into registers write in order."""
