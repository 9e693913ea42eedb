"""One kernel as data: its instructions, their operands, and what the code object says about it."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kernel.gfx950.errors import AssemblySyntaxError, UnsupportedInstructionError

VCC = 106
M0 = 124
EXEC = 126
ACCUMULATORS = 256
"""Accumulator register n is entry 256 + n of a wave's vector register file."""

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


@dataclass(frozen=True)
class KernelArgument:
    """One kernel argument: ``offset`` and ``size`` in bytes within the kernarg segment."""

    offset: int
    size: int
    value_kind: str


@dataclass(frozen=True)
class KernelMetadata:
    """Sizes are bytes a workgroup (``lds_bytes``) or a lane (``scratch_bytes``)."""

    name: str
    lds_bytes: int = 0
    scratch_bytes: int = 0
    kernarg_bytes: int = 0
    user_sgprs: int = 2
    kernarg_pointer: bool = True
    kernarg_preload_dwords: int = 0
    kernarg_preload_offset_dwords: int = 0
    workgroup_id: tuple[bool, bool, bool] = (True, False, False)
    workitem_id_dimensions: int = 1
    vgprs: int = 512
    """Vector registers of a lane, accumulator registers included."""
    accum_offset: int = 256
    """Where the accumulator registers begin in the unified file: a vector register's number is below it."""
    sgprs: int = 102
    ieee_mode: bool = True
    dx10_clamp: bool = True
    arguments: tuple[KernelArgument, ...] = ()
    notes: dict[str, int] = field(default_factory=dict)
    """Integer entries of ``amdhsa.kernels``: ``vgpr_count``, ``agpr_count``, ``vgpr_spill_count``, ..."""


Modifier = int | str | tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """``mnemonic`` is without the encoding suffix (``encoding``: "e32", "e64", "dpp", "sdwa" or "").

    ``line`` is the 1-based line of ``text`` in the assembly; ``address`` the byte address where the text
    tells it. A flag modifier has the value 1, a bracketed one a tuple.
    """

    mnemonic: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: Mapping[str, Modifier]
    line: int
    text: str
    address: int | None = None


@dataclass(eq=False)
class Kernel:
    """One kernel's instructions in order. ``labels`` maps each label to the index of the instruction behind
    it."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    metadata: KernelMetadata | None = None

    def target(self, instruction: Instruction) -> int:
        """Index of the instruction that a branch goes to."""
        operand = instruction.operands[0]
        if operand.kind == "label" and operand.text in self.labels:
            return self.labels[operand.text]
        if operand.kind == "integer" and instruction.address is not None:
            distance = (int(operand.number) + 0x8000) % 0x10000 - 0x8000
            wanted = instruction.address + 4 + 4 * distance
            index = bisect_left(self.instructions, wanted, key=lambda one: one.address or 0)
            if index < len(self.instructions) and self.instructions[index].address == wanted:
                return index
        raise AssemblySyntaxError(f"branch target {operand.text!r} is no instruction of kernel {self.name}")


@dataclass(frozen=True)
class Program:
    """The kernels of one assembly text, by name."""

    kernels: Mapping[str, Kernel]
