"""Roles of a kernel's loops, from traces of waves whose blocks are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from kernel.gfx950 import Kernel, RunReport
from kernel.gfx950.report.prefill import ROLES, InterpretedRun, UnknownLoopsError, find_trips
from kernel.plan import WorkItem
from tests.gfx950.assembly_kernel import kernel_of

ROLLED = """
.LBB0_3:
    s_cbranch_vccz .LBB0_5
    v_mov_b32_e32 v0, 1
    s_barrier
    s_branch .LBB0_8
.LBB0_5:
    s_cbranch_vccz .LBB0_6
    v_mov_b32_e32 v0, 2
    s_barrier
    s_branch .LBB0_8
.LBB0_6:
    s_cbranch_vccz .LBB0_7
    v_mov_b32_e32 v0, 3
    s_barrier
    s_branch .LBB0_8
.LBB0_7:
    s_barrier
.LBB0_8:
    s_cbranch_scc1 .LBB0_3
"""
ONE_OUTER_LOOP = f"""
    s_nop 0
.LBB0_1:
    s_cbranch_scc0 .LBB0_3
    s_barrier
    s_barrier
    s_barrier
    s_barrier
    s_branch .LBB0_9
{ROLLED}
.LBB0_9:
    s_cbranch_scc1 .LBB0_1
    s_endpgm
"""
"""Groups of four blocks and the rolled loop are ways through one loop."""
LOOPS_OF_THEIR_OWN = f"""
    s_nop 0
.LBB0_1:
    s_cbranch_scc0 .LBB0_3
    s_nop 1
.LBB0_2:
    s_barrier
    s_barrier
    s_barrier
    s_barrier
    s_cbranch_scc1 .LBB0_2
{ROLLED}
    s_cbranch_scc1 .LBB0_1
    s_endpgm
"""
"""They are two loops in a third one."""
ITEMS = (
    WorkItem(0, 0, 128, 768, 0, 7, 7),  # blocks 4 and 5 whole, the diagonal in block 6
    WorkItem(0, 128, 128, 264, 0, 4, 4),  # wave 0 ends at position 379: block 2 in part, block 3 later
)
BLOCKS: Mapping[int, Sequence[str]] = {
    0: ("unmasked", "whole", "whole", "diagonal"),
    1: ("whole", "whole", "unaligned", "later"),
}


def run_of(kernel: Kernel, blocks: Mapping[int, Sequence[str]] = BLOCKS) -> InterpretedRun:
    """A run in which wave 0 of each workgroup makes these trips."""
    labels = kernel.labels
    rolled, latch = labels[".LBB0_3"], labels[".LBB0_8"]
    inside = {"whole": ".LBB0_5", "diagonal": ".LBB0_6", "unaligned": ".LBB0_7"}
    ways: dict[str, list[int]] = {}
    behind: list[int] = []
    for role, following in inside.items():
        first = labels[following] - 4
        ways[role] = [*behind, *range(first, first + 4), latch]
        behind.append(first)
    ways["later"] = [*behind, latch - 1, latch]
    outer = labels[".LBB0_1"]
    plain = labels.get(".LBB0_2")
    traces = {}
    for workgroup, roles in blocks.items():
        trace = [0, outer]
        for role in roles:
            if role != "unmasked":
                trace += ways[role]
            elif plain is None:
                trace += [*range(outer + 1, outer + 6), labels[".LBB0_9"], outer]
            else:
                trace += [plain - 1, *range(plain, plain + 5)]
        traces[workgroup, 0] = np.array([*trace, len(kernel.instructions) - 1], np.int32)
    assert rolled == ways["whole"][0]
    counts = np.zeros(len(kernel.instructions), np.int64)
    return InterpretedRun(RunReport(kernel, counts, 2, 2, None, traces), ITEMS, 4)


@pytest.mark.parametrize("body", [ONE_OUTER_LOOP, LOOPS_OF_THEIR_OWN])
def test_every_role_is_found(body: str) -> None:
    kernel = kernel_of(body)
    trips = {trip.role: trip for trip in find_trips(run_of(kernel))}
    assert tuple(trips) == ROLES
    assert [trip.blocks for trip in trips.values()] == [4, 1, 1, 1, 1]
    assert [trip.seen for trip in trips.values()] == [1, 4, 1, 1, 1]
    barriers = [
        sum(instruction.mnemonic == "s_barrier" for instruction in trip.instructions(kernel))
        for trip in trips.values()
    ]
    assert barriers == [4, 1, 1, 1, 1]
    made = [
        [i.operands[1].number for i in trips[role].instructions(kernel) if i.mnemonic == "v_mov_b32"]
        for role in ("whole", "diagonal", "unaligned", "later")
    ]
    assert made == [[1], [2], [3], []]
    assert all(trip.path[-1] == kernel.labels[".LBB0_8"] for trip in list(trips.values())[1:])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({**BLOCKS, 1: ("whole", "whole", "unaligned")}, "passed 3 blocks, not 4"),
        ({**BLOCKS, 0: ("unmasked", "whole", "whole", "whole")}, "one path is both whole and diagonal"),
        ({0: BLOCKS[0]}, "no wave took a trip of role unaligned"),
        ({**BLOCKS, 1: ("unmasked",)}, "scored 4 blocks from block 0"),
    ],
)
def test_what_does_not_fit_is_an_error(blocks: Mapping[int, Sequence[str]], message: str) -> None:
    with pytest.raises(UnknownLoopsError, match=message):
        find_trips(run_of(kernel_of(LOOPS_OF_THEIR_OWN), blocks))
