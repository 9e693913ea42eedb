"""An instruction being decoded: its operands as functions of a wave, and every modifier accounted for.

A builder takes from a ``Form`` what it implements; ``close`` then refuses whatever nobody took, so that no
operand or modifier is ever silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import UndefinedReadError, UnsupportedInstructionError
from kernel.gfx950.program import ACCUMULATORS, EXEC, Instruction, Kernel, Operand
from kernel.gfx950.wave import LaneMask, Wave, each_lane, scalar_name, vector_name

Step = Callable[[Wave], None]
"""One decoded instruction: reads and changes the wave."""


class Stop(Enum):
    """Where a wave stops: at a barrier until all waves of the workgroup have come, or at its end."""

    BARRIER = "s_barrier"
    END = "s_endpgm"


Builder = Callable[["Form"], Step | Stop]

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


# ---- Results: written under exec, undefined where a source was ----


def write32(register: int, letter: str) -> Callable[[Wave, Value], None]:
    """Writes a 32-bit result under exec; ``letter`` is the type of the value."""

    def write(wave: Wave, value: Value) -> None:
        if wave.taint is not None:
            wave.write_tainted(register, np.asarray(value), wave.taint)
            return
        if wave.vector_states[register]:
            wave.before_write(register)
        row = (
            wave.f32[register]
            if letter == "f"
            else wave.i32[register]
            if letter == "i"
            else wave.u32[register]
        )
        if wave.full:
            row[:] = value
        else:
            np.copyto(row, value, where=wave.lanes)

    return write


def write64(register: int) -> Callable[[Wave, Value], None]:
    """Writes a 64-bit result to a register pair under exec."""
    low, high = write32(register, "u"), write32(register + 1, "u")

    def write(wave: Wave, value: Value) -> None:
        bits = np.asarray(value).view(np.uint64)
        low(wave, (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        high(wave, (bits >> np.uint64(32)).astype(np.uint32))

    return write


# ---- DPP: the first source comes from another lane of the wave (LLVM AMDGPU guide, "DPP") ----
#
# A lane whose source lane does not exist or is inactive reads 0 under ``bound_ctrl``, and is not written
# without it. ``row_mask`` and ``bank_mask`` leave whole rows of 16 and banks of 4 lanes unwritten.

_LANES = np.arange(64)
_ROW, _IN_ROW = _LANES & ~15, _LANES & 15


def lane_map(form: Form) -> tuple[npt.NDArray[np.intp], LaneMask]:
    """The lane that each lane reads, and whether that lane exists."""
    everywhere = np.ones(64, np.bool_)
    if form.has("quad_perm"):
        pick = np.array(form.bits("quad_perm", (0, 1, 2, 3)))
        if pick.min() < 0 or pick.max() > 3:
            raise UnsupportedInstructionError(f"quad_perm:{pick.tolist()}: lanes of a quad are 0 to 3")
        return (_LANES & ~3) + pick[_LANES & 3], everywhere
    if form.flag("row_mirror"):
        return _ROW + 15 - _IN_ROW, everywhere
    if form.flag("row_half_mirror"):
        return (_LANES & ~7) + 7 - (_LANES & 7), everywhere
    for name, low, high in (
        ("row_shl", 1, 15),
        ("row_shr", 1, 15),
        ("row_ror", 1, 15),
        ("row_newbcast", 0, 15),
    ):
        if form.has(name):
            count = form.number(name)
            if not low <= count <= high:
                raise UnsupportedInstructionError(f"{name}:{count}: from {low} to {high}")
            if name == "row_ror":
                return _ROW + (_IN_ROW - count) % 16, everywhere
            if name == "row_newbcast":
                return _ROW + count, everywhere
            at = _IN_ROW + count if name == "row_shl" else _IN_ROW - count
            return _ROW + np.clip(at, 0, 15), (at >= 0) & (at <= 15)
    if form.has("row_bcast"):
        count = form.number("row_bcast")
        if count == 15:  # lane 15 of a row to the whole next row
            return np.maximum(_ROW - 1, 0), _LANES >= 16
        if count == 31:  # lane 31 to the upper half
            return np.full(64, 31), _LANES >= 32
    raise UnsupportedInstructionError(f"{form.mnemonic}: this dpp control")


def dpp_step(
    form: Form,
    operands: Sequence[Operand],
    letters: str,
    result: str,
    function: Callable[..., Value],
    sources: Sequence[ValueSource],
) -> Step:
    """``function`` of ``sources``, the first of which is replaced by its lanes moved."""
    form.allow_encoding("dpp")
    if result in ("U", "I") or letters[0] not in ("u", "i", "f"):
        raise UnsupportedInstructionError(f"{form.mnemonic} with dpp")
    register = form.vector(operands[0])
    moved = operands[1]
    if moved.kind != "vector" or moved.is_accumulator or moved.count != 1:
        raise UnsupportedInstructionError(f"operand {moved.text}: dpp moves a vector register")
    if moved.modified:
        raise UnsupportedInstructionError(f"operand {moved.text}: a source modifier with dpp")
    origin, letter, rest = moved.index, letters[0], list(sources[1:])
    lanes, exists = lane_map(form)
    rows, banks = form.number("row_mask", 15), form.number("bank_mask", 15)
    if not (0 <= rows < 16 and 0 <= banks < 16):
        raise UnsupportedInstructionError(f"row_mask:{rows:#x} bank_mask:{banks:#x}: masks have 4 bits")
    zero_outside = form.has("bound_ctrl")
    if zero_outside and form.number("bound_ctrl") not in (0, 1):
        raise UnsupportedInstructionError("bound_ctrl: 0 and 1 both set the bit, leaving it out clears it")
    enabled = ((rows >> (_LANES >> 4)) & 1 == 1) & ((banks >> ((_LANES & 15) >> 2)) & 1 == 1)
    cast = {"u": np.uint32, "i": np.int32, "f": np.float32}[letter]

    def step(wave: Wave) -> None:
        valid = exists if wave.full else exists & wave.lanes[lanes]
        written = enabled & wave.lanes if zero_outside else enabled & wave.lanes & valid
        defined = wave.definedness(origin)
        if defined is not None:
            wave.add_taint(written & valid & ~defined[lanes], vector_name(origin))
        value = np.where(valid, wave.u32[origin][lanes], np.uint32(0)).view(cast)
        out = np.asarray(function(value, *[source(wave) for source in rest]))
        known = None if wave.taint is None else ~wave.taint
        wave.taint_written = True
        wave.move(register, each_lane(out).view(np.uint32), known, written)

    return step


# ---- SDWA: sources and result are bytes or words of registers ----

_SELECTIONS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
    "DWORD": (0, 32),
}
"""First bit and number of bits."""


def _selection(form: Form, name: str) -> tuple[int, int]:
    word = form.word(name, "DWORD")
    if word not in _SELECTIONS:
        raise UnsupportedInstructionError(f"{name}:{word}: not a part of a dword")
    return _SELECTIONS[word]


def sdwa_source(form: Form, operand: Operand, at: int, letter: str) -> ValueSource:
    """Source number ``at`` (0 or 1) with its selection."""
    start, bits = _selection(form, f"src{at}_sel")
    if operand.is_accumulator or not operand.is_register:
        raise UnsupportedInstructionError(
            f"operand {operand.text}: an sdwa source is a vector or scalar register"
        )
    whole, half = letter in ("u", "i"), letter == "h" and bits == 16 and not operand.sign_extend
    if operand.negate or operand.absolute or not (whole or half) or (operand.sign_extend and bits == 32):
        raise UnsupportedInstructionError(f"{form.mnemonic} in the sdwa encoding with operand {operand.text}")
    plain = Operand(operand.kind, operand.text, operand.index, operand.count)
    read = form.source(plain, "u")
    if half:
        return lambda wave: (read(wave) >> np.uint32(start)).astype(np.uint16)
    low, up = np.uint32(32 - bits - start), np.uint32(32 - bits)
    if operand.sign_extend:
        cast = np.uint32 if letter == "u" else np.int32
        return lambda wave: ((read(wave) << low).view(np.int32) >> up.view(np.int32)).view(cast)
    if letter == "i":
        return lambda wave: ((read(wave) << low) >> up).view(np.int32)
    return lambda wave: (read(wave) << low) >> up


def sdwa_step(
    form: Form, operands: Sequence[Operand], letters: str, result: str, function: Callable[..., Value]
) -> Step:
    """``function`` of the selected parts; the unused part of the result is cleared, sign-filled or kept."""
    if len(letters) > 2 or result not in ("u", "i", "f"):
        raise UnsupportedInstructionError(f"{form.mnemonic} in the sdwa encoding")
    register = form.vector(operands[0])
    sources = [
        sdwa_source(form, operand, at, letter)
        for at, (operand, letter) in enumerate(zip(operands[1:], letters, strict=True))
    ]
    start, bits = _selection(form, "dst_sel")
    unused = form.word("dst_unused", "UNUSED_PRESERVE")  # LLVM's default
    if unused not in ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"):
        raise UnsupportedInstructionError(f"dst_unused:{unused}")
    if bits == 32:
        whole = write32(register, result)
        return lambda wave: whole(wave, function(*[source(wave) for source in sources]))
    if result == "f":
        raise UnsupportedInstructionError(f"{form.mnemonic} to a part of a dword")
    put = write32(register, "u")
    part = np.uint32((1 << bits) - 1)
    kept = np.uint32(0xFFFFFFFF) ^ (part << np.uint32(start))

    def step(wave: Wave) -> None:
        out = np.asarray(function(*[source(wave) for source in sources])).view(np.uint32)
        placed = (out & part) << np.uint32(start)
        if unused == "UNUSED_SEXT":
            extended = ((out << np.uint32(32 - bits)).view(np.int32) >> np.int32(32 - bits)).view(np.uint32)
            placed = extended << np.uint32(start)
        elif unused == "UNUSED_PRESERVE":
            if wave.vector_states[register]:
                wave.taint_from(register)
            placed = placed | (wave.u32[register] & kept)
        put(wave, placed)

    return step
