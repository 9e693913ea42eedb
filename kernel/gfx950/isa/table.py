"""What a row of the instruction table says, and the rules by which gfx950 can encode an instruction.

A mnemonic has one row, beside its semantics, and everything else that is known of it stands there. Rows that
agree in most fields are made by a family: ``functools.partial(Row, ...)``. A row that lacks a field is
refused when its module is imported.

Hand-written assembly can ask for more than the bits of an instruction hold; what no assembler takes must not
run here either. The rules are those of LLVM 22's assembler for gfx950.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from kernel.gfx950.errors import UnencodableError
from kernel.gfx950.isa.form import Builder
from kernel.gfx950.program import EXEC, M0, VCC, Instruction, Operand

Kind = Literal[
    "mfma", "valu", "lds_read", "lds_write", "vmem_load", "vmem_store", "smem", "wait", "barrier", "nop",
    "branch", "salu",
]  # fmt: skip
"""The class by which instructions are counted; DMA to LDS is a ``vmem_load``."""

Hazard = Literal["none", "matrix of 8 passes", "transcendental", "lane swap", "lane read", "lane write"]
"""What sets an instruction apart from its kind where wait states are counted."""

Rule = Callable[[Instruction, "Row"], str | None]
"""What of an instruction has no bits; None if everything has."""

_MISSING: Any = object()


@dataclass(frozen=True)
class Row:
    """Everything known of one mnemonic. Every field is required: the default is refused."""

    mnemonic: str
    """Without encoding suffix."""
    _: KW_ONLY
    build: Builder = _MISSING
    """Semantics: takes the operands and modifiers it implements, returns what a wave executes."""
    kind: Kind = _MISSING
    destinations: int = _MISSING
    """How many of the first operands are written. A load with the modifier ``lds`` writes none."""
    keeps: bool = _MISSING
    """Whether the destinations are read too."""
    writes_exec: bool = _MISSING
    """Whether exec is written without being an operand."""
    sets_scc: bool = _MISSING
    falls_through: bool = _MISSING
    """Whether the next instruction may follow."""
    suffixes: tuple[str, ...] = _MISSING
    """Encodings that text may ask for: of "e32", "e64", "dpp" and "sdwa"."""
    rule: Rule = _MISSING
    wide: tuple[int, ...] = _MISSING
    """Which sources have 64 bits; the first is 0."""
    lane_bytes: int = _MISSING
    """Bytes that a lane moves to or from LDS or vector memory; else 0."""
    hazard: Hazard = _MISSING

    def __post_init__(self) -> None:
        lacking = [field.name for field in fields(self) if getattr(self, field.name) is _MISSING]
        if lacking:
            raise TypeError(f"{self.mnemonic}: its row lacks {', '.join(lacking)}")
        for name, allowed in (("kind", get_args(Kind)), ("hazard", get_args(Hazard))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{self.mnemonic}: {name} = {getattr(self, name)!r}: one of {allowed}")


def assemble(*parts: Iterable[Row]) -> Mapping[str, Row]:
    """The rows by mnemonic. Raises ValueError if one has two rows."""
    found: dict[str, Row] = {}
    for row in (row for part in parts for row in part):
        if found.setdefault(row.mnemonic, row) is not row:
            raise ValueError(f"{row.mnemonic} has two rows")
    return MappingProxyType(found)


# ---- Encodability ----


def check_encodable(instruction: Instruction, row: Row) -> None:
    """Raises UnencodableError with what of the instruction has no bits."""
    for operand in instruction.operands:
        _check_alignment(operand)
    encoding = instruction.encoding
    if encoding and encoding not in row.suffixes:
        problem: str | None = f"the suffix _{encoding}"
    else:
        problem = row.rule(instruction, row)
    if problem is not None:
        spelled = instruction.mnemonic + (f"_{encoding}" if encoding else "")
        raise UnencodableError(f"{spelled} has no encoding with {problem}")


def unrestricted(_instruction: Instruction, _row: Row) -> str | None:
    return None


def scalar(instruction: Instruction, row: Row) -> str | None:
    """One literal constant, which several sources may share."""
    sources = instruction.operands[row.destinations :]
    literals = {
        operand.bits32() for at, operand in enumerate(sources) if _is_literal(operand, at in row.wide)
    }
    return "a second literal constant" if len(literals) > 1 else None


def scalar_compare_constant(instruction: Instruction, _row: Row, *, unsigned: bool) -> str | None:
    first, constant = instruction.operands
    if not first.is_register:
        return f"{first.text} as the first source: it is a scalar register"
    return f"{constant.text}: the constant is unsigned" if unsigned and constant.number < 0 else None


def scalar_load(instruction: Instruction, _row: Row, *, low: int) -> str | None:
    """A constant offset is ``low`` to 2^20 - 1."""
    offset, high = instruction.operands[2], 1 << 20
    fits = not offset.is_constant or (offset.kind == "integer" and low <= offset.number < high)
    return _special_destination(instruction) or (
        None if fits else f"the offset {offset.text}: from {low} to {high - 1}"
    )


def vector(instruction: Instruction, row: Row, *, reads_mask: bool = False) -> str | None:
    """``reads_mask``: the third source is a lane mask, vcc in the e32 encoding."""
    encoding, sources = instruction.encoding, instruction.operands[row.destinations :]
    if encoding == "dpp":
        other = [operand for operand in sources if operand.kind != "vector"]
        return f"{other[0].text} as a source" if other else _bus_problem(sources)
    if encoding == "sdwa":
        return _bus_problem(sources)
    if "e32" in row.suffixes and encoding != "e64":
        problem = _e32_problem(instruction, row, reads_mask)
        if encoding or problem is None:
            return problem
    # Without a suffix an assembler takes the long encoding where the short one does not do.
    return _e64_problem(sources, row)


def lane_read(instruction: Instruction, _row: Row) -> str | None:
    source = instruction.operands[1]
    if source.is_accumulator:
        return f"{source.text} as a source: it is no accumulator"
    return _special_destination(instruction) or _literal_among(instruction.operands[2:])


def lane_write(instruction: Instruction, _row: Row) -> str | None:
    _, source, lane = instruction.operands
    scalars = [source] if lane.index == M0 else [source, lane]
    return _literal_among((source, lane)) or _bus_problem(scalars)


def lds(instruction: Instruction, row: Row) -> str | None:
    scalars = [operand.text for operand in instruction.operands if operand.kind != "vector"]
    if scalars:
        return f"{scalars[0]}: its operands are vector registers"
    address = instruction.operands[row.destinations]
    data = [operand for operand in instruction.operands if operand is not address]
    if len({operand.is_accumulator for operand in data}) > 1:
        return "data in vector registers and in accumulators"
    return _address_problem(address)


def buffer(instruction: Instruction, _row: Row) -> str | None:
    *_, address, _resource, offset = instruction.operands
    return _address_problem(address) or _literal_among([offset])


def flat(instruction: Instruction, _row: Row) -> str | None:
    """Global memory: the base is no exec."""
    return "exec as its base" if instruction.operands[-1].index == EXEC else None


def scratch(instruction: Instruction, _row: Row) -> str | None:
    base = instruction.operands[-1]
    return f"{base.text} as its base" if base.is_constant else None


def _check_alignment(operand: Operand) -> None:
    if not operand.is_register or operand.count == 1:
        return
    unit = 2 if operand.kind == "vector" or operand.count == 2 else 4
    if operand.index % unit:
        raise UnencodableError(
            f"operand {operand.text}: {operand.count} {operand.kind} registers start at a multiple of {unit}"
        )


def _e32_problem(instruction: Instruction, row: Row, reads_mask: bool) -> str | None:
    results, sources = instruction.operands[: row.destinations], instruction.operands[row.destinations :]
    masks = [operand for operand in results if operand.kind == "scalar"]
    if reads_mask:
        masks += sources[2:]
        sources = sources[:2]
    if any(operand.index != VCC for operand in masks):
        return f"{masks[0].text} as a lane mask: it is vcc"
    if instruction.modifiers or any(operand.modified for operand in sources):
        return "a modifier"
    if len(sources) == 2 and (sources[1].kind != "vector" or sources[1].is_accumulator):
        return f"{sources[1].text} as the second source: it is a vector register"
    implied = [Operand("scalar", "vcc", VCC, 2)] if reads_mask else []
    return _bus_problem([*sources, *implied])


def _e64_problem(sources: Sequence[Operand], row: Row) -> str | None:
    literals = [operand for at, operand in enumerate(sources) if _is_literal(operand, at in row.wide)]
    return f"the literal constant {literals[0].text}" if literals else _bus_problem(sources)


def _bus_problem(sources: Sequence[Operand]) -> str | None:
    """A vector instruction reads one scalar register or literal, as often as it likes."""
    scalars = {(source.index, source.count): source.text for source in sources if source.kind == "scalar"}
    read = [*scalars.values(), *(source.text for source in sources if _is_literal(source))]
    return (
        f"{' and '.join(read)} as sources: one scalar register or literal is read" if len(read) > 1 else None
    )


def _address_problem(address: Operand) -> str | None:
    vector = address.kind == "vector" and not address.is_accumulator
    return None if vector or address.kind == "off" else f"{address.text} as its address"


def _special_destination(instruction: Instruction) -> str | None:
    result = instruction.operands[0]
    return f"{result.text} as its result" if result.index in (M0, EXEC, EXEC + 1) else None


def _literal_among(operands: Sequence[Operand]) -> str | None:
    return next(
        (f"the literal constant {operand.text}" for operand in operands if _is_literal(operand)), None
    )


def _is_literal(operand: Operand, wide: bool = False) -> bool:
    """Whether a constant takes a dword of its own; ``wide``: as a source of 64 bits."""
    return operand.is_constant and not (operand.is_inline if wide else operand.is_inline32)
