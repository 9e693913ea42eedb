"""One operand of an instruction, and how LLVM writes it."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Literal

from kernel.gfx950.errors import UnsupportedInstructionError

VCC = 106
M0 = 124
EXEC = 126
LAST_SGPR = 101
ACCUMULATORS = 256
"""Accumulator register n is entry 256 + n of a wave's vector register file."""

_NAMED_SCALARS = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1),
}
_INLINE_FLOATS = (0.0, 0.5, 1.0, 2.0, 4.0)
_INLINE_INVERSE_2PI = 0x3E22F983
_INLINE_BITS = {
    *(
        struct.unpack("<I", struct.pack("<f", sign * value))[0]
        for value in _INLINE_FLOATS[1:]
        for sign in (1, -1)
    ),
    _INLINE_INVERSE_2PI,
}
"""Constants that the hardware has without a literal dword, besides integers from -16 to 64."""
_REGISTER = re.compile(r"(?P<file>[vsa])(?:(?P<one>\d+)|\[(?P<first>\d+):(?P<last>\d+)\])")
_INTEGER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)")
_FLOAT = re.compile(r"-?\d+\.\d*(?:[eE][-+]?\d+)?")
_LABEL = re.compile(r"[.\w$]+")

Kind = Literal["vector", "scalar", "integer", "float", "off", "label", "call"]


@dataclass(frozen=True)
class Operand:
    """``index`` and ``count`` are registers (accumulators follow the vector registers at 256).

    ``number`` is the value of a constant. ``negate``, ``absolute`` and ``sign_extend`` are source modifiers.
    """

    kind: Kind
    text: str
    index: int = -1
    count: int = 1
    number: float = 0
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False

    @property
    def is_register(self) -> bool:
        return self.kind in ("vector", "scalar")

    @property
    def is_accumulator(self) -> bool:
        return self.kind == "vector" and self.index >= ACCUMULATORS

    @property
    def is_constant(self) -> bool:
        return self.kind in ("integer", "float")

    @property
    def is_inline(self) -> bool:
        """Whether the constant is one the hardware has without a literal dword, by its value."""
        if self.kind == "float":
            return abs(self.number) in _INLINE_FLOATS or self.bits32() == _INLINE_INVERSE_2PI
        return self.kind == "integer" and -16 <= self.number <= 64

    @property
    def is_inline32(self) -> bool:
        """As ``is_inline``, by the bits that a 32-bit source sees: 0xffffffff is -1, 0x3f800000 is 1.0."""
        if not self.is_constant:
            return False
        bits = self.bits32()
        return not 64 < bits < 0xFFFFFFF0 or bits in _INLINE_BITS

    @property
    def modified(self) -> bool:
        return self.negate or self.absolute or self.sign_extend

    def bits32(self) -> int:
        """A constant as the 32 bits an instruction of 32-bit operands sees."""
        if self.kind == "float":
            return int(struct.unpack("<I", struct.pack("<f", self.number))[0])
        value = int(self.number)
        if not -(1 << 31) <= value < 1 << 32:
            raise UnsupportedInstructionError(f"constant {self.text} has more than 32 bits")
        return value & 0xFFFFFFFF

    def bits64(self) -> int:
        """A constant as the 64 bits an integer instruction of 64-bit operands sees."""
        if self.kind == "float":
            if not self.is_inline:
                raise UnsupportedInstructionError(f"constant {self.text}: a float literal of 64 bits")
            return int(struct.unpack("<Q", struct.pack("<d", self.number))[0])
        if not self.is_inline and (self.number < 0 or int(self.number) >= 1 << 31):
            raise UnsupportedInstructionError(f"constant {self.text}: the extension of a literal to 64 bits")
        return int(self.number) & 0xFFFFFFFFFFFFFFFF


def parse_operand(text: str) -> Operand:
    """``text`` without the comma; raises UnsupportedInstructionError for a kind that is not known."""
    body, negate, absolute, sign_extend = text, False, False, False
    if body.startswith("sext(") and body.endswith(")"):
        body, sign_extend = body[5:-1], True
    if body.startswith("neg(") and body.endswith(")"):
        body, negate = body[4:-1], True
    elif body.startswith("-") and not (_INTEGER.fullmatch(body) or _FLOAT.fullmatch(body)):
        body, negate = body[1:], True
    if len(body) > 2 and body.startswith("|") and body.endswith("|"):
        body, absolute = body[1:-1], True
    elif body.startswith("abs(") and body.endswith(")"):
        body, absolute = body[4:-1], True

    def operand(kind: Kind, index: int = -1, count: int = 1, number: float = 0) -> Operand:
        return Operand(kind, text, index, count, number, negate, absolute, sign_extend)

    if (register := _REGISTER.fullmatch(body)) is not None:
        first = int(register["one"] or register["first"])
        last = first if register["one"] else int(register["last"])
        limit = LAST_SGPR if register["file"] == "s" else 255
        if not first <= last <= limit:
            raise UnsupportedInstructionError(f"operand {text!r}: registers run from 0 to {limit}")
        if register["file"] == "s":
            return operand("scalar", first, last - first + 1)
        return operand("vector", first + ACCUMULATORS * (register["file"] == "a"), last - first + 1)
    if body in _NAMED_SCALARS:
        index, count = _NAMED_SCALARS[body]
        return operand("scalar", index, count)
    if _INTEGER.fullmatch(body):
        return operand("integer", number=int(body, 0))
    if _FLOAT.fullmatch(body):
        return operand("float", number=float(body))
    if not (negate or absolute or sign_extend):
        if body == "off":
            return operand("off")
        if body.startswith(("hwreg(", "sendmsg(")):
            return operand("call")
        if _LABEL.fullmatch(body):
            return operand("label")
    raise UnsupportedInstructionError(f"operand {text!r} is of no kind that is implemented")
