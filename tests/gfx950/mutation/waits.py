"""Proof that a kernel waits for every memory operation before it touches what the operation reads or writes.

The interpreter finds a missing wait on the paths that it runs; this looks at every path. An operation is in
flight until an ``s_waitcnt`` covers it: with ``cnt(n)``, when n younger ones of its counter are in flight on
every path (scalar loads return in any order, so only ``lgkmcnt(0)`` covers one). Until then nothing may touch
its registers, and no barrier may be passed with an LDS operation in flight. A kernel that this accepts needs
no other wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel.gfx950 import Instruction, Kernel
from kernel.gfx950.hazards import Register, register_use
from tests.gfx950.mutation.paths import successors

_SCALAR_LOAD, _LDS, _VECTOR = "scalar load", "LDS", "vector memory"
_BARRIER = "the barrier"

InFlight = dict[tuple[str, Register | str], int]
"""By (counter, what may not be touched): the fewest younger operations of that counter, over all paths."""


@dataclass(frozen=True)
class MissingWait:
    """``user`` touches what an operation in flight on some path reads or writes."""

    user: Instruction
    resource: Register | str


def missing_waits(kernel: Kernel) -> list[MissingWait]:
    """Every instruction that some path reaches too early, in the order of the kernel."""
    entry: list[InFlight | None] = [None] * len(kernel.instructions)
    entry[0] = {}
    due = [0]
    found: dict[int, MissingWait] = {}
    while due:
        at = due.pop()
        before = entry[at]
        instruction = kernel.instructions[at]
        if before is None:
            continue
        resource = _touched(instruction, before)
        if resource is not None:
            found[at] = MissingWait(instruction, resource)
        after = _after(instruction, before)
        for following in successors(kernel, at):
            joined = _join(entry[following], after)
            if joined != entry[following]:
                entry[following] = joined
                due.append(following)
    return [found[at] for at in sorted(found)]


def _counter(instruction: Instruction) -> str | None:
    name = instruction.mnemonic
    if name.startswith("s_load"):
        return _SCALAR_LOAD
    if name.startswith("ds_"):
        return _LDS
    return _VECTOR if name.startswith(("global_", "buffer_", "scratch_")) else None


def _touched(instruction: Instruction, in_flight: InFlight) -> Register | str | None:
    use = register_use(instruction)
    touched: set[Register | str] = {*use.reads, *use.writes}
    if instruction.mnemonic == "s_barrier":
        touched.add(_BARRIER)
    # Vector memory loads write in order, so one may load what an earlier one is still to write.
    in_order: frozenset[Register] = frozenset()
    if _counter(instruction) == _VECTOR:
        in_order = use.writes - use.reads
    return next(
        (
            resource
            for counter, resource in in_flight
            if resource in touched and not (counter == _VECTOR and resource in in_order)
        ),
        None,
    )


def _after(instruction: Instruction, before: InFlight) -> InFlight:
    if instruction.mnemonic == "s_waitcnt":
        return {key: younger for key, younger in before.items() if not _covered(instruction, key[0], younger)}
    counter = _counter(instruction)
    if counter is None:
        return before
    after = {key: younger + (key[0] == counter) for key, younger in before.items()}
    # what a store or a write still has to read was taken at the issue
    resources: set[Register | str] = set(register_use(instruction).writes)
    if counter == _LDS:
        resources.add(_BARRIER)
    return after | {(counter, resource): 0 for resource in resources}


def _covered(wait: Instruction, counter: str, younger: int) -> bool:
    if counter == _VECTOR:
        return younger >= int(str(wait.modifiers.get("vmcnt", 63)))
    left = int(str(wait.modifiers.get("lgkmcnt", 15)))
    return left == 0 if counter == _SCALAR_LOAD else left < 15 and younger >= left


def _join(one: InFlight | None, two: InFlight) -> InFlight:
    if one is None:
        return two
    return {
        key: min(one.get(key, two.get(key, 0)), two.get(key, one.get(key, 0))) for key in one.keys() | two
    }
