"""The gfx950 instructions that are known: a row each, in the modules that hold their semantics.

Parser, interpreter, hazards and reports read this table, and refuse a mnemonic that it lacks.
"""

from __future__ import annotations

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.isa import global_memory, lanes, lds, matrix, scalar, vector
from kernel.gfx950.isa.table import Row, assemble
from kernel.gfx950.program import Instruction

INSTRUCTIONS = assemble(scalar.ROWS, vector.ROWS, lanes.ROWS, matrix.ROWS, lds.ROWS, global_memory.ROWS)
"""Rows by mnemonic, without encoding suffix."""


def lookup(mnemonic: str) -> Row:
    """The row of a mnemonic; raises UnsupportedInstructionError if there is none."""
    row = INSTRUCTIONS.get(mnemonic)
    if row is None:
        raise UnsupportedInstructionError(f"mnemonic {mnemonic!r} is not implemented")
    return row


def row_of(instruction: Instruction) -> Row:
    """As ``lookup``; the error names the instruction's line."""
    row = INSTRUCTIONS.get(instruction.mnemonic)
    if row is not None:  # asked hundreds of thousands of times of a kernel
        return row
    try:
        return lookup(instruction.mnemonic)
    except UnsupportedInstructionError as error:
        raise error.locate(line=instruction.line, text=instruction.text) from None


def is_dma(instruction: Instruction) -> bool:
    """Whether a memory load writes LDS instead of registers."""
    row = row_of(instruction)
    return row.kind == "vmem_load" and (row.destinations == 0 or "lds" in instruction.modifiers)
