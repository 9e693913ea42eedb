"""Assembly text to instructions: what LLVM prints for gfx950, and what llvm-objdump prints of the binary.

Branch targets may be labels (``.LBB0_2``, ``L15``) or, in disassembly, a distance in dwords after the next
instruction, which needs the address comments that llvm-objdump writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from kernel.gfx950.errors import AssemblySyntaxError, InterpreterError, UnsupportedInstructionError
from kernel.gfx950.metadata import KernelMetadata, from_directives, read_notes
from kernel.gfx950.operands import Operand, parse_operand

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
