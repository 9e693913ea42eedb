"""Matrix multiplication: ``v_mfma_f32_16x16x128_f8f6f4`` with 8-bit operands.

    lane l, first operand:  row l % 16 of A (16 x 128); its 32 bytes are columns 16 g .. 16 g + 15 and
                            64 + 16 g .. 64 + 16 g + 15 with g = l // 16
    lane l, second operand: column l % 16 of B (128 x 16), rows as the columns of A
    lane l, result:         D[4 g + i][l % 16] in register i of 4

A and B spread k over lanes alike, so a product does not show how k is spread. Products of 8-bit floats and
their sums are exact in double, to which C is added; the sum is rounded to single once. The device's order
of summation is not documented, so results agree bit for bit where every partial sum is exact in single
precision.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.form import Builder, Form, Step
from kernel.gfx950.wave import DEFINED, Wave

_FORMATS: dict[int, Any] = {0: ml_dtypes.float8_e4m3fn, 1: ml_dtypes.float8_e5m2}
"""cbsz (first operand) and blgp (second operand): 0 is E4M3, 1 is E5M2; 2, 3 and 4 are 6- and 4-bit
formats."""
_VALUES = {
    code: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64) for code, dtype in _FORMATS.items()
}
_EVERY_LANE = np.ones(64, np.bool_)
_REMEMBERED = 256

FloatMatrix = npt.NDArray[np.float64]


class _OperandCache:
    """The decoded matrix of operand bytes seen lately: a tile is multiplied with many others, by many
    instructions."""

    def __init__(self, values: npt.NDArray[np.float64]) -> None:
        self.values = values
        self.known: dict[bytes, FloatMatrix] = {}

    def matrix(self, registers: npt.NDArray[np.uint32]) -> FloatMatrix:
        """``[8, 64]`` dwords to ``[16, 128]``."""
        key = registers.tobytes()
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            lanes = np.ascontiguousarray(registers.T).view(np.uint8).reshape(4, 16, 2, 16)
            # [g, row, half, byte] to [row, half, g, byte]
            rows = lanes.transpose(1, 2, 0, 3).reshape(16, 128)
            found = self.known[key] = self.values[rows]
        return found


_DECODED = {code: _OperandCache(values) for code, values in _VALUES.items()}


def _accumulator_matrix(registers: npt.NDArray[np.float32]) -> FloatMatrix:
    """``[4, 64]`` to ``[16, 16]``: lane l, register i holds row 4 (l // 16) + i, column l % 16."""
    rows: FloatMatrix = registers.reshape(4, 4, 16).transpose(1, 0, 2).reshape(16, 16).astype(np.float64)
    return rows


def _matrix_multiply(form: Form) -> Step:
    destination, a, b, c = form.operands(4)
    formats = (form.number("cbsz"), form.number("blgp"))
    for code in formats:
        if code not in _FORMATS:
            raise UnsupportedInstructionError(
                f"{form.mnemonic} with operand format {code}: only 8-bit formats are"
            )
    result = form.vector(destination, 4, accumulator=None)
    first, second = form.vector(a, 8, accumulator=None), form.vector(b, 8, accumulator=None)
    left, right = _DECODED[formats[0]], _DECODED[formats[1]]
    constant: np.float64 | None = None
    start = -1
    if c.kind == "vector":
        start = form.vector(c, 4, accumulator=destination.is_accumulator)
    elif c.is_constant and c.is_inline and not c.modified:
        constant = np.float64(np.uint32(c.bits32()).view(np.float32))
    else:
        raise UnsupportedInstructionError(f"operand {c.text}: registers or an inline constant are needed")
    sources = [*range(first, first + 8), *range(second, second + 8)]
    sources += [] if start < 0 else [*range(start, start + 4)]

    def step(wave: Wave) -> None:
        states = wave.vector_states
        for register in sources:
            if states[register]:
                wave.require(register, _EVERY_LANE)  # exec does not mask a matrix multiplication
        vectors = wave.vectors
        product = left.matrix(vectors[first : first + 8]) @ right.matrix(vectors[second : second + 8]).T
        if constant is None:
            product += _accumulator_matrix(vectors[start : start + 4].view(np.float32))
        elif constant:
            product += constant
        wave.refuse_in_flight(result, 4)
        rounded = product.astype(np.float32).reshape(4, 4, 16).transpose(1, 0, 2).reshape(4, 64)
        vectors[result : result + 4] = rounded.view(np.uint32)
        for register in range(result, result + 4):
            states[register] = DEFINED

    return step


BUILDERS: dict[str, Builder] = {"v_mfma_f32_16x16x128_f8f6f4": _matrix_multiply}
