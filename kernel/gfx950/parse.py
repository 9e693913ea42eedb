"""Assembly text to instructions: what LLVM prints for gfx950, and what llvm-objdump prints of the binary.

Branch targets may be labels (``.LBB0_2``, ``L15``) or, in disassembly, a distance in dwords after the next
instruction, which needs the address comments that llvm-objdump writes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from kernel.gfx950.errors import AssemblySyntaxError, InterpreterError, UnsupportedInstructionError

# One operand of an instruction, and how LLVM writes it.

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


# What the code object says about a kernel: sizes, register counts, which registers are set up at its start.
#
# Three sources, one result: the ``.amdhsa_`` directives and the ``amdhsa.kernels`` notes of assembly text,
# and the 64-byte kernel descriptor of a code object (LLVM's AMDGPU usage guide, "Code Object Kernel
# Descriptor").


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


_REQUIRED_VALUES = {
    # what the interpreter takes for granted; anything else would change results
    "user_sgpr_dispatch_ptr": 0,
    "user_sgpr_queue_ptr": 0,
    "user_sgpr_dispatch_id": 0,
    "user_sgpr_private_segment_size": 0,
    "uses_dynamic_stack": 0,
    "system_sgpr_workgroup_info": 0,
    "float_round_mode_32": 0,
    "float_round_mode_16_64": 0,
    "float_denorm_mode_32": 3,
    "float_denorm_mode_16_64": 3,
    "fp16_overflow": 0,
    "tg_split": 0,
}


def from_directives(name: str, directives: dict[str, int]) -> KernelMetadata:
    """``directives`` maps each ``.amdhsa_X`` of a kernel, without the prefix, to its value."""
    for key, wanted in _REQUIRED_VALUES.items():
        if directives.get(key, wanted) != wanted:
            raise UnsupportedInstructionError(
                f".amdhsa_{key} {directives[key]}: only {wanted} is implemented"
            )

    def get(key: str, default: int) -> int:
        return directives.get(key, default)

    kernarg_pointer = bool(get("user_sgpr_kernarg_segment_ptr", 0))
    preload = get("user_sgpr_kernarg_preload_length", 0)
    return KernelMetadata(
        name=name,
        lds_bytes=get("group_segment_fixed_size", 0),
        scratch_bytes=get("private_segment_fixed_size", 0),
        kernarg_bytes=get("kernarg_size", 0),
        user_sgprs=get("user_sgpr_count", 2 * kernarg_pointer + preload),
        kernarg_pointer=kernarg_pointer,
        kernarg_preload_dwords=preload,
        kernarg_preload_offset_dwords=get("user_sgpr_kernarg_preload_offset", 0),
        workgroup_id=(
            bool(get("system_sgpr_workgroup_id_x", 1)),
            bool(get("system_sgpr_workgroup_id_y", 0)),
            bool(get("system_sgpr_workgroup_id_z", 0)),
        ),
        workitem_id_dimensions=get("system_vgpr_workitem_id", 0) + 1,
        vgprs=get("next_free_vgpr", 512),
        accum_offset=get("accum_offset", 256),
        sgprs=get("next_free_sgpr", 102),
        ieee_mode=bool(get("ieee_mode", 1)),
        dx10_clamp=bool(get("dx10_clamp", 1)),
    )


def from_descriptor(
    name: str,
    descriptor: bytes,
    arguments: tuple[KernelArgument, ...] = (),
    notes: dict[str, int] | None = None,
) -> KernelMetadata:
    """From a code object's 64-byte kernel descriptor (the symbol ``name.kd``)."""
    if len(descriptor) != 64:
        raise AssemblySyntaxError(f"kernel descriptor of {name}: {len(descriptor)} bytes, 64 are needed")
    lds, scratch, kernarg = struct.unpack_from("<III", descriptor, 0)
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", descriptor, 44)
    directives = {
        "group_segment_fixed_size": lds,
        "private_segment_fixed_size": scratch,
        "kernarg_size": kernarg,
        "user_sgpr_count": rsrc2 >> 1 & 31,
        "user_sgpr_dispatch_ptr": properties >> 1 & 1,
        "user_sgpr_queue_ptr": properties >> 2 & 1,
        "user_sgpr_kernarg_segment_ptr": properties >> 3 & 1,
        "user_sgpr_dispatch_id": properties >> 4 & 1,
        "user_sgpr_private_segment_size": properties >> 6 & 1,
        "uses_dynamic_stack": properties >> 11 & 1,
        "user_sgpr_kernarg_preload_length": preload & 0x7F,
        "user_sgpr_kernarg_preload_offset": preload >> 7,
        "system_sgpr_workgroup_id_x": rsrc2 >> 7 & 1,
        "system_sgpr_workgroup_id_y": rsrc2 >> 8 & 1,
        "system_sgpr_workgroup_id_z": rsrc2 >> 9 & 1,
        "system_sgpr_workgroup_info": rsrc2 >> 10 & 1,
        "system_vgpr_workitem_id": rsrc2 >> 11 & 3,
        "next_free_vgpr": ((rsrc1 & 63) + 1) * 8,
        "accum_offset": ((rsrc3 & 63) + 1) * 4,
        "float_round_mode_32": rsrc1 >> 12 & 3,
        "float_round_mode_16_64": rsrc1 >> 14 & 3,
        "float_denorm_mode_32": rsrc1 >> 16 & 3,
        "float_denorm_mode_16_64": rsrc1 >> 18 & 3,
        "dx10_clamp": rsrc1 >> 21 & 1,
        "ieee_mode": rsrc1 >> 23 & 1,
        "fp16_overflow": rsrc1 >> 26 & 1,
        "tg_split": rsrc3 >> 16 & 1,
    }
    return replace(from_directives(name, directives), arguments=arguments, notes=notes or {})


_NOTE_ENTRY = re.compile(r"^(?P<indent> *)(?P<item>- )?\.(?P<key>\w+): *(?P<value>.*)$")


def read_notes(lines: list[str]) -> dict[str, tuple[tuple[KernelArgument, ...], dict[str, int]]]:
    """Arguments and integer entries of each kernel in the ``amdhsa.kernels`` notes, by kernel name.

    Reads the one layout LLVM writes: kernels are list items two spaces in, their arguments list items six in.
    """
    kernels: dict[str, tuple[tuple[KernelArgument, ...], dict[str, int]]] = {}
    name = ""
    arguments: list[dict[str, str]] = []
    notes: dict[str, int] = {}

    def close() -> None:
        if name:
            kernels[name] = (
                tuple(KernelArgument(int(a["offset"]), int(a["size"]), a["value_kind"]) for a in arguments),
                dict(notes),
            )

    for line in lines:
        entry = _NOTE_ENTRY.match(line)
        if entry is None:
            continue
        depth, key, value = (
            len(entry["indent"]) + len(entry["item"] or ""),
            entry["key"],
            entry["value"].strip(),
        )
        if depth == 4:
            if entry["item"]:
                close()
                name, arguments, notes = "", [], {}
            if key == "name":
                name = value.strip("'\"")
            elif re.fullmatch(r"-?\d+", value):
                notes[key] = int(value)
        elif depth == 8:
            if entry["item"]:
                arguments.append({})
            arguments[-1][key] = value
    close()
    return kernels


Modifier = int | str | tuple[int, ...]

_FLAGS = {"offen", "idxen", "lds", "sc0", "sc1", "nt", "clamp", "row_mirror", "row_half_mirror"}
_VALUED = {
    "offset", "offset0", "offset1", "bitop3", "cbsz", "blgp", "abid", "mul", "div",
    "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "dst_sel", "dst_unused", "src0_sel", "src1_sel",
    "quad_perm", "row_shl", "row_shr", "row_ror", "row_bcast", "row_newbcast",
    "row_mask", "bank_mask", "bound_ctrl", "wave_shl", "wave_shr", "wave_rol", "wave_ror",
}  # fmt: skip
_ENCODINGS = ("e32", "e64", "dpp", "sdwa")
_COUNTERS = ("vmcnt", "lgkmcnt", "expcnt")


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
            for index, other in enumerate(self.instructions):
                if other.address == wanted:
                    return index
        raise AssemblySyntaxError(f"branch target {operand.text!r} is no instruction of kernel {self.name}")


@dataclass(frozen=True)
class Program:
    """The kernels of one assembly text, by name."""

    kernels: Mapping[str, Kernel]


def parse_program(text: str, metadata: Mapping[str, KernelMetadata] | None = None) -> Program:
    """Every kernel of an assembly text or of a ``llvm-objdump -d`` listing.

    ``metadata`` adds to, and overrides, what the text itself says. Raises AssemblySyntaxError or
    UnsupportedInstructionError with the line. That a mnemonic is implemented is checked when a kernel first
    runs.
    """
    kernels = _Reader(text).read()
    for name, known in (metadata or {}).items():
        if name not in kernels:
            raise AssemblySyntaxError(
                f"metadata of kernel {name!r}: the text holds {', '.join(kernels) or 'none'}"
            )
        kernels[name].metadata = known
    return Program(kernels)


class _Reader:
    _ADDRESS = re.compile(r"//\s*([0-9A-F]{8,16}):")
    _LISTING_SYMBOL = re.compile(r"^([0-9a-f]+) <([^>]+)>:$")
    _LABEL = re.compile(r"^\s*([.\w$]+):\s*$")
    _FUNCTION = re.compile(r"^\s*\.type\s+([.\w$]+),\s*@function", re.M)
    _LISTING_TITLE = re.compile(r"file format elf64|^Disassembly of section")
    _QUIET = re.compile(r"\.(loc|file|cfi_\w+|p2align\w*|set|weak|hidden|globl|type)\b")

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.functions = set(self._FUNCTION.findall(text))
        self.kernels: dict[str, Kernel] = {}
        self.open: Kernel | None = None
        self.notes: list[str] = []
        self.directives: dict[str, dict[str, int]] = {}

    def read(self) -> dict[str, Kernel]:
        lines = enumerate(self.lines, 1)
        for number, line in lines:
            try:
                self._line(number, line, lines)
            except InterpreterError as error:
                raise error.locate(line=number, text=line.split("//")[0].strip()) from None
        notes = read_notes(self.notes)
        for name, directives in self.directives.items():
            if name in self.kernels:
                arguments, integers = notes.get(name, ((), {}))
                known = from_directives(name, directives)
                self.kernels[name].metadata = replace(known, arguments=arguments, notes=integers)
        return self.kernels

    def _line(self, number: int, line: str, rest: Iterator[tuple[int, str]]) -> None:
        body = re.split(r";|//", line, maxsplit=1)[0].rstrip()
        if not body.strip():
            return
        if (symbol := self._LISTING_SYMBOL.match(line)) is not None:
            self._label(symbol[2])
        elif self._LISTING_TITLE.search(line):
            self.open = None
        elif (label := self._LABEL.match(body)) is not None:
            self._label(label[1])
        elif body.lstrip().startswith("."):
            self._directive(body.strip(), rest)
        elif self.open is None:
            raise AssemblySyntaxError("an instruction before the first kernel's label")
        else:
            address = self._ADDRESS.search(line)
            made = parse_instruction(body.strip(), number, int(address[1], 16) if address else None)
            self.open.instructions.append(made)

    def _label(self, name: str) -> None:
        local = (
            name.startswith(".L")
            or re.fullmatch(r"L\d+", name)
            or (self.functions and name not in self.functions)
        )
        if local and self.open is not None:
            self.open.labels[name] = len(self.open.instructions)
        elif not local:
            if name in self.kernels:
                raise AssemblySyntaxError(f"kernel {name} begins a second time")
            self.open = self.kernels[name] = Kernel(name)

    def _directive(self, body: str, rest: Iterator[tuple[int, str]]) -> None:
        word, _, tail = body.partition(" ") if "\t" not in body else body.partition("\t")
        if word == ".amdhsa_kernel":
            self.directives[tail.strip()] = _read_directives(rest)
        elif word == ".amdgpu_metadata":
            for _, line in rest:
                if line.strip() == ".end_amdgpu_metadata":
                    break
                self.notes.append(line)
        elif word in (".size", ".section", ".text"):
            self.open = None
        elif self.open is not None and not self._QUIET.match(word):
            raise AssemblySyntaxError(f"directive {word} inside kernel {self.open.name}")


def _read_directives(rest: Iterator[tuple[int, str]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, line in rest:
        words = line.split()
        if words == [".end_amdhsa_kernel"]:
            return found
        if len(words) == 2 and words[0].startswith(".amdhsa_"):
            try:
                found[words[0].removeprefix(".amdhsa_")] = int(words[1], 0)
            except ValueError:
                raise AssemblySyntaxError(f"{words[0]} {words[1]}: not a number").locate(
                    line=number, text=line.strip()
                ) from None
    raise AssemblySyntaxError(".amdhsa_kernel without .end_amdhsa_kernel")


def parse_instruction(text: str, line: int, address: int | None = None) -> Instruction:
    """One instruction without comments. Raises UnsupportedInstructionError on an operand or modifier not
    known."""
    mnemonic, _, rest = text.replace("\t", " ").partition(" ")
    encoding = ""
    for suffix in _ENCODINGS:
        if mnemonic.endswith("_" + suffix):
            mnemonic, encoding = mnemonic.removesuffix("_" + suffix), suffix
    if mnemonic == "s_waitcnt":
        return Instruction(mnemonic, encoding, (), _wait_counts(rest), line, text, address)
    operands: list[Operand] = []
    modifiers: dict[str, Modifier] = {}
    pieces = list(_split(rest, ","))
    for at, piece in enumerate(pieces):
        words = list(_split(piece, " "))
        if not words:
            raise AssemblySyntaxError("an operand is missing between commas")
        if words[0].partition(":")[0] not in _FLAGS | _VALUED:
            operands.append(parse_operand(words.pop(0)))
        elif len(pieces) > 1:
            raise AssemblySyntaxError(f"{words[0]!r} stands where an operand belongs")
        if words and at != len(pieces) - 1:
            raise AssemblySyntaxError(f"{words[0]!r} before a comma")
        for word in words:
            name, value = _modifier(word)
            if name in modifiers:
                raise AssemblySyntaxError(f"modifier {name} twice")
            modifiers[name] = value
    return Instruction(mnemonic, encoding, tuple(operands), modifiers, line, text, address)


def _modifier(word: str) -> tuple[str, Modifier]:
    name, colon, value = word.partition(":")
    if not colon and name in _FLAGS:
        return name, 1
    if colon and name in _VALUED:
        if value.startswith("["):
            return name, tuple(int(part, 0) for part in value.strip("[]").split(","))
        return name, int(value, 0) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", value) else value
    raise UnsupportedInstructionError(f"modifier {word!r} is not known")


def _wait_counts(rest: str) -> dict[str, Modifier]:
    if re.fullmatch(r"\s*(0x[0-9a-fA-F]+|\d+)\s*", rest):
        immediate = int(rest, 0)
        return {
            "vmcnt": immediate & 15 | (immediate >> 14 & 3) << 4,
            "expcnt": immediate >> 4 & 7,
            "lgkmcnt": immediate >> 8 & 15,
        }
    counts: dict[str, Modifier] = {}
    for word in re.split(r"[\s&]+", rest.strip()):
        match = re.fullmatch(r"(\w+)\((\d+)\)", word)
        if match is None or match[1] not in _COUNTERS:
            raise UnsupportedInstructionError(f"wait {word!r} is not known")
        counts[match[1]] = int(match[2])
    return counts


def _split(text: str, at: str) -> Iterator[str]:
    """Pieces of ``text`` between ``at``, which counts only outside brackets and parentheses."""
    depth, piece = 0, ""
    for char in text:
        depth += (char in "[(") - (char in "])")
        if char == at and depth == 0:
            if at == "," or piece:
                yield piece.strip()
            piece = ""
        else:
            piece += char
    if piece.strip():
        yield piece.strip()
