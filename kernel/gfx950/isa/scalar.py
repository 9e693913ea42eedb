"""Scalar instructions: integer arithmetic, compares, lane masks, branches (CDNA ISA, "Scalar ALU
operations").

A result is an unsigned Python integer. ``scc`` is stated with each operation: unchanged, non-zero result,
or its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.isa import table
from kernel.gfx950.isa.form import Form, IntegerSource, Step, Stop
from kernel.gfx950.isa.table import Row
from kernel.gfx950.program import EXEC, VCC, Operand
from kernel.gfx950.wave import Wave

WORD, QUAD = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def signed32(value: int) -> int:
    return (value ^ 0x80000000) - 0x80000000


def signed64(value: int) -> int:
    return (value ^ (1 << 63)) - (1 << 63)


def _reverse(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


def _find_first_one(value: int) -> int:
    return (value & -value).bit_length() - 1 & WORD


def _leading_zeros(value: int, bits: int) -> int:
    return bits - value.bit_length() if value else WORD


def _leading_signs(value: int) -> int:
    """Position from the top of the first bit that differs from the sign bit."""
    magnitude = ~value & WORD if value & 0x80000000 else value
    return 32 - magnitude.bit_length() if magnitude else WORD


def _bit_field_u(value: int, field: int, bits: int) -> int:
    return (value >> (field & (bits - 1))) & ((1 << (field >> 16 & 0x7F)) - 1)


def _bit_field_i(value: int, field: int) -> int:
    width = min(field >> 16 & 0x7F, 32 - (field & 31))
    if width == 0:
        return 0
    part = (value >> (field & 31)) & ((1 << width) - 1)
    return part - (1 << width) if part >> (width - 1) else part


# name: (width of each source, width of the result, function, whether scc = result is not zero)
_PLAIN: dict[str, tuple[str, str, Callable[..., int], bool]] = {
    "s_lshl_b32": ("ww", "w", lambda a, b: a << (b & 31), True),
    "s_lshr_b32": ("ww", "w", lambda a, b: a >> (b & 31), True),
    "s_ashr_i32": ("ww", "w", lambda a, b: signed32(a) >> (b & 31), True),
    "s_lshl_b64": ("qw", "q", lambda a, b: a << (b & 63), True),
    "s_lshr_b64": ("qw", "q", lambda a, b: a >> (b & 63), True),
    "s_ashr_i64": ("qw", "q", lambda a, b: signed64(a) >> (b & 63), True),
    "s_bfe_u32": ("ww", "w", lambda a, b: _bit_field_u(a, b, 32), True),
    "s_bfe_i32": ("ww", "w", _bit_field_i, True),
    "s_bfe_u64": ("qw", "q", lambda a, b: _bit_field_u(a, b, 64), True),
    "s_bfm_b32": ("ww", "w", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31), False),
    "s_bfm_b64": ("ww", "q", lambda a, b: ((1 << (a & 63)) - 1) << (b & 63), False),
    "s_not_b32": ("w", "w", operator.invert, True),
    "s_not_b64": ("q", "q", operator.invert, True),
    "s_mul_i32": ("ww", "w", operator.mul, False),
    "s_mul_hi_u32": ("ww", "w", lambda a, b: a * b >> 32, False),
    "s_mul_hi_i32": ("ww", "w", lambda a, b: signed32(a) * signed32(b) >> 32, False),
    "s_abs_i32": ("w", "w", lambda a: abs(signed32(a)), True),
    "s_brev_b32": ("w", "w", lambda a: _reverse(a, 32), False),
    "s_brev_b64": ("q", "q", lambda a: _reverse(a, 64), False),
    "s_bcnt0_i32_b32": ("w", "w", lambda a: 32 - a.bit_count(), True),
    "s_bcnt0_i32_b64": ("q", "w", lambda a: 64 - a.bit_count(), True),
    "s_bcnt1_i32_b32": ("w", "w", int.bit_count, True),
    "s_bcnt1_i32_b64": ("q", "w", int.bit_count, True),
    "s_ff1_i32_b32": ("w", "w", _find_first_one, False),
    "s_ff1_i32_b64": ("q", "w", _find_first_one, False),
    "s_ff0_i32_b32": ("w", "w", lambda a: _find_first_one(~a & WORD), False),
    "s_flbit_i32_b32": ("w", "w", lambda a: _leading_zeros(a, 32), False),
    "s_flbit_i32_b64": ("q", "w", lambda a: _leading_zeros(a, 64), False),
    "s_flbit_i32": ("w", "w", _leading_signs, False),
    "s_sext_i32_i8": ("w", "w", lambda a: (a & 0xFF ^ 0x80) - 0x80, False),
    "s_sext_i32_i16": ("w", "w", lambda a: (a & 0xFFFF ^ 0x8000) - 0x8000, False),
    "s_pack_ll_b32_b16": ("ww", "w", lambda a, b: a & 0xFFFF | b << 16, False),
    "s_pack_lh_b32_b16": ("ww", "w", lambda a, b: a & 0xFFFF | b & 0xFFFF0000, False),
    "s_pack_hh_b32_b16": ("ww", "w", lambda a, b: a >> 16 | b & 0xFFFF0000, False),
}


def _carry(total: int) -> tuple[int, int]:
    return total & WORD, int(total > WORD)


def _overflow(total: int) -> tuple[int, int]:
    return total & WORD, int(not -(1 << 31) <= total < 1 << 31)


def _maximum(a: int, b: int) -> tuple[int, int | None]:
    """Editions of the ISA disagree on scc where both are equal, so it becomes undefined there."""
    return max(a, b) & WORD, None if a == b else int(a > b)


def _pick(take_first: bool, a: int, b: int) -> tuple[int, int | None]:
    return (a if take_first else b), int(take_first)


# name: (function of the two sources and scc giving the result and the new scc, whether it reads scc)
_WITH_SCC: dict[str, tuple[Callable[[int, int, int], tuple[int, int | None]], bool]] = {
    "s_add_u32": (lambda a, b, _c: _carry(a + b), False),
    "s_addc_u32": (lambda a, b, c: _carry(a + b + c), True),
    "s_sub_u32": (lambda a, b, _c: ((a - b) & WORD, int(b > a)), False),
    "s_subb_u32": (lambda a, b, c: ((a - b - c) & WORD, int(b + c > a)), True),
    "s_add_i32": (lambda a, b, _c: _overflow(signed32(a) + signed32(b)), False),
    "s_sub_i32": (lambda a, b, _c: _overflow(signed32(a) - signed32(b)), False),
    "s_min_i32": (lambda a, b, _c: _pick(signed32(a) < signed32(b), a, b), False),
    "s_max_i32": (lambda a, b, _c: _maximum(signed32(a), signed32(b)), False),
    "s_min_u32": (lambda a, b, _c: _pick(a < b, a, b), False),
    "s_max_u32": (lambda a, b, _c: _maximum(a, b), False),
    "s_lshl1_add_u32": (lambda a, b, _c: _carry((a << 1) + b), False),
    "s_lshl2_add_u32": (lambda a, b, _c: _carry((a << 2) + b), False),
    "s_lshl3_add_u32": (lambda a, b, _c: _carry((a << 3) + b), False),
    "s_lshl4_add_u32": (lambda a, b, _c: _carry((a << 4) + b), False),
    "s_absdiff_i32": (lambda a, b, _c: (abs(signed32(a) - signed32(b)) & WORD, int(a != b)), False),
}

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "lg": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}


def source(form: Form, operand: Operand, width: str) -> IntegerSource:
    return form.scalar_source(operand) if width == "w" else form.scalar_source64(operand)


def setter(form: Form, operand: Operand, width: str) -> Callable[[Wave, int], None]:
    register = form.scalar_destination(operand, 1 if width == "w" else 2)
    if width == "w":
        return lambda wave, value: wave.set_scalar(register, value & WORD)
    return lambda wave, value: wave.set_scalar64(register, value & QUAD)


def _plain(form: Form) -> Step:
    widths, result, function, sets_scc = _PLAIN[form.mnemonic]
    operands = form.operands(1 + len(widths))
    put = setter(form, operands[0], result)
    limit = WORD if result == "w" else QUAD
    sources = [source(form, operand, width) for operand, width in zip(operands[1:], widths, strict=True)]
    first, last = sources[0], sources[-1]

    def one(wave: Wave) -> None:
        value = function(first(wave)) & limit
        put(wave, value)
        if sets_scc:
            wave.set_scc(int(value != 0))

    def two(wave: Wave) -> None:
        value = function(first(wave), last(wave)) & limit
        put(wave, value)
        if sets_scc:
            wave.set_scc(int(value != 0))

    return one if len(sources) == 1 else two


def _with_scc(form: Form) -> Step:
    function, reads_scc = _WITH_SCC[form.mnemonic]
    destination, a, b = form.operands(3)
    put, first, second = setter(form, destination, "w"), form.scalar_source(a), form.scalar_source(b)

    def step(wave: Wave) -> None:
        value, scc = function(first(wave), second(wave), wave.read_scc() if reads_scc else 0)
        put(wave, value)
        wave.set_scc(scc)

    return step


def _compare(form: Form) -> Step:
    name, _, kind = form.mnemonic.removeprefix("s_cmp_").partition("_")
    function = _COMPARE[name]
    a, b = form.operands(2)
    letter = "q" if kind == "u64" else "w"
    first, second = source(form, a, letter), source(form, b, letter)
    if kind == "i32":
        return lambda wave: wave.set_scc(int(function(signed32(first(wave)), signed32(second(wave)))))
    return lambda wave: wave.set_scc(int(function(first(wave), second(wave))))


def _immediate16(operand: Operand, signed: bool) -> int:
    value = int(operand.number)
    if operand.kind != "integer" or operand.modified or not -0x8000 <= value <= 0xFFFF:
        raise UnsupportedInstructionError(f"operand {operand.text} is no 16-bit constant")
    value &= 0xFFFF
    return (value ^ 0x8000) - 0x8000 if signed else value


def _compare_constant(form: Form) -> Step:
    name, _, kind = form.mnemonic.removeprefix("s_cmpk_").partition("_")
    function = _COMPARE[name]
    a, b = form.operands(2)
    first, constant = form.scalar_source(a), _immediate16(b, kind == "i32")
    if kind == "i32":
        return lambda wave: wave.set_scc(int(function(signed32(first(wave)), constant)))
    return lambda wave: wave.set_scc(int(function(first(wave), constant)))


def _constant16(form: Form) -> Step:
    """s_movk_i32, s_addk_i32, s_mulk_i32: the constant is sign-extended."""
    destination, b = form.operands(2)
    put, read, constant = (
        setter(form, destination, "w"),
        form.scalar_source(destination),
        _immediate16(b, True),
    )

    def add(wave: Wave) -> None:
        value, scc = _overflow(signed32(read(wave)) + constant)
        put(wave, value)
        wave.set_scc(scc)

    return {
        "s_movk_i32": lambda wave: put(wave, constant),
        "s_mulk_i32": lambda wave: put(wave, signed32(read(wave)) * constant),
        "s_addk_i32": add,
    }[form.mnemonic]


def _bit_compare(form: Form) -> Step:
    wanted, width = int(form.mnemonic[8]), form.mnemonic[-2:]
    a, b = form.operands(2)
    letter = "w" if width == "32" else "q"
    value, bit, last = source(form, a, letter), form.scalar_source(b), int(width) - 1
    return lambda wave: wave.set_scc(int((value(wave) >> (bit(wave) & last) & 1) == wanted))


def _bit_set(form: Form) -> Step:
    one, width = form.mnemonic[8] == "1", form.mnemonic[-2:]
    letter = "w" if width == "32" else "q"
    destination, b = form.operands(2)
    put, read, bit = (
        setter(form, destination, letter),
        source(form, destination, letter),
        form.scalar_source(b),
    )
    last = int(width) - 1

    def step(wave: Wave) -> None:
        mask = 1 << (bit(wave) & last)
        put(wave, read(wave) | mask if one else read(wave) & ~mask)

    return step


def _no_effect(form: Form) -> Step:
    """s_nop, s_sleep, s_setprio: time only."""
    (count,) = form.operands(1)
    if count.kind != "integer":
        raise UnsupportedInstructionError(f"operand {count.text} is no number")
    return lambda _wave: None


# ---- Lane masks, exec and branches ----
#
# Undefined bits are carried, bit by bit, since compiled code masks undefined lanes away; they raise in exec
# and where they would decide a branch.

_LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}


def undefined_bits(name: str, a: int, b: int, undefined_a: int, undefined_b: int) -> int:
    """Which bits of a logic result depend on undefined bits: a defined 0 decides an AND, a defined 1 an
    OR."""
    either = undefined_a | undefined_b
    if name in ("andn2", "orn2"):
        b = ~b
    if name in ("and", "andn2", "nand"):
        return either & (a | undefined_a) & (b | undefined_b)
    if name in ("or", "orn2", "nor"):
        return either & (~a | undefined_a) & (~b | undefined_b)
    return either


def _not_zero(value: int, undefined: int) -> int | None:
    """Whether a value is not zero; None if that depends on undefined bits."""
    if value & ~undefined:
        return 1
    return None if undefined else 0


def _logic(form: Form) -> Step:
    """Two-operand logic; bits that depend on undefined ones stay undefined."""
    name, _, width = form.mnemonic.removeprefix("s_").partition("_b")
    function = _LOGIC[name]
    letter, limit = ("w", WORD) if width == "32" else ("q", QUAD)
    destination, a, b = form.operands(3)
    put, first, second = (
        _put_moved(form, destination, letter),
        _mover(form, a, letter),
        _mover(form, b, letter),
    )

    def step(wave: Wave) -> None:
        (x, undefined_x), (y, undefined_y) = first(wave), second(wave)
        value, undefined = function(x, y) & limit, 0
        if undefined_x or undefined_y:
            undefined = undefined_bits(name, x, y, undefined_x, undefined_y) & limit
        put(wave, (value, undefined))
        wave.set_scc(_not_zero(value, undefined))

    return step


def _save_exec(form: Form) -> Step:
    name = form.mnemonic.removeprefix("s_").removesuffix("_saveexec_b64")
    function = _LOGIC[name]
    destination, a = form.operands(2)
    register, source = form.scalar_destination(destination, 2), _mover(form, a, "q")

    def step(wave: Wave) -> None:
        old, (mask, undefined) = wave.exec_value, source(wave)
        value = function(mask, old) & QUAD
        if undefined:
            undefined = undefined_bits(name, mask, old, undefined, 0) & QUAD
        wave.set_scalar64(register, old)
        wave.set_scalar64(EXEC, value, undefined)
        wave.set_scc(int(value != 0))

    return step


def _mover(form: Form, operand: Operand, width: str) -> Callable[[Wave], tuple[int, int]]:
    """A source that may be undefined: its value and its undefined bits. In flight it still raises."""
    if not operand.is_register or operand.modified:
        constant = source(form, operand, width)
        return lambda wave: (constant(wave), 0)
    if operand.kind != "scalar" or operand.count != (1 if width == "w" else 2):
        raise UnsupportedInstructionError(f"operand {operand.text} is no scalar source of this width")
    register = operand.index
    if width == "w":
        return lambda wave: (wave.scalars[register], wave.undefined32(register))
    return lambda wave: (
        wave.scalars[register] | wave.scalars[register + 1] << 32,
        wave.undefined64(register),
    )


def _put_moved(form: Form, operand: Operand, width: str) -> Callable[[Wave, tuple[int, int]], None]:
    register = form.scalar_destination(operand, 1 if width == "w" else 2)
    if width == "w":
        return lambda wave, moved: wave.set_scalar(register, *moved)
    return lambda wave, moved: wave.set_scalar64(register, *moved)


def _move(form: Form) -> Step:
    width = "w" if form.mnemonic.endswith("32") else "q"
    destination, a = form.operands(2)
    put, read = _put_moved(form, destination, width), _mover(form, a, width)
    return lambda wave: put(wave, read(wave))


def _conditional_move(form: Form) -> Step:
    """s_cselect and s_cmov."""
    width = "w" if form.mnemonic.endswith("32") else "q"
    operands = form.operands(3 if "cselect" in form.mnemonic else 2)
    put, yes = _put_moved(form, operands[0], width), _mover(form, operands[1], width)
    no = _mover(form, operands[2] if len(operands) == 3 else operands[0], width)
    return lambda wave: put(wave, yes(wave) if wave.read_scc() else no(wave))


def _branch(form: Form) -> Step:
    form.operands(1)
    target = form.kernel.target(form.instruction)

    def jump(wave: Wave) -> None:
        wave.pc = target

    def on_scc(wanted: int) -> Step:
        def step(wave: Wave) -> None:
            if wave.read_scc() == wanted:
                wave.pc = target

        return step

    def on_mask(register: int, zero: bool) -> Step:
        def step(wave: Wave) -> None:
            value = wave.scalars[register] | wave.scalars[register + 1] << 32
            set_ = _not_zero(value, wave.undefined64(register))
            if set_ is None:
                wave.scalar64(register)  # raises: which way to go is undefined
            if (set_ == 0) == zero:
                wave.pc = target

        return step

    return {
        "s_branch": jump,
        "s_cbranch_scc0": on_scc(0),
        "s_cbranch_scc1": on_scc(1),
        "s_cbranch_vccz": on_mask(VCC, True),
        "s_cbranch_vccnz": on_mask(VCC, False),
        "s_cbranch_execz": on_mask(EXEC, True),
        "s_cbranch_execnz": on_mask(EXEC, False),
    }[form.mnemonic]


def _wait(form: Form) -> Step:
    vector_memory_left = form.number("vmcnt", 63)
    lgkm_left = form.number("lgkmcnt", 15)
    form.number("expcnt", 7)  # exports; there are none in a compute kernel

    def step(wave: Wave) -> None:
        # at its highest value a counter is not waited for
        if vector_memory_left < 63:
            wave.counters.wait_vector_memory(vector_memory_left)
        if lgkm_left < 15:
            wave.counters.wait_lgkm(lgkm_left)

    return step


# ---- The table's rows ----

_row = partial(
    Row, kind="salu", destinations=1, keeps=False, writes_exec=False, sets_scc=False, falls_through=True,
    suffixes=(), rule=table.scalar, wide=(), lane_bytes=0, hazard="none",
)  # fmt: skip
_control = partial(_row, destinations=0)


def _wide(letters: str) -> tuple[int, ...]:
    return tuple(at for at, letter in enumerate(letters) if letter == "q")


def _rows() -> Iterator[Row]:
    for name, (widths, _, _, sets_scc) in _PLAIN.items():
        yield _row(name, build=_plain, sets_scc=sets_scc, wide=_wide(widths))
    for name in _WITH_SCC:
        yield _row(name, build=_with_scc, sets_scc=True)
    for name in _COMPARE:
        for kind in ("i32", "u32"):
            rule = partial(table.scalar_compare_constant, unsigned=kind == "u32")
            yield _control(f"s_cmp_{name}_{kind}", build=_compare, sets_scc=True)
            yield _control(f"s_cmpk_{name}_{kind}", build=_compare_constant, sets_scc=True, rule=rule)
    for name in ("eq", "lg"):
        yield _control(f"s_cmp_{name}_u64", build=_compare, sets_scc=True, wide=(0, 1))
    yield _row("s_movk_i32", build=_constant16)
    yield _row("s_mulk_i32", build=_constant16, keeps=True)
    yield _row("s_addk_i32", build=_constant16, keeps=True, sets_scc=True)
    for size, first, both in ((32, (), ()), (64, (0,), (0, 1))):
        for bit in (0, 1):
            yield _control(f"s_bitcmp{bit}_b{size}", build=_bit_compare, sets_scc=True, wide=first)
            yield _row(f"s_bitset{bit}_b{size}", build=_bit_set, keeps=True)
        for name in _LOGIC:
            yield _row(f"s_{name}_b{size}", build=_logic, sets_scc=True, wide=both)
        yield _row(f"s_mov_b{size}", build=_move, wide=first)
        yield _row(f"s_cselect_b{size}", build=_conditional_move, wide=both)
        yield _row(f"s_cmov_b{size}", build=_conditional_move, keeps=True, wide=first)
    for name in _LOGIC:
        yield _row(f"s_{name}_saveexec_b64", build=_save_exec, writes_exec=True, sets_scc=True, wide=(0,))
    yield _control("s_branch", build=_branch, kind="branch", falls_through=False)
    for name in ("scc0", "scc1", "vccz", "vccnz", "execz", "execnz"):
        yield _control(f"s_cbranch_{name}", build=_branch, kind="branch")
    yield _control("s_waitcnt", build=_wait, kind="wait")
    yield _control("s_barrier", build=lambda _form: Stop.BARRIER, kind="barrier")
    yield _control("s_endpgm", build=lambda _form: Stop.END, falls_through=False)
    yield _control("s_nop", build=_no_effect, kind="nop")
    for name in ("s_sleep", "s_setprio"):
        yield _control(name, build=_no_effect)


ROWS = tuple(_rows())
