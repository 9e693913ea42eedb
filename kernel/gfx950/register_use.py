"""Which registers an instruction reads and writes, from its text alone; for analyses that execute nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kernel.gfx950.operands import EXEC, M0, Operand
from kernel.gfx950.parse import Instruction

Register = tuple[str, int]
"""("v", 0-511, accumulators from 256 on) or ("s", 0-127)."""


@dataclass(frozen=True)
class RegisterUse:
    reads: frozenset[Register]
    writes: frozenset[Register]


def registers_of(operand: Operand) -> frozenset[Register]:
    if not operand.is_register:
        return frozenset()
    file = "v" if operand.kind == "vector" else "s"
    return frozenset((file, operand.index + at) for at in range(operand.count))


def destinations(instruction: Instruction) -> int:
    """How many of the first operands are written."""
    name = instruction.mnemonic
    if name.startswith(("v_permlane", "v_swap")):
        return 2
    if "_co_u32" in name or name.startswith(("v_mad_u64", "v_mad_i64")):
        return 2
    if name.startswith(
        ("s_cmp", "s_bitcmp", "s_branch", "s_cbranch", "s_nop", "s_waitcnt", "s_barrier", "s_endpgm")
    ):
        return 0
    if name.startswith(("s_sleep", "s_setprio", "ds_write")) or "_store_" in name:
        return 0
    if "_load_lds_" in name or "lds" in instruction.modifiers:
        return 0
    return 1


def register_use(instruction: Instruction) -> RegisterUse:
    """exec, which every vector instruction reads, is left out of ``reads``; scc is no register here."""
    operands, count = instruction.operands, destinations(instruction)
    writes = frozenset[Register]().union(*(registers_of(o) for o in operands[:count]))
    reads = frozenset[Register]().union(*(registers_of(o) for o in operands[count:]))
    name = instruction.mnemonic
    keeps = name.startswith(("v_permlane", "v_swap", "v_fmac", "v_writelane", "s_addk", "s_mulk", "s_bitset"))
    if keeps or instruction.encoding == "dpp" or _keeps_a_part(instruction):
        reads |= writes
    if name.endswith("_saveexec_b64") or name.startswith("v_cmpx"):
        writes |= {("s", EXEC), ("s", EXEC + 1)}
    if "_load_lds_" in name or "lds" in instruction.modifiers:
        reads |= {("s", M0)}
    return RegisterUse(reads, writes)


def _keeps_a_part(instruction: Instruction) -> bool:
    """Whether sdwa writes a part of its result's register and keeps the rest, as it does unless told."""
    if instruction.encoding != "sdwa" or instruction.modifiers.get("dst_sel", "DWORD") == "DWORD":
        return False
    return instruction.modifiers.get("dst_unused", "UNUSED_PRESERVE") == "UNUSED_PRESERVE"
