"""How evenly the gfx950 launch plan of a call keeps its workgroups busy: a prediction, no GPU is needed."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from indexer.case import Case
from indexer.pipeline import MAX_DECODE_QUERIES
from kernel.batch import Request
from kernel.plan import STORE_BLOCKS, XCDS, plan_prefill

COMPUTE_UNITS = 256
"""Of an MI350X and an MI355X."""
WORKGROUPS_PER_COMPUTE_UNIT = 2


@dataclass(frozen=True)
class PlanBalance:
    """The plan of a call's prefill requests.

    Attributes:
        items: workgroups of the launch.
        slots: workgroups that run at once.
        compute_units: of the device that is assumed.
        busy_share: work over what all slots could do until the last is done; 1 is even.
        slot_blocks: predicted time of each slot in blocks of 128 keys, most first.
        decode_requests: requests left out, which another kernel scores.
    """

    items: int
    slots: int
    compute_units: int
    busy_share: float
    slot_blocks: tuple[float, ...]
    decode_requests: int


def plan_balance(case: Case, compute_units: int = COMPUTE_UNITS) -> PlanBalance | None:
    """Plan a call as the gfx950 backend would; None if it has no prefill request."""
    requests, decode = [], 0
    for row, (start, count) in enumerate(zip(case.cu_seqlens_q.tolist(), case.query_lens.tolist())):
        if count > MAX_DECODE_QUERIES:
            requests.append(Request(row, start, count, int(case.seq_lens[row])))
        elif count:
            decode += 1
    slots = WORKGROUPS_PER_COMPUTE_UNIT * compute_units
    items = plan_prefill(
        requests,
        case.num_heads,
        table_stride=case.num_score_blocks if case.block_table is None else case.block_table.shape[1],
        score_blocks=case.num_score_blocks,
        slots=slots,
        alignment=STORE_BLOCKS,
    )
    if not items:
        return None
    ends: list[int] = []
    for die in range(XCDS):
        free = [0] * max(1, slots // XCDS)
        for item in items[die::XCDS]:
            heapq.heapreplace(free, free[0] + item.cost)
        ends += free
    most = max(ends)
    return PlanBalance(
        items=len(items),
        slots=slots,
        compute_units=compute_units,
        busy_share=sum(ends) / (most * len(ends)),
        slot_blocks=tuple(end / 4 for end in sorted(ends, reverse=True)),
        decode_requests=decode,
    )
