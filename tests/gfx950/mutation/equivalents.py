"""Mutants that compute the same, and why.

Most are shown by a program: an analysis of every path says so, or launches in which the mutant's effect is
followed. Where the reason lies in what a row or a work item may hold there are lists, reviewed one by one
(``*_equivalents.py``): an entry names the change between its neighbours, and what a compare does in the
launches, and is asked only about a mutant that survived them all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kernel.gfx950 import HazardError, Instruction, Kernel, UndefinedReadError, check_hazards
from kernel.gfx950.hazards import register_use
from tests.gfx950.mutation.copies import writes_what_is_there
from tests.gfx950.mutation.dead import can_be_poisoned, poisoned, sets_scc
from tests.gfx950.mutation.hidden import changes_hidden_products_only
from tests.gfx950.mutation.launch import Launch
from tests.gfx950.mutation.mutants import NOP_SHORTENED, Mutant, mutated
from tests.gfx950.mutation.waits import missing_waits


@dataclass(frozen=True)
class Equivalent:
    """``change`` is a pattern within ``description``, ``reason`` says why no launch can tell.

    ``differs`` says of a compare whether the changed one ever decides otherwise: both ways are then taken,
    and lead to the same bytes and the same work; else the two values that it compares are never equal.
    ``None``: not asked, as of what is no compare.
    """

    reason: str
    change: str
    differs: bool | None = None


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
    multiplies = any(one.mnemonic.startswith("v_mfma") for one in kernel.instructions)
    return computes and multiplies and changes_hidden_products_only(kernel, mutant, launches)


def reviewed(entries: Sequence[Equivalent], kernel: Kernel, mutant: Mutant, differs: bool | None) -> str:
    """The reason of the first entry that a mutant fits, "" without one. ``differs``: whether a changed
    compare was seen to decide otherwise."""
    text = description(kernel, mutant)
    fitting = (one for one in entries if one.differs in (None, differs) and re.search(one.change, text))
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
