"""Packed instructions: two single-precision values in a register pair, or two 16-bit integers in one
register."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.form import SIGN32, Builder, Form, Step, Value, ValueSource
from kernel.gfx950.instructions import float32 as ieee
from kernel.gfx950.operands import Operand
from kernel.gfx950.results import write32
from kernel.gfx950.wave import Wave

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


BUILDERS: dict[str, Builder] = {
    **dict.fromkeys(_FLOAT, _float_pair),
    **dict.fromkeys(_HALF, _half_pair),
    "v_pk_mov_b32": _move_pair,
}
