"""An instruction being decoded: its operands as functions of a wave, and every modifier accounted for.

A builder takes from a ``Form`` what it implements; ``close`` then refuses whatever nobody took, so that no
operand or modifier is ever silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import UndefinedReadError, UnsupportedInstructionError
from kernel.gfx950.operands import ACCUMULATORS, EXEC, Operand
from kernel.gfx950.parse import Instruction, Kernel
from kernel.gfx950.registers import scalar_name
from kernel.gfx950.wave import Wave

Step = Callable[[Wave], None]
"""One decoded instruction: reads and changes the wave."""
Builder = Callable[["Form"], Step]

Value = Any
"""64 lanes as a numpy array, or one numpy scalar where all lanes agree."""
ValueSource = Callable[[Wave], Value]
IntegerSource = Callable[[Wave], int]

TypeLetter = Literal["u", "i", "f", "U", "I", "h", "k"]
"""u, i, f: 32-bit unsigned, signed, float; U, I: 64-bit in a register pair; h, k: the low 16 bits,
unsigned, signed."""

SIGN32, MAGNITUDE32 = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_EVERY_LANE = np.ones(64, np.bool_)
_CAST: dict[str, Any] = {"u": np.uint32, "i": np.int32, "f": np.float32, "U": np.uint64, "I": np.int64}


class Form:
    """The operands and modifiers of one instruction of ``kernel``."""

    def __init__(self, instruction: Instruction, kernel: Kernel) -> None:
        self.instruction = instruction
        self.kernel = kernel
        self.mnemonic = instruction.mnemonic
        self.line = instruction.line
        self._modifiers = dict(instruction.modifiers)
        self._operands_taken = False
        self._encodings = {"", "e32", "e64"}

    # -- accounting

    def operands(self, *counts: int) -> tuple[Operand, ...]:
        """The operands; their number must be one of ``counts``."""
        self._operands_taken = True
        found = self.instruction.operands
        if len(found) not in counts:
            raise UnsupportedInstructionError(f"{self.mnemonic} with {len(found)} operands")
        return found

    def allow_encoding(self, *encodings: str) -> str:
        self._encodings |= set(encodings)
        return self.instruction.encoding

    def flag(self, name: str) -> bool:
        return self._modifiers.pop(name, 0) == 1

    def number(self, name: str, default: int = 0) -> int:
        value = self._modifiers.pop(name, default)
        if not isinstance(value, int):
            raise UnsupportedInstructionError(f"modifier {name}:{value} is not a number")
        return value

    def bits(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = self._modifiers.pop(name, default)
        if not isinstance(value, tuple) or len(value) != len(default):
            raise UnsupportedInstructionError(f"modifier {name} needs {len(default)} bits")
        return value

    def word(self, name: str, default: str) -> str:
        value = self._modifiers.pop(name, default)
        if not isinstance(value, str):
            raise UnsupportedInstructionError(f"modifier {name}:{value} is not a word")
        return value

    def has(self, *names: str) -> bool:
        return any(name in self._modifiers for name in names)

    def cache_policy(self) -> None:
        """sc0, sc1 and nt choose caches and never change a value in a race-free kernel."""
        for name in ("sc0", "sc1", "nt"):
            self.flag(name)

    def close(self) -> None:
        if self.instruction.encoding not in self._encodings:
            raise UnsupportedInstructionError(f"{self.mnemonic} in the {self.instruction.encoding} encoding")
        if self._modifiers:
            raise UnsupportedInstructionError(f"{self.mnemonic} with modifier {', '.join(self._modifiers)}")
        if not self._operands_taken and self.instruction.operands:
            raise UnsupportedInstructionError(f"{self.mnemonic} with operands")

    # -- registers

    def vector(self, operand: Operand, count: int = 1, *, accumulator: bool | None = False) -> int:
        """First register of a vector operand of exactly ``count``; ``accumulator=None`` allows both files."""
        self.plain(operand)
        if operand.kind != "vector" or operand.count != count:
            raise UnsupportedInstructionError(f"operand {operand.text}: {count} vector registers are needed")
        if accumulator is not None and operand.is_accumulator != accumulator:
            raise UnsupportedInstructionError(f"operand {operand.text} is in the wrong register file")
        self._check_allocated(operand)
        return operand.index

    def scalar_destination(self, operand: Operand, count: int) -> int:
        self.plain(operand)
        if operand.kind != "scalar" or operand.count != count:
            raise UnsupportedInstructionError(f"operand {operand.text}: {count} scalar registers are needed")
        if count == 1 and operand.index in (EXEC, EXEC + 1):
            raise UnsupportedInstructionError("a write of one half of exec")
        return operand.index

    def plain(self, operand: Operand) -> None:
        if operand.modified:
            raise UnsupportedInstructionError(
                f"operand {operand.text}: no source modifier is implemented here"
            )

    def _check_allocated(self, operand: Operand) -> None:
        known = self.kernel.metadata
        if known is None or operand.kind != "vector":
            return
        last = operand.index + operand.count - 1
        limit, first = (
            (known.vgprs - known.accum_offset, ACCUMULATORS) if operand.is_accumulator else (known.vgprs, 0)
        )
        if last - first >= limit:
            raise UnsupportedInstructionError(
                f"operand {operand.text}: the kernel was given {limit} such registers"
            )

    # -- scalar sources

    def scalar_source(self, operand: Operand) -> IntegerSource:
        """A 32-bit scalar source as an unsigned Python integer."""
        self.plain(operand)
        if operand.is_constant:
            value = operand.bits32()
            return lambda _wave: value
        if operand.kind == "scalar" and operand.count == 1:
            register = operand.index

            def read(wave: Wave) -> int:
                if wave.scalar_states[register]:
                    return wave.scalar(register)
                return wave.scalars[register]

            return read
        raise UnsupportedInstructionError(f"operand {operand.text} is no 32-bit scalar source")

    def scalar_source64(self, operand: Operand) -> IntegerSource:
        """A 64-bit scalar source as an unsigned Python integer."""
        self.plain(operand)
        if operand.is_constant:
            value = operand.bits64()
            return lambda _wave: value
        if operand.kind == "scalar" and operand.count == 2:
            register = operand.index
            return lambda wave: wave.scalar64(register)
        raise UnsupportedInstructionError(f"operand {operand.text} is no 64-bit scalar source")

    # -- vector sources

    def source(self, operand: Operand, letter: TypeLetter) -> ValueSource:
        """A source of a vector instruction, of the type ``letter``. Undefined active lanes taint the
        instruction."""
        if operand.sign_extend:
            raise UnsupportedInstructionError(
                f"operand {operand.text}: sign extension is implemented for sdwa only"
            )
        if operand.negate or operand.absolute:
            if letter != "f":
                raise UnsupportedInstructionError(
                    f"operand {operand.text}: a float modifier on an integer source"
                )
            return _with_sign_modifiers(self._bare_source(operand, "u"), operand.negate, operand.absolute)
        return self._bare_source(operand, letter)

    def address(self, operand: Operand, letter: TypeLetter) -> ValueSource:
        """As ``source``, but undefined active lanes raise: they would decide which memory is touched."""
        read = self.source(operand, letter)

        def checked(wave: Wave) -> Value:
            value = read(wave)
            if wave.taint is not None:
                lane = int(np.argmax(wave.taint))
                raise UndefinedReadError(f"an address in {wave.taint_source}, which nothing wrote", lane=lane)
            return value

        return checked

    def _bare_source(self, operand: Operand, letter: TypeLetter) -> ValueSource:
        if letter in ("h", "k"):
            return self._source16(operand, signed=letter == "k")
        if letter in ("U", "I"):
            return self._source64(operand, _CAST[letter])
        if operand.is_constant:
            constant = np.uint32(operand.bits32()).view(_CAST[letter])
            return lambda _wave: constant
        if operand.kind == "scalar" and operand.count == 1:
            return _scalar32(operand.index, _CAST[letter])
        if operand.kind == "vector" and operand.count == 1 and not operand.is_accumulator:
            self._check_allocated(operand)
            return _vector32(operand.index, letter)
        raise UnsupportedInstructionError(f"operand {operand.text} is no 32-bit vector source")

    def _source64(self, operand: Operand, cast: Any) -> ValueSource:
        if operand.is_constant:
            constant = np.uint64(operand.bits64()).view(cast)
            return lambda _wave: constant
        if operand.kind == "scalar" and operand.count == 2:
            return _scalar64(operand.index, cast)
        if operand.kind == "vector" and operand.count == 2 and not operand.is_accumulator:
            self._check_allocated(operand)
            register = operand.index

            def read(wave: Wave) -> npt.NDArray[Any]:
                states = wave.vector_states
                if states[register]:
                    wave.taint_from(register)
                if states[register + 1]:
                    wave.taint_from(register + 1)
                pair = np.empty((64, 2), np.uint32)
                pair[:, 0] = wave.u32[register]
                pair[:, 1] = wave.u32[register + 1]
                value: npt.NDArray[Any] = pair.view(cast)[:, 0]
                return value

            return read
        raise UnsupportedInstructionError(f"operand {operand.text} is no 64-bit vector source")

    def _source16(self, operand: Operand, *, signed: bool) -> ValueSource:
        if operand.is_constant and (operand.kind == "float" or not operand.is_inline):
            raise UnsupportedInstructionError(
                f"operand {operand.text}: this constant of a 16-bit instruction"
            )
        whole = self._bare_source(operand, "u")
        cast: Any = np.int16 if signed else np.uint16
        return lambda wave: np.asarray(whole(wave) & np.uint32(0xFFFF)).astype(np.uint16).view(cast)


def _with_sign_modifiers(bits: ValueSource, negate: bool, absolute: bool) -> ValueSource:
    keep = MAGNITUDE32 if absolute else np.uint32(0xFFFFFFFF)
    flip = SIGN32 if negate else np.uint32(0)
    return lambda wave: ((bits(wave) & keep) ^ flip).view(np.float32)


def _scalar32(register: int, cast: Any) -> ValueSource:
    def read(wave: Wave) -> Any:
        if wave.scalar_states[register] and wave.undefined32(register):
            wave.add_taint(_EVERY_LANE, scalar_name(register))
        return np.uint32(wave.scalars[register]).view(cast)

    return read


def _scalar64(register: int, cast: Any) -> ValueSource:
    def read(wave: Wave) -> Any:
        states = wave.scalar_states
        if (states[register] or states[register + 1]) and wave.undefined64(register):
            wave.add_taint(_EVERY_LANE, scalar_name(register))
        return np.uint64(wave.scalars[register] | wave.scalars[register + 1] << 32).view(cast)

    return read


def _vector32(register: int, letter: str) -> ValueSource:
    def read_u(wave: Wave) -> Any:
        if wave.vector_states[register]:
            wave.taint_from(register)
        return wave.u32[register]

    def read_i(wave: Wave) -> Any:
        if wave.vector_states[register]:
            wave.taint_from(register)
        return wave.i32[register]

    def read_f(wave: Wave) -> Any:
        if wave.vector_states[register]:
            wave.taint_from(register)
        return wave.f32[register]

    return {"u": read_u, "i": read_i, "f": read_f}[letter]
