"""The paged cache of index keys: pages of NVFP4 on a device, and the block table of every sequence.

Two invariants make every operation undoable without keeping copies: a free page is all zero, and so are the
bytes of a page's tokens past its sequence's length.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernel.arguments import as_int
from kernel.backends.base import Backend
from kernel.checks import check_finite
from kernel.contract import BLOCK_TOKENS, MAX_SEQ_LEN, PAGE_BYTES
from kernel.errors import IndexerError, InvalidArgumentError, OutOfPagesError, UnknownSequenceError
from kernel.page import blocks_of, codes_of, scales_of

# ---- Page allocator: free pages and reference counts; integers, no torch ----


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


# ---- Sequences ----


@dataclass
class _Sequence:
    length: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))


class PagedKeyCache:
    """Pages, their allocator, and the sequences that hold them.

    A fork shares its parent's pages by reference count. Sharers of a partial page agree on its tokens, and
    whichever of them appends first moves to a copy of its own, so shared bytes never change.

    Args:
        num_pages: pages to allocate.
        backend: quantises and scatters the keys; the pages live on its device.

    Raises:
        InvalidArgumentError: the device has no room for that many pages.
    """

    def __init__(self, num_pages: int, backend: Backend) -> None:
        self.pages = _zero_pages(num_pages, backend.device)
        self.allocator = PageAllocator(num_pages)
        self._backend = backend
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of the live sequences, oldest first."""
        return tuple(self._sequences)

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self._get(seq).length

    def block_table(self, seq: int) -> array[int]:
        """A copy of the page ids of a sequence's blocks."""
        return self._get(seq).pages[:]

    def block_tables(self, seqs: Sequence[int]) -> torch.Tensor:
        """The block tables of some sequences, ``[len(seqs), most blocks]`` int32 on the device; -1 past a
        sequence's blocks."""
        tables = [self._get(seq).pages for seq in seqs]
        shape = (len(seqs), max(map(len, tables), default=0))
        table = torch.full(shape, -1, dtype=torch.int32, device="cpu")
        for row, pages in zip(table, tables):
            if pages:
                row[: len(pages)] = torch.frombuffer(pages, dtype=torch.int32)
        return table.to(self.pages.device)

    def add(self) -> int:
        """Make an empty sequence. Ids are never used twice."""
        with self.adding() as seq:
            return seq

    @contextmanager
    def adding(self) -> Iterator[int]:
        """As :meth:`add`, undone when the body raises."""
        with self._adopted(_Sequence(), self.allocator.savepoint()) as seq:
            yield seq

    def append(self, seq: int, keys: torch.Tensor) -> None:
        """Append keys ``[n, 128]`` to a sequence. An exception leaves all as it was.

        Args:
            seq: a live sequence.
            keys: of a dtype, a shape and a device that the caller checked.

        Raises:
            UnknownSequenceError: not a live sequence.
            InvalidArgumentError: the sequence would exceed the longest context, or a key is not finite.
            OutOfPagesError: too few free pages.
        """
        with self.appending(seq, keys):
            pass

    @contextmanager
    def appending(self, seq: int, keys: torch.Tensor) -> Iterator[None]:
        """As :meth:`append`, undone when the body raises. The body changes nothing else of the cache."""
        sequence = self._get(seq)
        start, end = sequence.length, sequence.length + keys.shape[0]
        check_room(start, keys.shape[0])
        check_finite("k", keys)  # not before: only now is their number known to be one that can be read
        keys = keys.detach().contiguous()
        if end == start:
            yield
            return
        num_blocks = len(sequence.pages)
        partial = sequence.pages[-1:] if start % BLOCK_TOKENS else array("i")
        copies = bool(partial) and self.allocator.ref_count(partial[0]) > 1
        new_blocks = blocks_of(end) - num_blocks
        savepoint = self.allocator.savepoint(new_blocks + copies, partial)
        try:
            fresh = self.allocator.allocate(new_blocks + copies)
            if copies:
                sequence.pages[-1] = fresh.pop(0)
                self.pages[sequence.pages[-1]] = self.pages[partial[0]]
                self.allocator.release(partial)
            sequence.pages.extend(fresh)
            self._backend.insert(keys, self.pages, self._slots(sequence, start, end))
            sequence.length = end
            yield
        except BaseException:
            sequence.length = start
            sequence.pages[num_blocks - len(partial) :] = partial
            self.allocator.rollback(savepoint)
            self._zero(savepoint.free)
            if partial:
                self._zero_tokens(partial[0], start % BLOCK_TOKENS)
            raise

    def fork(self, seq: int) -> int:
        """Make a sequence with the same keys, sharing every page.

        Raises:
            UnknownSequenceError: not a live sequence.
        """
        with self.forking(seq) as fork:
            return fork

    @contextmanager
    def forking(self, seq: int) -> Iterator[int]:
        """As :meth:`fork`, undone when the body raises. The body changes nothing else of the cache."""
        parent = self._get(seq)
        savepoint = self.allocator.savepoint(touching=parent.pages)
        with self._adopted(_Sequence(parent.length, parent.pages[:]), savepoint) as fork:
            yield fork

    def own_pages(self, seq: int) -> int:
        """Pages that no other sequence holds: those that :meth:`free` frees."""
        return sum(self.allocator.ref_count(page) == 1 for page in self._get(seq).pages)

    def free(self, seq: int) -> None:
        """Drop a sequence; pages that no other one holds are zeroed and become free.

        It is dropped too when that raises. Pages that could not be zeroed, by a device that fails for good,
        are never given out again.

        Raises:
            UnknownSequenceError: not a live sequence.
        """
        sequence = self._get(seq)
        savepoint = self.allocator.savepoint(touching=sequence.pages)
        try:
            self._drop(seq, sequence)
        except BaseException:
            # Its keys may be gone, so a free that has begun is completed, not undone: first its id goes.
            self._sequences.pop(seq, None)
            self.allocator.rollback(savepoint)
            self._drop(seq, sequence)
            raise

    def _get(self, seq: int) -> _Sequence:
        # A bool or a float would find the integer it equals.
        number = as_int(seq)
        if number is None or number not in self._sequences:
            raise UnknownSequenceError(seq)
        return self._sequences[number]

    @contextmanager
    def _adopted(self, sequence: _Sequence, savepoint: Savepoint) -> Iterator[int]:
        seq = self._next_id
        try:
            self.allocator.share(sequence.pages)
            self._sequences[seq] = sequence
            self._next_id = seq + 1
            yield seq
        except BaseException:
            self._next_id = seq
            self._sequences.pop(seq, None)
            self.allocator.rollback(savepoint)
            raise

    def _drop(self, seq: int, sequence: _Sequence) -> None:
        own = [page for page in sequence.pages if self.allocator.ref_count(page) == 1]
        self.allocator.release([page for page in sequence.pages if self.allocator.ref_count(page) > 1])
        self._zero(own)
        self.allocator.release(own)
        self._sequences.pop(seq, None)

    def _slots(self, sequence: _Sequence, start: int, end: int) -> torch.Tensor:
        first_block = start // BLOCK_TOKENS
        pages = torch.tensor(sequence.pages[first_block : blocks_of(end)], dtype=torch.int64, device="cpu")
        tokens = torch.arange(BLOCK_TOKENS, dtype=torch.int64, device="cpu")
        slots = (pages[:, None] * BLOCK_TOKENS + tokens).flatten()
        offset = first_block * BLOCK_TOKENS
        return slots[start - offset : end - offset].to(self.pages.device)

    def _zero(self, pages: Sequence[int]) -> None:
        if not pages:
            return
        try:
            self.pages.index_fill_(0, torch.tensor(pages, dtype=torch.int64, device=self.pages.device), 0)
        except (RuntimeError, MemoryError):  # where memory ran out there is none for the ids
            for page in pages:
                self.pages[page].zero_()

    def _zero_tokens(self, page: int, first_token: int) -> None:
        codes_of(self.pages[page])[first_token:].zero_()
        scales_of(self.pages[page])[first_token:].zero_()


def check_room(length: int, added: int) -> None:
    """Refuse keys that would make a sequence longer than the longest context."""
    if length + added > MAX_SEQ_LEN:
        raise InvalidArgumentError(
            "k.shape[0]",
            added,
            f"the sequence holds {length} tokens and may hold {MAX_SEQ_LEN}",
            "start another sequence",
        )


def _zero_pages(num_pages: int, device: torch.device) -> torch.Tensor:
    size = num_pages * PAGE_BYTES
    too_many = InvalidArgumentError(
        "num_pages", num_pages, f"{size} bytes do not fit on {device}", "build the scorer with fewer pages"
    )
    if size > memory_bytes(device):
        raise too_many
    try:
        # An inference tensor could not be written to outside inference mode; another can be in both.
        with torch.inference_mode(False):
            return torch.zeros(num_pages, PAGE_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise too_many from error


# ---- Device memory: refuse in time what cannot fit ----
#
# A host may promise memory that it does not have and end the process once it is written to, so a failed
# allocation alone is no safeguard.

_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux says how much memory a container may have (control groups 2 and 1)."""


def memory_bytes(device: torch.device) -> int:
    """Bytes of memory that a device has in all; for the host, no more than its container may have."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CONTAINER_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such control group, or "max": no limit
            continue
    return min(limits)
