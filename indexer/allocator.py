"""Which pages of a cache are free, and how many sequences hold each of the others. Integers, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel.errors import IndexerError, OutOfPagesError


@dataclass(frozen=True)
class Savepoint:
    """What an operation may change in an allocator, as it was before."""

    num_stable: int
    """Entries at the bottom of the free list that the operation cannot reach."""
    free: tuple[int, ...]
    ref_counts: dict[int, int]


class PageAllocator:
    """A free list and reference counts.

    The free list is a stack: pages go out in ascending order at first, and the one freed last goes out first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._ref_counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """The free pages in the order in which they will be allocated."""
        return tuple(reversed(self._free))

    def ref_count(self, page: int) -> int:
        """Sequences that hold a page; 0 for a free one."""
        return self._ref_counts[page]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages with one reference each, or none at all.

        Raises:
            OutOfPagesError: fewer pages are free; says how many are missing.
        """
        if count > len(self._free):
            raise OutOfPagesError(count, len(self._free), self.num_pages)
        first = len(self._free) - count
        pages = self._free[first:][::-1]
        for page in pages:
            self._ref_counts[page] = 1
        del self._free[first:]
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each of these pages, which are held already."""
        self._check_held(pages)
        for page in pages:
            self._ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each of these distinct pages; those without any left become free.

        Raises:
            IndexerError: a page is free already, or is named twice; nothing was changed.
        """
        self._check_held(pages)
        for page in reversed(pages):  # so that the same pages go out in the same order again
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free.append(page)

    def savepoint(self, allocating: int = 0, touching: Sequence[int] = ()) -> Savepoint:
        """Remember what an operation may change that allocates ``allocating`` pages and then shares or
        releases the pages ``touching``. Costs no more than the operation itself.

        Raises:
            OutOfPagesError: fewer than ``allocating`` pages are free.
        """
        if allocating > len(self._free):
            raise OutOfPagesError(allocating, len(self._free), self.num_pages)
        num_stable = len(self._free) - allocating
        free = tuple(self._free[num_stable:])
        ref_counts = {page: self._ref_counts[page] for page in (*free, *touching)}
        return Savepoint(num_stable, free, ref_counts)

    def rollback(self, savepoint: Savepoint) -> None:
        """Undo the operation that ``savepoint`` was made for, however far it came."""
        self._free[savepoint.num_stable :] = savepoint.free
        for page, count in savepoint.ref_counts.items():
            self._ref_counts[page] = count

    def _check_held(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 <= page < self.num_pages or self._ref_counts[page] == 0:
                raise IndexerError(f"page {page} is not held by any sequence; its block table is corrupt")
        if len(set(pages)) != len(pages):
            raise IndexerError(f"pages {list(pages)} name a page twice; the block table is corrupt")
