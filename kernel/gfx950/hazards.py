"""Wait states between dependent instructions, over every path of a kernel.

One instruction is one wait state, ``s_nop n`` is n + 1. Which pairs need how many: ``hazard_kinds``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernel.gfx950.errors import HazardError
from kernel.gfx950.hazard_kinds import KINDS, HazardKind
from kernel.gfx950.parse import Kernel
from kernel.gfx950.register_use import Register, register_use


@dataclass(frozen=True)
class HazardDistance:
    """The fewest wait states seen between a producer and a consumer of this kind, and what the kind needs.

    Lines are those of the assembly; ``seen`` is None where the kernel has no such pair within reach.
    """

    kind: str
    needed: int
    seen: int | None
    producer_line: int | None = None
    consumer_line: int | None = None

    @property
    def ok(self) -> bool:
        return self.seen is None or self.seen >= self.needed

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": self.kind, "needed": self.needed, "seen": self.seen, "ok": self.ok}


def hazard_distances(kernel: Kernel) -> list[HazardDistance]:
    """The fewest wait states of each kind over all paths of the kernel."""
    flow = _Flow(kernel)
    return [flow.fewest(kind) for kind in KINDS]


def check_hazards(kernel: Kernel) -> None:
    """Raises HazardError at the consumer if any pair on any path is closer than gfx950 needs."""
    for distance in hazard_distances(kernel):
        if not distance.ok:
            texts = {instruction.line: instruction.text for instruction in kernel.instructions}
            raise HazardError(
                f"{distance.kind}: {distance.seen} wait states after line {distance.producer_line} "
                f"(`{texts[distance.producer_line or 0]}`), {distance.needed} are needed"
            ).locate(line=distance.consumer_line, text=texts[distance.consumer_line or 0], kernel=kernel.name)


class _Flow:
    def __init__(self, kernel: Kernel) -> None:
        self.instructions = kernel.instructions
        self.uses = [register_use(instruction) for instruction in kernel.instructions]
        self.next = [self._successors(kernel, at) for at in range(len(kernel.instructions))]

    def _successors(self, kernel: Kernel, at: int) -> tuple[int, ...]:
        name = self.instructions[at].mnemonic
        follows = (at + 1,) if at + 1 < len(self.instructions) else ()
        if name == "s_endpgm":
            return ()
        if name == "s_branch":
            return (kernel.target(self.instructions[at]),)
        return (*follows, kernel.target(self.instructions[at])) if name.startswith("s_cbranch") else follows

    def fewest(self, kind: HazardKind) -> HazardDistance:
        best = HazardDistance(kind.name, kind.needed, None)
        for at, instruction in enumerate(self.instructions):
            at_stake = kind.produces(instruction, self.uses[at])
            if not at_stake:
                continue
            # twice the need is far enough to say how much is left
            limit = 2 * kind.needed if best.seen is None else best.seen
            found = self._nearest(kind, at, at_stake, limit)
            if found is not None and (best.seen is None or found[0] < best.seen):
                consumer = self.instructions[found[1]].line
                best = HazardDistance(kind.name, kind.needed, found[0], instruction.line, consumer)
        return best

    def _nearest(
        self, kind: HazardKind, start: int, at_stake: frozenset[Register], limit: int
    ) -> tuple[int, int] | None:
        """Wait states to the nearest consumer within ``limit``, and which instruction it is."""
        nearest: tuple[int, int] | None = None
        shortest: dict[int, int] = {}
        reached = [(0, following) for following in self.next[start]]
        while reached:
            states, at = reached.pop()
            if states > limit or shortest.get(at, limit + 1) <= states:
                continue
            shortest[at] = states
            instruction = self.instructions[at]
            if kind.consumes(instruction, self.uses[at], at_stake):
                if nearest is None or states < nearest[0]:
                    nearest = (states, at)
                continue
            states += int(instruction.operands[0].number) + 1 if instruction.mnemonic == "s_nop" else 1
            reached += [(states, following) for following in self.next[at]]
        return nearest
