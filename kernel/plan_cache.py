"""Plans of launches that come again: every layer of a model scores the same shape, step by step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from kernel.batch import Request
from kernel.plan import pack_items, plan_prefill

_Key = tuple[tuple[Request, ...], int, int, int, int, int]


@dataclass(frozen=True)
class PackedPlan:
    """A plan as the device reads it.

    Attributes:
        num_items: work items.
        words: their int32 words, see :func:`kernel.plan.pack_items`.
    """

    num_items: int
    words: bytes


class PlanCache:
    """The plans asked for last, each made once. May be used from several threads.

    Args:
        most: work items and requests of all plans that are kept together, some 100 bytes each.
    """

    def __init__(self, most: int = 1 << 17) -> None:
        self._most = most
        self._size = 0
        self._plans: OrderedDict[_Key, PackedPlan] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Plans that are kept."""
        return len(self._plans)

    def plan(
        self,
        requests: tuple[Request, ...],
        num_heads: int,
        *,
        table_stride: int,
        score_blocks: int,
        slots: int,
        alignment: int,
    ) -> PackedPlan:
        """As :func:`kernel.plan.plan_prefill`, packed.

        Raises:
            InvalidArgumentError: see there.
        """
        # All that a plan depends on.
        key = (requests, num_heads, table_stride, score_blocks, slots, alignment)
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
                return found
        items = plan_prefill(
            requests,
            num_heads,
            table_stride=table_stride,
            score_blocks=score_blocks,
            slots=slots,
            alignment=alignment,
        )
        made = PackedPlan(len(items), pack_items(items).tobytes())
        size = made.num_items + len(requests)
        with self._lock:
            if key not in self._plans and size <= self._most:
                self._plans[key] = made
                self._size += size
            while self._size > self._most:
                old, dropped = self._plans.popitem(last=False)
                self._size -= dropped.num_items + len(old[0])
        return made
