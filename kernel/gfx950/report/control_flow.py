"""The natural loops of a kernel, from its branches."""

from __future__ import annotations

from dataclasses import dataclass

from kernel.gfx950.parse import Kernel
from kernel.gfx950.run_report import instruction_class


@dataclass(frozen=True)
class Loop:
    """A natural loop: instruction indices. Every trip enters at ``header``."""

    header: int
    body: frozenset[int]


@dataclass(frozen=True)
class _Flow:
    """Basic blocks by the index of their first instruction: ``end`` (exclusive) and successors."""

    end: dict[int, int]
    successors: dict[int, tuple[int, ...]]


def natural_loops(kernel: Kernel) -> list[Loop]:
    """Every loop of the kernel, outer ones before those that they hold; loops of one header are one loop."""
    flow = _basic_blocks(kernel)
    dominators = _dominators(flow.successors)
    bodies: dict[int, set[int]] = {}
    for block, following in flow.successors.items():
        for header in following:
            if header in dominators.get(block, ()):
                bodies.setdefault(header, {header}).update(_reaching(block, header, flow.successors))
    loops = [
        Loop(header, frozenset(i for block in body for i in range(block, flow.end[block])))
        for header, body in bodies.items()
    ]
    return sorted(loops, key=lambda loop: (-len(loop.body), loop.header))


def _basic_blocks(kernel: Kernel) -> _Flow:
    instructions = kernel.instructions
    branches = {
        at: kernel.target(instruction)
        for at, instruction in enumerate(instructions)
        if instruction_class(instruction) == "branch"
    }
    ends = {at for at, instruction in enumerate(instructions) if instruction.mnemonic == "s_endpgm"}
    starts = sorted({0, *branches.values(), *(at + 1 for at in (*branches, *ends))} - {len(instructions)})
    end = dict(zip(starts, [*starts[1:], len(instructions)]))
    successors: dict[int, tuple[int, ...]] = {}
    for start, stop in end.items():
        last = stop - 1
        follows = (stop,) if stop in end and last not in ends else ()
        if last in branches:
            always = instructions[last].mnemonic == "s_branch"
            follows = (branches[last],) if always else (*follows, branches[last])
        successors[start] = follows
    return _Flow(end, successors)


def _dominators(successors: dict[int, tuple[int, ...]]) -> dict[int, set[int]]:
    """Of each block that can be reached from the first, the blocks on every way to it."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(successors[0]))]
    while stack:
        block, rest = stack[-1]
        following = next((b for b in rest if b not in seen), None)
        if following is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(successors[following])))
    order.reverse()
    predecessors: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for following in successors[block]:
            predecessors[following].append(block)
    dominators = {block: set(order) for block in order}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            found = set.intersection(*(dominators[p] for p in predecessors[block])) | {block}
            if found != dominators[block]:
                dominators[block] = found
                changed = True
    return dominators


def _reaching(block: int, header: int, successors: dict[int, tuple[int, ...]]) -> set[int]:
    """Blocks that reach ``block`` without passing ``header``."""
    predecessors: dict[int, list[int]] = {}
    for source, targets in successors.items():
        for target in targets:
            predecessors.setdefault(target, []).append(source)
    found, waiting = {header}, [block]
    while waiting:
        at = waiting.pop()
        if at not in found:
            found.add(at)
            waiting += predecessors.get(at, [])
    return found
