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

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.isa import vector as ieee
from kernel.gfx950.isa.form import SIGN32, Form, Step, Value, ValueSource, write32
from kernel.gfx950.program import Operand
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


# ---- Packed instructions: two floats in a register pair, or two 16-bit integers in one register ----

_FLOAT: dict[str, Callable[..., Value]] = {
    "v_pk_add_f32": lambda a, b: ieee.quiet(a + b),
    "v_pk_mul_f32": lambda a, b: ieee.quiet(a * b),
    "v_pk_fma_f32": ieee.fused_multiply_add,
}
_HALF: dict[str, tuple[str, Callable[..., Value]]] = {
    "v_pk_add_u16": ("u", lambda a, b: a + b),
    "v_pk_sub_u16": ("u", lambda a, b: a - b),
    "v_pk_mul_lo_u16": ("u", lambda a, b: a * b),
    "v_pk_max_u16": ("u", np.maximum),
    "v_pk_min_u16": ("u", np.minimum),
    "v_pk_max_i16": ("i", np.maximum),
    "v_pk_min_i16": ("i", np.minimum),
    "v_pk_lshlrev_b16": ("u", lambda a, b: b << (a & np.uint16(15))),
    "v_pk_lshrrev_b16": ("u", lambda a, b: b >> (a & np.uint16(15))),
}


def _part(form: Form, operand: Operand, high: int, negate: int) -> ValueSource:
    """The low (0) or high (1) dword of a packed source."""
    form.plain(operand)
    if operand.is_constant:
        if high:
            raise UnsupportedInstructionError(
                f"operand {operand.text}: the high half of a constant; clear op_sel_hi"
            )
        whole = form.source(operand, "u")
    elif operand.count == 2 and operand.is_register and not operand.is_accumulator:
        whole = form.source(Operand(operand.kind, operand.text, operand.index + high), "u")
    else:
        raise UnsupportedInstructionError(f"operand {operand.text}: a register pair is needed")
    flip = SIGN32 if negate else np.uint32(0)
    return lambda wave: (whole(wave) ^ flip).view(np.float32)


def _float_pair(form: Form) -> Step:
    function = _FLOAT[form.mnemonic]
    count = 3 if "fma" in form.mnemonic else 2
    operands = form.operands(1 + count)
    register = form.vector(operands[0], 2)
    choice = (form.bits("op_sel", (0,) * count), form.bits("op_sel_hi", (1,) * count))
    negated = (form.bits("neg_lo", (0,) * count), form.bits("neg_hi", (0,) * count))
    halves = [
        [_part(form, operand, choice[half][at], negated[half][at]) for at, operand in enumerate(operands[1:])]
        for half in (0, 1)
    ]
    put = (write32(register, "f"), write32(register + 1, "f"))

    def step(wave: Wave) -> None:
        results = [function(*[source(wave) for source in sources]) for sources in halves]
        for write, result in zip(put, results, strict=True):
            write(wave, result)

    return step


def _move_pair(form: Form) -> Step:
    """v_pk_mov_b32: each half of the result is a half of its own source."""
    destination, a, b = form.operands(3)
    register = form.vector(destination, 2)
    low, high = form.bits("op_sel", (0, 0)), form.bits("op_sel_hi", (1, 1))
    if high != (1, 1):
        raise UnsupportedInstructionError("v_pk_mov_b32 with op_sel_hi")
    sources = [_part(form, operand, pick, 0) for operand, pick in zip((a, b), low, strict=True)]
    put = (write32(register, "u"), write32(register + 1, "u"))

    def step(wave: Wave) -> None:
        values = [np.array(source(wave).view(np.uint32)) for source in sources]
        for write, value in zip(put, values, strict=True):
            write(wave, value)

    return step


def _half_pair(form: Form) -> Step:
    letter, function = _HALF[form.mnemonic]
    destination, a, b = form.operands(3)
    for operand in (a, b):
        if operand.is_constant and operand.number != 0:
            raise UnsupportedInstructionError(
                f"operand {operand.text}: a constant of a packed 16-bit instruction"
            )
    register, first, second = form.vector(destination), form.source(a, "u"), form.source(b, "u")
    put = write32(register, "u")
    dtype = np.uint16 if letter == "u" else np.int16

    def split(value: Value) -> Value:
        return np.ascontiguousarray(np.broadcast_to(value, 64)).view(dtype)

    return lambda wave: put(wave, function(split(first(wave)), split(second(wave))).view(np.uint32))


# ---- The table's rows ----

_packed = partial(ieee.row, suffixes=ieee.LONG_ONLY)
ROWS = (
    *(_packed(name, build=_float_pair) for name in _FLOAT),
    *(_packed(name, build=_half_pair) for name in _HALF),
    _packed("v_pk_mov_b32", build=_move_pair),
    _packed("v_mfma_f32_16x16x128_f8f6f4", build=_matrix_multiply, kind="mfma", hazard="matrix of 8 passes"),
)
