"""Vector arithmetic of one result register (or pair): a table of operations and the builder they share.

An operation states the types of its sources and of its result by letter (see ``form.TypeLetter``). DPP,
SDWA, float source modifiers and clamp are handled here once, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.form import Builder, Form, Step, TypeLetter, Value
from kernel.gfx950.instructions import bits
from kernel.gfx950.instructions import float32 as ieee
from kernel.gfx950.instructions.dpp import dpp_step
from kernel.gfx950.instructions.sdwa import sdwa_step
from kernel.gfx950.results import write32, write64

U32, U64 = np.uint32, np.uint64
_31, _63 = np.uint32(31), np.uint32(63)
_24 = np.uint32(0xFFFFFF)


@dataclass(frozen=True)
class Operation:
    """``sources`` and ``result`` are type letters; ``function`` takes and gives 64 lanes."""

    sources: str
    result: str
    function: Callable[..., Value]


_UINT = {
    "v_mov_b32": Operation("u", "u", lambda a: a),
    "v_not_b32": Operation("u", "u", lambda a: ~a),
    "v_and_b32": Operation("uu", "u", lambda a, b: a & b),
    "v_or_b32": Operation("uu", "u", lambda a, b: a | b),
    "v_xor_b32": Operation("uu", "u", lambda a, b: a ^ b),
    "v_xnor_b32": Operation("uu", "u", lambda a, b: ~(a ^ b)),
    "v_add_u32": Operation("uu", "u", lambda a, b: a + b),
    "v_sub_u32": Operation("uu", "u", lambda a, b: a - b),
    "v_subrev_u32": Operation("uu", "u", lambda a, b: b - a),
    "v_add3_u32": Operation("uuu", "u", lambda a, b, c: a + b + c),
    "v_mul_lo_u32": Operation("uu", "u", lambda a, b: a * b),
    "v_mul_hi_u32": Operation("uu", "u", bits.multiply_high),
    "v_mul_u32_u24": Operation("uu", "u", lambda a, b: (a & _24) * (b & _24)),
    "v_mul_hi_u32_u24": Operation("uu", "u", lambda a, b: bits.multiply_high(a & _24, b & _24)),
    "v_mad_u32_u24": Operation("uuu", "u", lambda a, b, c: (a & _24) * (b & _24) + c),
    "v_min_u32": Operation("uu", "u", np.minimum),
    "v_max_u32": Operation("uu", "u", np.maximum),
    "v_min3_u32": Operation("uuu", "u", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": Operation("uuu", "u", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u32": Operation("uuu", "u", bits.median),
    "v_lshlrev_b32": Operation("uu", "u", lambda a, b: b << (a & _31)),
    "v_lshrrev_b32": Operation("uu", "u", lambda a, b: b >> (a & _31)),
    "v_and_or_b32": Operation("uuu", "u", lambda a, b, c: (a & b) | c),
    "v_or3_b32": Operation("uuu", "u", lambda a, b, c: a | b | c),
    "v_lshl_or_b32": Operation("uuu", "u", lambda a, b, c: (a << (b & _31)) | c),
    "v_lshl_add_u32": Operation("uuu", "u", lambda a, b, c: (a << (b & _31)) + c),
    "v_add_lshl_u32": Operation("uuu", "u", lambda a, b, c: (a + b) << (c & _31)),
    "v_xad_u32": Operation("uuu", "u", lambda a, b, c: (a ^ b) + c),
    "v_bfi_b32": Operation("uuu", "u", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfe_u32": Operation("uuu", "u", bits.bit_field_unsigned),
    "v_bfm_b32": Operation("uu", "u", lambda a, b: ((U32(1) << (a & _31)) - U32(1)) << (b & _31)),
    "v_perm_b32": Operation("uuu", "u", bits.byte_permute),
    "v_alignbit_b32": Operation("uuu", "u", lambda a, b, c: bits.funnel_shift(a, b, c & _31)),
    "v_alignbyte_b32": Operation("uuu", "u", lambda a, b, c: bits.funnel_shift(a, b, (c & U32(3)) << U32(3))),
    "v_bfrev_b32": Operation("u", "u", bits.reverse_bits),
    "v_bcnt_u32_b32": Operation("uu", "u", lambda a, b: bits.count_ones(a) + b),
    "v_ffbh_u32": Operation("u", "u", bits.leading_zeros),
    "v_ffbl_b32": Operation("u", "u", bits.trailing_zeros),
}  # fmt: skip

_INT = {
    "v_ashrrev_i32": Operation("ui", "i", lambda a, b: b >> (a & _31).astype(np.int32)),
    "v_min_i32": Operation("ii", "i", np.minimum),
    "v_max_i32": Operation("ii", "i", np.maximum),
    "v_min3_i32": Operation("iii", "i", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": Operation("iii", "i", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i32": Operation("iii", "i", bits.median),
    "v_bfe_i32": Operation("uuu", "i", bits.bit_field_signed),
    "v_mul_hi_i32": Operation("ii", "i", bits.multiply_high_signed),
    "v_mul_i32_i24": Operation("uu", "i", bits.multiply_signed24),
    "v_mad_i32_i24": Operation(
        "uui", "i", lambda a, b, c: bits.multiply_signed24(a, b) + c
    ),
}  # fmt: skip

_FLOAT = {
    "v_add_f32": Operation("ff", "f", lambda a, b: ieee.quiet(a + b)),
    "v_sub_f32": Operation("ff", "f", lambda a, b: ieee.quiet(a - b)),
    "v_subrev_f32": Operation("ff", "f", lambda a, b: ieee.quiet(b - a)),
    "v_mul_f32": Operation("ff", "f", lambda a, b: ieee.quiet(a * b)),
    "v_fma_f32": Operation("fff", "f", ieee.fused_multiply_add),
    "v_max_f32": Operation("ff", "f", ieee.maximum),
    "v_min_f32": Operation("ff", "f", ieee.minimum),
    "v_max3_f32": Operation("fff", "f", ieee.maximum3),
    "v_min3_f32": Operation("fff", "f", ieee.minimum3),
    "v_med3_f32": Operation("fff", "f", ieee.median3),
    "v_rcp_f32": Operation("f", "f", ieee.reciprocal),
    "v_rcp_iflag_f32": Operation("f", "f", ieee.reciprocal),
    "v_trunc_f32": Operation("f", "f", lambda a: ieee.quiet(np.trunc(a))),
    "v_floor_f32": Operation("f", "f", lambda a: ieee.quiet(np.floor(a))),
    "v_ceil_f32": Operation("f", "f", lambda a: ieee.quiet(np.ceil(a))),
    "v_rndne_f32": Operation("f", "f", lambda a: ieee.quiet(np.rint(a))),
    "v_ldexp_f32": Operation("fi", "f", bits.scaled),
}

_CONVERT = {
    "v_cvt_f32_u32": Operation("u", "f", lambda a: np.asarray(a).astype(np.float32)),
    "v_cvt_f32_i32": Operation("i", "f", lambda a: np.asarray(a).astype(np.float32)),
    "v_cvt_u32_f32": Operation("f", "u", ieee.to_unsigned),
    "v_cvt_i32_f32": Operation("f", "i", ieee.to_signed),
    "v_cvt_f32_ubyte0": Operation("u", "f", lambda a: np.asarray(a & U32(255)).astype(np.float32)),
    "v_cvt_f32_ubyte1": Operation("u", "f", lambda a: np.asarray(a >> U32(8) & U32(255)).astype(np.float32)),
    "v_cvt_f32_ubyte2": Operation("u", "f", lambda a: np.asarray(a >> U32(16) & U32(255)).astype(np.float32)),
    "v_cvt_f32_ubyte3": Operation("u", "f", lambda a: np.asarray(a >> U32(24)).astype(np.float32)),
    "v_cvt_f32_f16": Operation(
        "h", "f", lambda a: ieee.quiet(np.asarray(a).view(np.float16).astype(np.float32))
    ),
    "v_cvt_f16_f32": Operation(
        "f", "u", lambda a: bits.half_result(np.asarray(ieee.quiet(a)).astype(np.float16))
    ),
    "v_cvt_pk_bf16_f32": Operation("ff", "u", bits.bfloat16_pair),
}

_PAIR = {
    "v_mov_b64": Operation("U", "U", lambda a: a),
    "v_lshlrev_b64": Operation("uU", "U", bits.shift64(lambda a, n: a << n)),
    "v_lshrrev_b64": Operation("uU", "U", bits.shift64(lambda a, n: a >> n)),
    "v_ashrrev_i64": Operation("uI", "I", bits.shift64(lambda a, n: a >> n)),
    "v_lshl_add_u64": Operation("UuU", "U", lambda a, n, c: (a << bits.wide(n & U32(7))) + c),
}

_HALF = {
    "v_add_u16": Operation("hh", "h", lambda a, b: a + b),
    "v_sub_u16": Operation("hh", "h", lambda a, b: a - b),
    "v_subrev_u16": Operation("hh", "h", lambda a, b: b - a),
    "v_mul_lo_u16": Operation("hh", "h", lambda a, b: a * b),
    "v_min_u16": Operation("hh", "h", np.minimum),
    "v_max_u16": Operation("hh", "h", np.maximum),
    "v_min_i16": Operation("kk", "h", np.minimum),
    "v_max_i16": Operation("kk", "h", np.maximum),
    "v_lshlrev_b16": Operation("hh", "h", lambda a, b: b << (a & np.uint16(15))),
    "v_lshrrev_b16": Operation("hh", "h", lambda a, b: b >> (a & np.uint16(15))),
    "v_ashrrev_i16": Operation("hk", "h", lambda a, b: b >> (a & np.uint16(15)).astype(np.int16)),
}

OPERATIONS: dict[str, Operation] = {**_UINT, **_INT, **_FLOAT, **_CONVERT, **_PAIR, **_HALF}


def arithmetic(form: Form, operation: Operation) -> Step:
    """A step for ``operation`` in whatever encoding the form has."""
    encoding = form.allow_encoding("dpp", "sdwa")
    operands = form.operands(1 + len(operation.sources))
    pair = operation.result in ("U", "I")
    destination = form.vector(operands[0], 2 if pair else 1)
    function = operation.function
    if form.flag("clamp"):
        if operation.result != "f":
            raise UnsupportedInstructionError(f"{form.mnemonic} with clamp")
        unclamped = function

        def function(*sources: Value) -> Value:
            return ieee.clamp(unclamped(*sources))

    if operation.result == "h":
        wide = function

        def function(*sources: Value) -> Value:
            return bits.half_result(wide(*sources))

    letter = "u" if operation.result == "h" else operation.result
    if encoding == "sdwa":
        return sdwa_step(form, operands, operation.sources, letter, function)
    sources = [
        form.source(operand, cast("TypeLetter", letter))
        for operand, letter in zip(operands[1:], operation.sources, strict=True)
    ]
    if encoding == "dpp":
        return dpp_step(form, operands, operation.sources, letter, function, sources)
    put = write64(destination) if pair else write32(destination, letter)
    if len(sources) == 1:
        (only,) = sources
        return lambda wave: put(wave, function(only(wave)))
    if len(sources) == 2:
        first, second = sources
        return lambda wave: put(wave, function(first(wave), second(wave)))
    first, second, third = sources
    return lambda wave: put(wave, function(first(wave), second(wave), third(wave)))


def _operation(form: Form) -> Step:
    return arithmetic(form, OPERATIONS[form.mnemonic])


def _multiply_accumulate(form: Form) -> Step:
    """v_fmac_f32: the destination is the third source."""
    destination, a, b = form.operands(3)
    register = form.vector(destination)
    first, second, third = form.source(a, "f"), form.source(b, "f"), form.source(destination, "f")
    put = write32(register, "f")
    return lambda wave: put(wave, ieee.fused_multiply_add(first(wave), second(wave), third(wave)))


def _table_of_three(form: Form) -> Step:
    """v_bitop3_b32: bit 4a + 2b + c of the table is the result for the source bits a, b, c."""
    table = form.number("bitop3")
    if not 0 <= table <= 0xFF:
        raise UnsupportedInstructionError(f"bitop3:{table:#x}: a table has 8 bits")
    return arithmetic(form, Operation("uuu", "u", _bitop3_function(table)))


def _bitop3_function(table: int) -> Callable[[Value, Value, Value], Value]:
    # the terms where a = 0 and a = 1, each a function of b and c alone
    def half(bits: int) -> Callable[[Value, Value], Value]:
        ones = U32(0xFFFFFFFF)
        functions: list[Callable[[Value, Value], Value]] = [
            lambda _b, _c: U32(0),
            lambda b, c: ~(b | c),
            lambda b, c: ~b & c,
            lambda b, _c: ~b,
            lambda b, c: b & ~c,
            lambda _b, c: ~c,
            lambda b, c: b ^ c,
            lambda b, c: ~(b & c),
            lambda b, c: b & c,
            lambda b, c: ~(b ^ c),
            lambda _b, c: c,
            lambda b, c: ~b | c,
            lambda b, _c: b,
            lambda b, c: b | ~c,
            lambda b, c: b | c,
            lambda _b, _c: ones,
        ]
        return functions[bits]

    clear, set_ = half(table & 15), half(table >> 4)

    def function(a: Value, b: Value, c: Value) -> Value:
        zero = clear(b, c)
        return zero ^ (a & (zero ^ set_(b, c)))

    return function


BUILDERS: dict[str, Builder] = {
    **dict.fromkeys(OPERATIONS, _operation),
    "v_fmac_f32": _multiply_accumulate,
    "v_bitop3_b32": _table_of_three,
}
