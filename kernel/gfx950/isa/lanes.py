"""Vector instructions that read or write lane masks, and those that move values between lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.isa import table
from kernel.gfx950.isa.form import Form, Step, TypeLetter, Value, ValueSource, sdwa_source, write32
from kernel.gfx950.isa.table import Row
from kernel.gfx950.isa.vector import LONG_ONLY, count_ones, row
from kernel.gfx950.program import EXEC, VCC, Operand
from kernel.gfx950.wave import LaneMask, Wave, each_lane, vector_name

_FALSE, _TRUE = np.zeros(64, np.bool_), np.ones(64, np.bool_)

_INTEGER: dict[str, Callable[[Value, Value], Value]] = {
    "f": lambda _a, _b: _FALSE,
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "t": lambda _a, _b: _TRUE,
}


def _unordered(a: Value, b: Value) -> Value:
    return np.isnan(a) | np.isnan(b)


_FLOAT: dict[str, Callable[[Value, Value], Value]] = {
    "f": lambda _a, _b: _FALSE,
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: ~_unordered(a, b) & (a != b),
    "ge": np.greater_equal,
    "o": lambda a, b: ~_unordered(a, b),
    "u": _unordered,
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: _unordered(a, b) | (a == b),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "tru": lambda _a, _b: _TRUE,
}
_KINDS = {"i32": "i", "u32": "u", "f32": "f", "i64": "I", "u64": "U", "i16": "k", "u16": "h"}


def _mask_destination(form: Form, operand: Operand) -> int:
    register = form.scalar_destination(operand, 2)
    if register == EXEC:
        raise UnsupportedInstructionError("a compare or carry into exec; v_cmpx does that")
    if form.instruction.encoding == "e32" and register != VCC:
        raise UnsupportedInstructionError(f"operand {operand.text}: the e32 encoding writes vcc")
    return register


def _compare(form: Form) -> Step:
    head, name, kind = form.mnemonic.removeprefix("v_").split("_")
    encoding = form.allow_encoding("sdwa")
    letter = _KINDS[kind]
    function = (_FLOAT if letter == "f" else _INTEGER)[name]
    destination, a, b = form.operands(3)
    register = _mask_destination(form, destination)
    if encoding == "sdwa":
        first, second = sdwa_source(form, a, 0, letter), sdwa_source(form, b, 1, letter)
    else:
        first, second = (form.source(operand, cast("TypeLetter", letter)) for operand in (a, b))
    sets_exec = head == "cmpx"

    def step(wave: Wave) -> None:
        result = each_lane(function(first(wave), second(wave)))
        wave.set_mask(register, result)
        if sets_exec:
            wave.set_scalar64(EXEC, wave.scalar64(register), wave.undefined64(register))

    return step


def _select(form: Form) -> Step:
    """v_cndmask_b32: the second source where the mask is set. An undefined value that is picked stays
    undefined."""
    form.allow_encoding()
    operands = form.operands(4) if form.instruction.encoding != "e32" else form.operands(3, 4)
    register = form.vector(operands[0])
    mask_operand = operands[3] if len(operands) == 4 else None
    if mask_operand is not None and (mask_operand.kind != "scalar" or mask_operand.count != 2):
        raise UnsupportedInstructionError(f"operand {mask_operand.text} is no lane mask")
    mask_register = VCC if mask_operand is None else mask_operand.index
    sources: list[tuple[int, ValueSource | None]] = []
    for operand in operands[1:3]:
        if operand.kind == "vector" and not operand.modified:
            sources.append((form.vector(operand), None))
        else:
            letter: TypeLetter = "f" if operand.negate or operand.absolute else "u"
            sources.append((-1, form.source(operand, letter)))
    (no_register, no_source), (yes_register, yes_source) = sources
    put = write32(register, "u")

    def value(wave: Wave, of: int, read: ValueSource | None) -> Value:
        return wave.u32[of] if read is None else np.asarray(read(wave)).view(np.uint32)

    def step(wave: Wave) -> None:
        mask = wave.mask(mask_register)
        result = np.where(mask, value(wave, yes_register, yes_source), value(wave, no_register, no_source))
        states = wave.vector_states
        if (no_register >= 0 and states[no_register]) or (yes_register >= 0 and states[yes_register]):
            defined = np.where(mask, _lanes_defined(wave, yes_register), _lanes_defined(wave, no_register))
            wave.add_taint(~defined, "the selected source")
        put(wave, result)

    return step


def _lanes_defined(wave: Wave, register: int) -> LaneMask:
    defined = wave.definedness(register) if register >= 0 else None
    return _TRUE if defined is None else defined


def _carry(form: Form) -> Step:
    """v_add_co_u32 and its relatives: destination, carry out, two sources, and a carry in for addc, subb,
    subbrev."""
    kind = form.mnemonic.removeprefix("v_").removesuffix("_co_u32")
    takes_carry = kind in ("addc", "subb", "subbrev")
    operands = form.operands(5 if takes_carry else 4)
    register, carry_out = form.vector(operands[0]), _mask_destination(form, operands[1])
    first, second = form.source(operands[2], "u"), form.source(operands[3], "u")
    if kind in ("subrev", "subbrev"):
        first, second = second, first
    carry_in = -1
    if takes_carry:
        form.plain(operands[4])
        if operands[4].kind != "scalar" or operands[4].count != 2:
            raise UnsupportedInstructionError(f"operand {operands[4].text} is no lane mask")
        carry_in = operands[4].index
    put = write32(register, "u")

    def add(wave: Wave) -> None:
        a, b = first(wave), second(wave)
        total = a + b
        over = total < a
        if takes_carry:
            carry = wave.mask(carry_in).astype(np.uint32)
            total = total + carry
            over = over | (total < carry)
        put(wave, total)
        wave.set_mask(carry_out, each_lane(over))

    def subtract(wave: Wave) -> None:
        a, b = np.asarray(first(wave)).astype(np.int64), np.asarray(second(wave)).astype(np.int64)
        carry = wave.mask(carry_in).astype(np.int64) if takes_carry else np.int64(0)
        total = each_lane(a - b - carry)
        put(wave, (total & 0xFFFFFFFF).astype(np.uint32))
        wave.set_mask(carry_out, (total >> 32) != 0)

    return add if kind.startswith("add") else subtract


def _wide_multiply_add(form: Form) -> Step:
    """v_mad_u64_u32 and v_mad_i64_i32: a * b + c in 64 bits, the carry (or overflow) to a lane mask."""
    signed = form.mnemonic == "v_mad_i64_i32"
    destination, carry, a, b, c = form.operands(5)
    register, carry_out = form.vector(destination, 2), _mask_destination(form, carry)
    first, second = form.source(a, "i" if signed else "u"), form.source(b, "i" if signed else "u")
    third = form.source(c, "I" if signed else "U")
    low, high = write32(register, "u"), write32(register + 1, "u")
    low_addend = c.index if c.kind == "vector" else -1
    wide: Any = np.int64 if signed else np.uint64

    def step(wave: Wave) -> None:
        product = np.asarray(first(wave)).astype(wide) * np.asarray(second(wave)).astype(wide)
        taint = wave.taint
        addend = np.asarray(third(wave))
        total = each_lane(product + addend)
        over = ((product ^ total) & (addend ^ total)) < 0 if signed else total < product
        bits = total.view(np.uint64)
        all_taint = wave.taint
        if all_taint is not None and low_addend >= 0:
            # the low half does not depend on the addend's high half, which compilers leave undefined
            wave.taint = taint
            wave.add_taint(~_lanes_defined(wave, low_addend), vector_name(low_addend))
        low(wave, (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        wave.taint = all_taint
        high(wave, (bits >> np.uint64(32)).astype(np.uint32))
        wave.set_mask(carry_out, over)

    return step


# ---- Values moved between lanes or between register files ----
#
# Undefined values may be moved.

_LANES = np.arange(64)
_MASK_LOW = np.array([(1 << min(lane, 32)) - 1 for lane in range(64)], np.uint64).astype(np.uint32)
_MASK_HIGH = np.array([(1 << max(lane - 32, 0)) - 1 for lane in range(64)], np.uint64).astype(np.uint32)
_32 = (np.arange(32, 64), np.arange(32))
_16 = (np.r_[16:32, 48:64], np.r_[0:16, 32:48])


def _first_lane(wave: Wave) -> int:
    return int(np.argmax(wave.lanes)) if wave.exec_value else 0


def _read_lane(form: Form) -> Step:
    """v_readfirstlane_b32 and v_readlane_b32 (whose lane number is a scalar source)."""
    first = form.mnemonic == "v_readfirstlane_b32"
    operands = form.operands(2 if first else 3)
    destination = form.scalar_destination(operands[0], 1)
    register = form.vector(operands[1], accumulator=None)
    chosen = (lambda _wave: 0) if first else form.scalar_source(operands[2])

    def step(wave: Wave) -> None:
        lane = _first_lane(wave) if first else chosen(wave) & 63
        defined = wave.definedness(register)
        undefined = 0 if defined is None or defined[lane] else 0xFFFFFFFF
        wave.set_scalar(destination, int(wave.u32[register][lane]), undefined)

    return step


def _write_lane(form: Form) -> Step:
    """v_writelane_b32 writes one lane whatever exec says."""
    destination, a, lane = form.operands(3)
    register, source, chosen = form.vector(destination), form.scalar_source(a), form.scalar_source(lane)

    def step(wave: Wave) -> None:
        lanes = np.equal(_LANES, chosen(wave) & 63)
        wave.move(register, np.full(64, source(wave), np.uint32), None, lanes)

    return step


def _permlane_swap(form: Form) -> Step:
    """v_permlane32_swap and v_permlane16_swap: the upper lanes (odd rows) of the first register change
    places with the lower lanes (even rows) of the second. What they do under a partial exec is not
    implemented."""
    upper, lower = _32 if form.mnemonic == "v_permlane32_swap_b32" else _16
    a, b = form.operands(2)
    first, second = form.vector(a), form.vector(b)
    if first == second:
        raise UnsupportedInstructionError(f"{form.mnemonic} of a register with itself")

    def step(wave: Wave) -> None:
        if not wave.full:
            raise UnsupportedInstructionError(f"{form.mnemonic} with inactive lanes")
        if wave.vector_states[first] or wave.vector_states[second]:
            _swap_definedness(wave)
        x, y = wave.u32[first], wave.u32[second]
        held = x[upper]
        x[upper] = y[lower]
        y[lower] = held

    def _swap_definedness(wave: Wave) -> None:
        rows = []
        for register in (first, second):
            defined = wave.definedness(register)
            rows.append(_TRUE.copy() if defined is None else defined.copy())
        held = rows[0][upper]
        rows[0][upper] = rows[1][lower]
        rows[1][lower] = held
        for register, defined in zip((first, second), rows, strict=True):
            wave.move(register, wave.u32[register].copy(), defined, _TRUE)

    return step


def _swap(form: Form) -> Step:
    """v_swap_b32 under exec."""
    a, b = form.operands(2)
    first, second = form.vector(a), form.vector(b)

    def step(wave: Wave) -> None:
        held = wave.u32[first].copy()
        defined = wave.definedness(first)
        defined = None if defined is None else defined.copy()
        wave.move(first, wave.u32[second], wave.definedness(second), wave.lanes)
        wave.move(second, held, defined, wave.lanes)

    return step


def _accumulator_move(form: Form) -> Step:
    """v_accvgpr_read, v_accvgpr_write, v_accvgpr_mov between the two halves of the register file."""
    destination, source = form.operands(2)
    to_accumulator = form.mnemonic != "v_accvgpr_read_b32"
    register = form.vector(destination, accumulator=to_accumulator)
    if source.kind == "vector":
        first = form.vector(source, accumulator=form.mnemonic != "v_accvgpr_write_b32")

        def step(wave: Wave) -> None:
            wave.move(register, wave.u32[first], wave.definedness(first), wave.lanes)

        return step
    if form.mnemonic != "v_accvgpr_write_b32":
        raise UnsupportedInstructionError(f"operand {source.text} is no accumulator register")
    read, put = form.source(source, "u"), write32(register, "u")
    return lambda wave: put(wave, read(wave))


def _count_below(form: Form) -> Step:
    """v_mbcnt_lo/hi_u32_b32: how many bits of the mask belong to lanes below this one, added to the second
    source."""
    below = _MASK_LOW if form.mnemonic == "v_mbcnt_lo_u32_b32" else _MASK_HIGH
    destination, a, b = form.operands(3)
    register, mask, base = form.vector(destination), form.source(a, "u"), form.source(b, "u")
    put = write32(register, "u")
    return lambda wave: put(wave, count_ones(mask(wave) & below) + base(wave))


# ---- The table's rows ----


def _rows() -> Iterator[Row]:
    for kind, letter in _KINDS.items():
        wide = (0, 1) if letter in ("U", "I") else ()
        suffixes = ("e32", "e64") if wide else ("e32", "e64", "sdwa")
        for name in _FLOAT if letter == "f" else _INTEGER:
            compare = partial(row, build=_compare, wide=wide, suffixes=suffixes)
            yield compare(f"v_cmp_{name}_{kind}")
            yield compare(f"v_cmpx_{name}_{kind}", writes_exec=True)
    reads_mask = partial(table.vector, reads_mask=True)
    for name in ("add", "sub", "subrev"):
        yield row(f"v_{name}_co_u32", build=_carry, destinations=2)
    for name in ("addc", "subb", "subbrev"):
        yield row(f"v_{name}_co_u32", build=_carry, destinations=2, rule=reads_mask)
    yield row("v_cndmask_b32", build=_select, rule=reads_mask)
    for name in ("v_mad_u64_u32", "v_mad_i64_i32"):
        yield row(name, build=_wide_multiply_add, destinations=2, suffixes=LONG_ONLY, wide=(2,))
    for name in ("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32"):
        yield row(name, build=_count_below, suffixes=LONG_ONLY)
    for name in ("v_accvgpr_read_b32", "v_accvgpr_write_b32"):
        yield row(name, build=_accumulator_move, suffixes=LONG_ONLY)
    for name in ("v_permlane32_swap_b32", "v_permlane16_swap_b32"):
        swap = partial(row, build=_permlane_swap, destinations=2, keeps=True)
        yield swap(name, suffixes=("e32", "e64"), hazard="lane swap")
    short_only = partial(row, suffixes=("e32",))
    yield short_only("v_accvgpr_mov_b32", build=_accumulator_move, rule=table.unrestricted)
    yield short_only("v_swap_b32", build=_swap, destinations=2, keeps=True, rule=table.unrestricted)
    for name in ("v_readfirstlane_b32", "v_readlane_b32"):
        yield short_only(name, build=_read_lane, rule=table.lane_read, hazard="lane read")
    yield short_only(
        "v_writelane_b32", build=_write_lane, keeps=True, rule=table.lane_write, hazard="lane write"
    )


ROWS = tuple(_rows())
