"""Scalar logic, moves, exec and branches: what handles lane masks.

Undefined bits are carried, bit by bit, since compiled code masks undefined lanes away; they raise in exec and
where they would decide a branch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.form import Builder, Form, Step
from kernel.gfx950.instructions.salu import QUAD, WORD, source
from kernel.gfx950.operands import EXEC, VCC, Operand
from kernel.gfx950.wave import Wave

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


def _builders() -> dict[str, Builder]:
    found: dict[str, Builder] = {f"s_{name}_b{width}": _logic for name in _LOGIC for width in (32, 64)}
    found |= {f"s_{name}_saveexec_b64": _save_exec for name in _LOGIC}
    found |= {f"s_mov_b{width}": _move for width in (32, 64)}
    found |= {f"s_{name}_b{width}": _conditional_move for name in ("cselect", "cmov") for width in (32, 64)}
    branches = ("scc0", "scc1", "vccz", "vccnz", "execz", "execnz")
    found |= dict.fromkeys(("s_branch", *(f"s_cbranch_{name}" for name in branches)), _branch)
    return found


BUILDERS = _builders()
