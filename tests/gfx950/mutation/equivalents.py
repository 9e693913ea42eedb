"""Mutants that compute the same, and why: proved by a static analysis, or reviewed one by one.

A reviewed entry names the change without registers and line numbers, so that it outlives a recompilation. It
is asked only about a mutant that survived every launch: it cannot hide one that some launch catches.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kernel.gfx950 import HazardError, Instruction, Kernel, check_hazards
from tests.gfx950.mutation.mutants import NOP_SHORTENED, Mutant, mutated
from tests.gfx950.mutation.waits import missing_waits


@dataclass(frozen=True)
class Equivalent:
    """``change`` is a pattern in ``description``, ``reason`` says why no launch can tell."""

    reason: str
    change: str
    heads: tuple[int, ...] = (1, 2, 4)
    mfmas: int | None = None
    """MFMAs of the stretch of code, between two labels, that the mutant stands in."""


_DIAGONAL = 43
"""MFMAs of a diagonal block at a block's edge: of M-tile m the N-tiles from m - 1 on."""

REVIEWED = (
    Equivalent(
        "no plain group where plain_first = plain_end: its loop then makes no trip, and the careful groups "
        "before and behind it are those of one run",
        r"v_and_b32_e32 v, -4, v; v_mov_b32_e32 v, s; compare flipped: v_cmp_lt_i32_e32 vcc, s, v -> ",
    ),
    Equivalent(
        "block >= min(block + 4, end) is false for every group: a group begins below the item's end",
        r"s_add_i32 s, s, 4; s_min_i32 s, s, s; v_mov_b32_e32 v, v; compare flipped: s_cmp_ge_i32 s, s -> ",
    ),
    Equivalent(
        "before the barrier behind an unaligned diagonal no LDS write is in flight: the wave has read at "
        "least one M-tile since, and waited for it",
        r"v_permlane32_swap_b32_e32 v, v; s_load_dword s, s, 0x0; (deleted|lgkmcnt weakened): "
        r"s_waitcnt lgkmcnt\(0\) -> .*; s_barrier",
    ),
    Equivalent(
        "with 4 heads an item has 128 queries at most, so a diagonal at a block's edge is its last block: "
        "nothing reads the keys, their first M-tile and the page id prepared for a block behind it",
        r": (v_and_b32_e32 v, 0x7070707|v_perm_b32|v_bitop3_b32 v, v, v, s bitop3:0x78"
        r"|v_lsh[lr]\w+ v, [34], v|v_and_b32_e32 v, 0x7f8, v|v_mov_b32_e32 v, v|ds_read_b64|ds_write_b128"
        r"|ds_read_b128 v, v offset:16384|v_lshlrev_b32_sdwa|v_subrev_u32"
        r"|v_add_u32_e32 v, s, v|s_(add|addc|min|lshl|load)_?\w* s).* -> ",
        heads=(4,),
        mfmas=_DIAGONAL,
    ),
    Equivalent(
        "where the diagonal stands at a block's edge no row of an N-tile sees a token of the M-tile behind "
        "its own: neither the product nor how negative its start value is matters",
        r": (v_mfma_\S+ v, v, v, v|v_med3_i32 v, v, s, 0|v_add_u32_e32 v, 0xf\w+, v) -> ",
        mfmas=_DIAGONAL,
    ),
    Equivalent(
        "behind a diagonal at a block's edge the wave sees no block: the M-tile it reads ahead is not used",
        r": ds_read_b128 v, v offset:16384 -> ",
        mfmas=_DIAGONAL,
    ),
    Equivalent(
        "the start value of a hidden token is so negative that one more or less stays below every score, and "
        "above 0 it is cut off",
        r"constant shifted: v_add_u32_e32 v, 0xf(f7|[0-9a-e])\w+, v -> ",
    ),
    Equivalent(
        "the first of four blocks is scored in every group: its cell never shows what it held before",
        r"v_mov_b32_e32 v, v; s_cmp_ge_i32 s, s; .*: v_mov_b32_e32 v, 0xff800000 -> .*; s_cbranch_scc1",
    ),
    Equivalent(
        "the page id was made uniform two instructions before, and is again",
        r"v_readfirstlane_b32 s, v; s_cbranch_scc1 \S+; s_and_b64 vcc, exec, s; "
        r"deleted: v_readfirstlane_b32 s, v",
    ),
    Equivalent(
        "a diagonal lies at most four blocks before its item's end, and the page id fetched under it is that "
        "of the sixth: its page is loaded, nothing scores it",
        r"v_permlane32_swap_b32_e32 v, v; v_permlane32_swap_b32_e32 v, v; .*: s_load_dword s, s, 0x0 -> ",
    ),
    Equivalent(
        "scc tells already what the flag does, which the branch before chose",
        r"deleted: s_and_b64 s, s, exec -> s_nop 0; s_cselect_b32",
    ),
    Equivalent(
        "a flag is 0 or not: any other number but 0 does as well",
        r"constant shifted: (s_mov_b64 s, (0|-1)|s_cselect_b64 s, -1, 0|s_xor_b64 s, s, -1) -> ",
    ),
)


def proof(kernel: Kernel, mutant: Mutant) -> str:
    """Why a mutant of a wait or an ``s_nop`` changes nothing on any path; "" if that is not so."""
    if mutant.operator == NOP_SHORTENED:
        try:
            check_hazards(mutated(kernel, mutant))
        except HazardError:
            return ""
        return "enough wait states on every path"
    if kernel.instructions[mutant.index].mnemonic == "s_waitcnt" and not missing_waits(
        mutated(kernel, mutant)
    ):
        return "another wait covers it on every path"
    return ""


def reviewed(kernel: Kernel, mutant: Mutant, heads: int) -> str:
    """The reason of the entry that a mutant fits, "" without one."""
    text, mfmas = description(kernel, mutant), _mfmas_around(kernel, mutant.index)
    for one in REVIEWED:
        if heads in one.heads and one.mfmas in (None, mfmas) and re.search(one.change, text):
            return one.reason
    return ""


def description(kernel: Kernel, mutant: Mutant) -> str:
    """The change between its neighbours, without the numbers of registers.

    "before; operator: old -> new; after", with three instructions on either side.
    """
    at = mutant.index
    before = _shapes(kernel.instructions[max(at - 3, 0) : at])
    after = _shapes(kernel.instructions[at + 1 : at + 4])
    old = _shape(kernel.instructions[at].text)
    return f"{before}; {mutant.operator}: {old} -> {_shape(mutant.text)}; {after}"


def _mfmas_around(kernel: Kernel, at: int) -> int:
    edges = sorted({0, *kernel.labels.values(), len(kernel.instructions)})
    first, end = next((a, b) for a, b in itertools.pairwise(edges) if a <= at < b)
    return sum(one.mnemonic.startswith("v_mfma") for one in kernel.instructions[first:end])


def _shapes(instructions: Sequence[Instruction]) -> str:
    return "; ".join(_shape(instruction.text) for instruction in instructions)


def _shape(text: str) -> str:
    return re.sub(r"\b([sva])(\d+|\[\d+:\d+\])", r"\1", re.sub(r"\s+", " ", text.strip()))
