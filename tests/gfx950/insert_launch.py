"""Single launches of an insert kernel's assembly, without FlyDSL's launcher: every byte of the pages is
compared, and nothing around them may be touched."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from kernel.backends.flydsl.geometry import KeyType
from kernel.gfx950 import Kernel, Memory, Program, RunReport, Schedule, run
from tests.support.oracle_pages import oracle_inserted

BEFORE = 0xA5
"""What every byte of the pages holds before."""
_PAGE_STRIDE = (5 << 30) + 48
"""Bytes: each page is a region of its own, and page offsets need 64 bits."""
_KEY_STRIDE = (5 << 30) + 16
"""Bytes: so is each key."""
_THREADS, _KEYS_A_WORKGROUP = 256, 32


class WrongPagesError(Exception):
    """The kernel ended, and the pages are not those of the oracle."""


@dataclass(frozen=True)
class InsertLaunch:
    """Keys ``[n, 128]`` to ``slots`` of ``num_pages`` pages; slots outside them are skipped."""

    name: str
    key_type: KeyType
    keys: torch.Tensor
    slots: torch.Tensor
    num_pages: int
    schedule: Schedule = Schedule()  # noqa: RUF009  frozen

    @cached_property
    def expected(self) -> torch.Tensor:
        """The pages afterwards, ``[num_pages, 9216]``."""
        pages = torch.full((self.num_pages, 9216), BEFORE, dtype=torch.uint8)
        inside = (self.slots >= 0) & (self.slots < 128 * self.num_pages)
        return oracle_inserted(self.keys[inside], pages, self.slots[inside])

    def under(self, schedule: Schedule) -> InsertLaunch:
        """The same launch in another order."""
        return replace(self, schedule=schedule)

    def run(self, kernel: Kernel) -> RunReport:
        """Raises an InterpreterError for what the kernel does wrong, WrongPagesError for what it writes."""
        num, key_bytes = self.keys.shape[0], 128 * self.key_type.num_bytes
        keys = self.keys.contiguous().view(torch.uint8).numpy().reshape(num, key_bytes)
        pages = np.full((self.num_pages, 9216), BEFORE, np.uint8)
        slots = self.slots.numpy()
        memory = Memory()
        keys_at, slots_at, pages_at = (1 << 46) - 4096, (2 << 40) - 8, (3 << 44) - 4096
        for row, key in enumerate(keys):
            memory.register_array(key, f"key {row}", writable=False, address=keys_at + row * _KEY_STRIDE)
        memory.register_array(slots, "slots", writable=False, address=slots_at)
        for page_id, page in enumerate(pages):
            address = pages_at + page_id * _PAGE_STRIDE
            memory.register_array(page, f"page {page_id}", address=address)
        kernargs = struct.pack(
            "<6qi",
            keys_at,
            _KEY_STRIDE,
            slots_at,
            pages_at,
            _PAGE_STRIDE,
            128 * self.num_pages,
            num,
        )
        report = run(
            Program({kernel.name: kernel}),
            kernel.name,
            grid=(-(-num // _KEYS_A_WORKGROUP), 1, 1),
            block=(_THREADS, 1, 1),
            kernargs=kernargs,
            memory=memory,
            schedule=self.schedule,
        )
        wrong = np.argwhere(pages != self.expected.numpy())
        if wrong.size:
            page_id, at = map(int, wrong[0])
            raise WrongPagesError(
                f"{len(wrong)} bytes are wrong, the first of page {page_id} at {at}: {pages[page_id, at]} "
                f"instead of {int(self.expected[page_id, at])}"
            )
        return report
