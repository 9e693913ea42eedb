"""The page allocator: all or nothing, in a fixed order, and never a page freed twice."""

from __future__ import annotations

import pytest

from indexer.cache import PageAllocator
from kernel.errors import IndexerError, OutOfPagesError


def test_pages_go_out_in_ascending_order_and_come_back_in_the_same() -> None:
    allocator = PageAllocator(6)
    first, second = allocator.allocate(2), allocator.allocate(3)
    assert (first, second) == ([0, 1], [2, 3, 4])
    allocator.release(second)
    assert allocator.allocate(3) == second
    assert allocator.num_free == 1


def test_too_many_pages_are_refused_as_a_whole() -> None:
    allocator = PageAllocator(5)
    allocator.allocate(2)
    with pytest.raises(
        OutOfPagesError, match=r"num_pages = 5: 7 more pages .* 3 are free, 4 missing"
    ) as caught:
        allocator.allocate(7)
    assert (caught.value.missing, allocator.num_free, allocator.free_pages) == (4, 3, (2, 3, 4))


def test_a_shared_page_is_free_after_its_last_release() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(2)
    allocator.share(pages[:1])
    allocator.release(pages)
    assert (allocator.ref_count(0), allocator.ref_count(1), allocator.free_pages) == (1, 0, (1,))
    allocator.release(pages[:1])
    assert allocator.num_free == 2


@pytest.mark.parametrize("pages", [[2], [0, 2], [0, 0], [-1], [4]])
def test_releasing_a_page_that_is_not_held_changes_nothing(pages: list[int]) -> None:
    allocator = PageAllocator(4)
    allocator.allocate(2)
    with pytest.raises(IndexerError, match="page"):
        allocator.release(pages)
    with pytest.raises(IndexerError, match="page"):
        allocator.share(pages)
    assert [allocator.ref_count(page) for page in range(4)] == [1, 1, 0, 0]
    assert allocator.free_pages == (2, 3)


def test_rollback_undoes_allocation_sharing_and_release() -> None:
    allocator = PageAllocator(8)
    held = allocator.allocate(3)
    before = (allocator.free_pages, [allocator.ref_count(page) for page in range(8)])
    savepoint = allocator.savepoint(allocating=4, touching=held)
    allocator.allocate(4)
    allocator.share(held[:1])
    allocator.release(held[1:])
    allocator.rollback(savepoint)
    assert (allocator.free_pages, [allocator.ref_count(page) for page in range(8)]) == before


def test_a_savepoint_for_too_many_pages_is_refused() -> None:
    with pytest.raises(OutOfPagesError, match="1 missing"):
        PageAllocator(3).savepoint(allocating=4)
