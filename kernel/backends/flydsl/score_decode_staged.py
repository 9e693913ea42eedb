"""Pages that a DMA brings into LDS, from where they are read as they are used.

A DMA writes the 64 lanes' 16 bytes one after the other, so lanes that lie side by side can read memory side
by side: the friendliest order for the address unit, at the price of 144 clocks of LDS a page and CU
(prediction). LDS holds two pages of each of eight waves.

    LDS of an M-tile    16-byte slot 4 n + (g ^ (n >> 2 & 3)) holds bytes 16 g .. 16 g + 15 of key row n

so that the 16 lanes that read one column meet all banks once.

LLVM would wait for every DMA in flight before any read of LDS, look-ups included. So the DMA is inline
assembly, which hides it, and the waits are made here: a DMA is over when no more than the ``younger`` ones
are in flight. It writes no register, so no hazard of the matrix unit is hidden with it.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl import device as d
from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl.device import Value
from kernel.backends.flydsl.score_decode_arguments import LDS_BYTES
from kernel.backends.flydsl.score_decode_page import PageScorer
from kernel.contract import CODE_BYTES, GROUPS, PAGE_BYTES, TOKEN_CODE_BYTES

_TILE_BYTES = geo.MFMA_ROWS * TOKEN_CODE_BYTES
_TILE_SCALE_BYTES = geo.MFMA_ROWS * GROUPS
_IMMEDIATE_BYTES = 4096
"""What a DMA's offset may add to its addresses, in memory and in LDS alike."""
_DEPTH = 2
STAGED_LDS_BYTES = LDS_BYTES + geo.WAVES * _DEPTH * PAGE_BYTES


class StagedPages(PageScorer):
    """Pages in LDS.

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
        quarter, row = d.shift_right(lane, 4), lane & (geo.MFMA_ROWS - 1)
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

    def settle(self) -> None:
        _wait_for_dma(0)


def _words(descriptor: Value) -> Value:
    bits = llvm.ptrtoint(ir.IntegerType.get_signless(128), as_ir_value(descriptor))
    return llvm.BitcastOp(d.vector_type(4, T.i32), bits).result


def _wait_for_dma(left: int) -> None:
    d.fence()
    fx.rocdl.s_waitcnt(vmcnt=left)
    d.fence()
