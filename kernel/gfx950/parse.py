"""Assembly text to instructions: what LLVM prints for gfx950, and what llvm-objdump prints of the binary.

Branch targets may be labels (``.LBB0_2``, ``L15``) or, in disassembly, a distance in dwords after the next
instruction, which needs the address comments that llvm-objdump writes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from kernel.gfx950.errors import AssemblySyntaxError, InterpreterError, UnsupportedInstructionError
from kernel.gfx950.isa import lookup
from kernel.gfx950.program import (
    ACCUMULATORS,
    EXEC,
    M0,
    VCC,
    Instruction,
    Kernel,
    KernelArgument,
    KernelMetadata,
    Kind,
    Modifier,
    Operand,
    Program,
)

# ---- Operands ----

_LAST_SGPR = 101
_NAMED_SCALARS = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1),
}
_REGISTER = re.compile(r"(?P<file>[vsa])(?:(?P<one>\d+)|\[(?P<first>\d+):(?P<last>\d+)\])")
_INTEGER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)")
_FLOAT = re.compile(r"-?\d+\.\d*(?:[eE][-+]?\d+)?")
_LABEL = re.compile(r"[.\w$]+")


@lru_cache(maxsize=4096)  # a kernel has some hundreds, again and again
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
        limit = _LAST_SGPR if register["file"] == "s" else 255
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


# ---- Metadata ----

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


# ---- Instructions ----

_FLAGS = {"offen", "idxen", "lds", "sc0", "sc1", "nt", "clamp", "row_mirror", "row_half_mirror"}
_VALUED = {
    "offset", "offset0", "offset1", "bitop3", "cbsz", "blgp", "abid", "mul", "div",
    "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "dst_sel", "dst_unused", "src0_sel", "src1_sel",
    "quad_perm", "row_shl", "row_shr", "row_ror", "row_bcast", "row_newbcast",
    "row_mask", "bank_mask", "bound_ctrl", "wave_shl", "wave_shr", "wave_rol", "wave_ror",
}  # fmt: skip
_MODIFIERS = _FLAGS | _VALUED
_ENCODINGS = ("e32", "e64", "dpp", "sdwa")
_COUNTERS = ("vmcnt", "lgkmcnt", "expcnt")


def parse_program(text: str, metadata: Mapping[str, KernelMetadata] | None = None) -> Program:
    """Every kernel of an assembly text or of a ``llvm-objdump -d`` listing.

    ``metadata`` adds to, and overrides, what the text itself says. Raises AssemblySyntaxError or
    UnsupportedInstructionError with the line, the latter for a mnemonic that the table of instructions lacks.
    Whether operands and modifiers are implemented is checked when a kernel first runs.
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
    """One instruction without comments. Raises UnsupportedInstructionError for an unknown mnemonic, operand
    or modifier."""
    mnemonic, _, rest = text.replace("\t", " ").partition(" ")
    encoding = ""
    for suffix in _ENCODINGS:
        if mnemonic.endswith("_" + suffix):
            mnemonic, encoding = mnemonic.removesuffix("_" + suffix), suffix
    if lookup(mnemonic).kind == "wait":
        return Instruction(mnemonic, encoding, (), _wait_counts(rest), line, text, address)
    operands: list[Operand] = []
    modifiers: dict[str, Modifier] = {}
    pieces = list(_split(rest, ","))
    for at, piece in enumerate(pieces):
        words = list(_split(piece, " "))
        if not words:
            raise AssemblySyntaxError("an operand is missing between commas")
        if words[0].partition(":")[0] not in _MODIFIERS:
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


_SEPARATED_INSIDE = re.compile(r"[\[(][^\])]*[\[(, ]")


def _split(text: str, at: str) -> Iterator[str]:
    """Pieces of ``text`` between ``at``, which counts only outside brackets and parentheses."""
    if not _SEPARATED_INSIDE.search(text):
        *pieces, last = text.split(at)
        yield from (piece.strip() for piece in pieces if piece or at == ",")
        if last.strip():
            yield last.strip()
        return
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
