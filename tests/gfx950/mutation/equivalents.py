"""Mutants that compute the same, and why.

Most are shown by a program: an analysis of every path says so, or launches in which the mutant's effect is
followed. For compares whose reason lies in what a work item may hold there is a list, reviewed one by one:
each entry names the change between its neighbours and what the compare does in the launches, and is asked
only about a mutant that survived them all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kernel.gfx950 import HazardError, Instruction, Kernel, UndefinedReadError, check_hazards
from kernel.gfx950.register_use import register_use
from tests.gfx950.mutation.copies import writes_what_is_there
from tests.gfx950.mutation.dead import can_be_poisoned, poisoned, sets_scc
from tests.gfx950.mutation.hidden import changes_hidden_products_only
from tests.gfx950.mutation.launches import Launch
from tests.gfx950.mutation.mutants import NOP_SHORTENED, Mutant, mutated
from tests.gfx950.mutation.waits import missing_waits


@dataclass(frozen=True)
class Equivalent:
    """``change`` is a pattern for the whole of ``description``, ``reason`` says why no launch can tell.

    ``differs`` says whether the changed compare ever decides otherwise: both ways are then taken, and lead to
    the same bytes and the same work; else the two values that it compares are never equal.
    """

    reason: str
    change: str
    differs: bool


REVIEWED = (
    Equivalent(
        "no plain group where plain_first = plain_end: its loop then makes no trip, and the careful groups "
        "before and behind it are those of one run",
        r".*; v_and_b32_e32 v, -4, v; v_mov_b32_e32 v, s; "
        r"compare flipped: v_cmp_lt_i32_e32 vcc, s, v -> v_cmp_le_i32_e32 vcc, s, v; .*",
        differs=True,
    ),
    Equivalent(
        "block >= min(block + 4, end) is false for every group: a group begins below the item's end",
        r"s_add_i32 s, s, 4; s_min_i32 s, s, s; v_mov_b32_e32 v, v; "
        r"compare flipped: s_cmp_ge_i32 s, s -> s_cmp_gt_i32 s, s; v_mov_b32_e32 v, 0xff800000; .*",
        differs=False,
    ),
    Equivalent(
        "block < fill_end for the first of four blocks: a group begins below its loop's end, and that is "
        "fill_end or, for scored blocks, the item's end, which is not behind it",
        r"s_mov_b64 s, 0; s_and_b64 vcc, exec, s; s_cbranch_vccz \S+; "
        r"compare flipped: s_cmp_lt_i32 s, s -> s_cmp_le_i32 s, s; s_cselect_b64 s, -1, 0; "
        r"s_and_b64 s, s, s; s_and_saveexec_b64 s, s",
        differs=False,
    ),
)


def proof(kernel: Kernel, mutant: Mutant) -> str:
    """Why a mutant changes nothing on any path, whatever the launch; "" if that is not so."""
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
    if mutant.operator == "deleted" and writes_what_is_there(kernel, mutant.index):
        return "its result is there already on every path"
    return ""


def has_no_use(kernel: Kernel, mutant: Mutant, launches: Sequence[Launch]) -> bool:
    """Whether nothing in the launches depends on what the changed instruction writes."""
    old, new = kernel.instructions[mutant.index], mutated(kernel, mutant).instructions[mutant.index]
    same_place = register_use(new).writes <= register_use(old).writes and sets_scc(new) <= sets_scc(old)
    if old.mnemonic.startswith("ds_write"):
        same_place = mutant.operator == "deleted"
    if not same_place or not can_be_poisoned(old):
        return False
    changed = poisoned(kernel, mutant.index)
    try:
        for launch in launches:
            launch.run(changed)
    except UndefinedReadError:
        return False
    return True


def is_hidden(kernel: Kernel, mutant: Mutant, launches: Sequence[Launch]) -> bool:
    """Whether the changed instruction computes, and all that comes of it loses every max."""
    name = kernel.instructions[mutant.index].mnemonic
    computes = name.startswith("v_") and not name.startswith("v_cmp")
    return computes and changes_hidden_products_only(kernel, mutant, launches)


def reviewed(kernel: Kernel, mutant: Mutant, *, differs: bool) -> str:
    """The reason of the entry for a compare that was or was not seen to decide otherwise, "" without one."""
    text = description(kernel, mutant)
    fitting = (one for one in REVIEWED if one.differs == differs and re.fullmatch(one.change, text))
    return next((one.reason for one in fitting), "")


def description(kernel: Kernel, mutant: Mutant) -> str:
    """The change between its neighbours, without the numbers of registers.

    "before; operator: old -> new; after", with three instructions on either side.
    """
    at = mutant.index
    before = _shapes(kernel.instructions[max(at - 3, 0) : at])
    after = _shapes(kernel.instructions[at + 1 : at + 4])
    old = _shape(kernel.instructions[at].text)
    return f"{before}; {mutant.operator}: {old} -> {_shape(mutant.text)}; {after}"


def _shapes(instructions: Sequence[Instruction]) -> str:
    return "; ".join(_shape(instruction.text) for instruction in instructions)


def _shape(text: str) -> str:
    return re.sub(r"\b([sva])(\d+|\[\d+:\d+\])", r"\1", re.sub(r"\s+", " ", text.strip()))
