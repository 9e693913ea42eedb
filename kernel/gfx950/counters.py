"""Memory operations in flight and the ``s_waitcnt`` counters that say when they are over.

``vmcnt`` counts loads, stores and DMA to LDS, which finish in order on gfx9. ``lgkmcnt`` counts LDS
operations, which finish in order among themselves, and scalar loads, which finish in any order: with n
operations left, a scalar load is certainly over only if n = 0, an LDS operation if at least n later LDS
operations were issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernel.gfx950.races import Access


@dataclass(eq=False, slots=True)
class Flight:
    """One operation between its issue and the wait that covers it.

    ``vectors`` and ``scalars`` are the registers it will write, with the state each gets at the end.
    ``lds_granules`` are the LDS granules and ``accesses`` the global ones it touches, ``finish`` what it
    does at the end (DMA landing late).
    """

    line: int
    vectors: tuple[int, ...] = ()
    vector_states: tuple[int, ...] = ()
    scalars: tuple[int, ...] = ()
    scalar_states: tuple[int, ...] = ()
    lds_granules: npt.NDArray[np.int64] | None = None
    lds_write: bool = False
    dma: bool = False
    accesses: tuple[Access, ...] | list[Access] = ()
    finish: Callable[[], None] | None = None


@dataclass(eq=False, slots=True)
class Counters:
    """What a wave has in flight. ``retire`` is called for each operation that a wait proves to be over."""

    retire: Callable[[Flight], None]
    vector_memory: deque[Flight] = field(default_factory=deque)
    lds: deque[Flight] = field(default_factory=deque)
    scalar: list[Flight] = field(default_factory=list)

    def wait_vector_memory(self, left: int) -> None:
        queue = self.vector_memory
        while len(queue) > left:
            self.retire(queue.popleft())

    def wait_lgkm(self, left: int) -> None:
        queue = self.lds
        while len(queue) > left:
            self.retire(queue.popleft())
        if left == 0 and self.scalar:
            for flight in self.scalar:
                self.retire(flight)
            self.scalar.clear()

    def supersede(self, register: int) -> int | None:
        """Take a vector register from the vector memory load in flight that is to write it.

        Returns the state it would have got, None where no such load is in flight.
        """
        for flight in self.vector_memory:
            if register in flight.vectors:
                at = flight.vectors.index(register)
                state = flight.vector_states[at]
                flight.vectors = flight.vectors[:at] + flight.vectors[at + 1 :]
                flight.vector_states = flight.vector_states[:at] + flight.vector_states[at + 1 :]
                return state
        return None

    def in_flight(self) -> list[Flight]:
        return [*self.vector_memory, *self.lds, *self.scalar]
