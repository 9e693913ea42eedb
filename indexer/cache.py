"""The paged cache of index keys: pages of NVFP4 on a device, and the block table of every sequence.

Two invariants make every operation undoable without keeping copies: a free page is all zero, and so are the
bytes of a page's tokens past its sequence's length.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.arguments import as_int
from kernel.backends.base import Backend
from kernel.checks import check_finite
from kernel.contract import BLOCK_TOKENS, MAX_SEQ_BLOCKS, MAX_SEQ_LEN, PAGE_BYTES
from kernel.errors import IndexerError, InvalidArgumentError, OutOfPagesError, UnknownSequenceError
from kernel.page import blocks_of, codes_of, scales_of
from kernel.step import uploaded

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
    row: int = -1
    """Row of the device's block tables; -1 before it is first asked for."""
    synced: int = 0
    """Leading blocks whose page ids the device's row holds."""


class DeviceTables:
    """Block tables on the device, a row for each sequence that was scored: ``[rows, columns]`` int32.

    Rows are brought up to date when they are asked for, in one copy for all of them. Cells past a sequence's
    blocks are -1. The last tables are kept: those of the same sequences change once in 128 tokens.
    """

    def __init__(self, columns: int, device: torch.device) -> None:
        self._columns = columns
        self._table = self._room(0, device)
        self._written: list[int] = []
        """Cells of each row that are not -1."""
        self._free: list[int] = []
        self._last: tuple[object, torch.Tensor] | None = None

    def gather(self, sequences: Sequence[_Sequence], columns: int) -> torch.Tensor:
        """The tables of some sequences, ``[len(sequences), columns]``, up to date: to be read, not written.
        Waits for nothing."""
        places: list[int] = []
        values: list[int] = []
        behind: list[_Sequence] = []
        for sequence in sequences:
            if sequence.row < 0:
                sequence.row = self._take()
            blocks, row = len(sequence.pages), sequence.row
            if sequence.synced == blocks and self._written[row] == blocks:
                continue
            end = max(blocks, self._written[row])
            places.extend(range(row * self._columns + sequence.synced, row * self._columns + end))
            values.extend(sequence.pages[sequence.synced :])
            values.extend([-1] * (end - blocks))
            self._written[row] = end  # should the copy fail, whatever it wrote is written again
            behind.append(sequence)
        rows, device = [sequence.row for sequence in sequences], self._table.device
        # Work on another stream is not ordered after the copy; a graph's memory is the graph's.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (columns, stream, torch.is_inference_mode_enabled(), *rows)
        keeps = device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
        if keeps and not places and self._last is not None and self._last[0] == key:
            return self._last[1]
        self._last = None
        cells, page_ids, chosen = uploaded(
            [np.array(numbers, dtype=np.int64) for numbers in (places, values, rows)], device
        )
        if places:
            self._table.view(-1)[cells] = page_ids.to(torch.int32)
        for sequence in behind:
            sequence.synced = self._written[sequence.row] = len(sequence.pages)
        table = self._table[:, :columns].index_select(0, chosen)
        self._last = (key, table) if keeps else None
        return table

    def drop(self, sequence: _Sequence) -> None:
        """Gives a sequence's row back."""
        if sequence.row >= 0:
            self._free.append(sequence.row)
            sequence.row = -1

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        row = len(self._written)
        if row == self._table.shape[0]:
            grown = self._room(max(2 * row, 64), self._table.device)
            grown[:row] = self._table
            self._table = grown
        self._written.append(0)
        return row

    def _room(self, rows: int, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.full((rows, self._columns), -1, dtype=torch.int32, device=device)


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
        self._tables = DeviceTables(min(num_pages, MAX_SEQ_BLOCKS), backend.device)
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

    def block_tables(self, seqs: Sequence[int], columns: int | None = None) -> torch.Tensor:
        """The block tables of some sequences, ``[len(seqs), columns]`` int32 on the device; -1 past a
        sequence's blocks.

        Args:
            seqs: live sequences.
            columns: at least the blocks of the longest; exactly these when None.
        """
        sequences = [self._get(seq) for seq in seqs]
        longest = max((len(sequence.pages) for sequence in sequences), default=0)
        return self._tables.gather(sequences, longest if columns is None else columns)

    def add(self) -> int:
        """Make an empty sequence. Ids are never used twice."""
        with self.adding() as seq:
            return seq

    @contextmanager
    def adding(self) -> Iterator[int]:
        """As :meth:`add`, undone when the body raises."""
        with self._adopted(_Sequence(), self.allocator.savepoint()) as seq:
            yield seq

    def append(self, seqs: Sequence[int], lens: Sequence[int], keys: torch.Tensor) -> None:
        """Append keys to sequences, all or none. An exception leaves all as it was.

        Args:
            seqs: live sequences, each once.
            lens: keys of each.
            keys: ``[sum(lens), 128]``, of a dtype, a shape and a device that the caller checked; those of
                the first sequence first.

        Raises:
            UnknownSequenceError: not a live sequence.
            InvalidArgumentError: a sequence would exceed the longest context, or a key is not finite.
            OutOfPagesError: too few free pages for all of them.
        """
        for row, (seq, added) in enumerate(zip(seqs, lens)):
            check_room(self.length(seq), added, "k.shape[0]" if len(seqs) == 1 else f"lens[{row}]")
        check_finite("k", keys)  # not before: only now is their number known to be one that can be read
        with self.appending(seqs, lens, keys):
            pass

    @contextmanager
    def appending(self, seqs: Sequence[int], lens: Sequence[int], keys: torch.Tensor) -> Iterator[None]:
        """As :meth:`append`, of keys and lengths that the caller checked, undone when the body raises.

        Waits for nothing. The body changes nothing else of the cache.
        """
        sequences = [self._get(seq) for seq in seqs]
        keys = keys.detach().contiguous()
        appends = [_Append.of(sequence, added) for sequence, added in zip(sequences, lens) if added]
        if not appends:
            yield
            return
        self._find_copies(appends)
        touched = [append.partial for append in appends if append.partial is not None]
        num_fresh = sum(append.new_blocks + append.copies for append in appends)
        savepoint = self.allocator.savepoint(num_fresh, touched)
        try:
            fresh = iter(self.allocator.allocate(num_fresh))
            copied = [
                (append.partial, append.sequence.pages[append.num_blocks - 1])
                for append in appends
                if append.take(fresh) and append.partial is not None
            ]
            numbers = [np.array(copied, dtype=np.int64).reshape(-1, 2).T]
            numbers.append(_all_slots(appends))
            (sources, targets), slots = uploaded(numbers, self.pages.device)
            if copied:
                self.pages[targets] = self.pages[sources]
                for source, _ in copied:
                    self.allocator.release([source])
            self._backend.insert(keys, self.pages, slots)
            for append in appends:
                append.sequence.length = append.end
            yield
        except BaseException:
            for append in appends:
                append.undo()
            self.allocator.rollback(savepoint)
            self._zero(savepoint.free)
            for append in appends:
                if append.partial is not None and not append.copies:
                    self._zero_tokens(append.partial, append.start % BLOCK_TOKENS)
            raise

    def _find_copies(self, appends: Sequence[_Append]) -> None:
        """Marks the appends that need a copy of their partial page: all sharers but the last one left."""
        sharers: dict[int, int] = {}
        for append in appends:
            if append.partial is not None:
                left = sharers.get(append.partial, self.allocator.ref_count(append.partial))
                append.copies = left > 1
                sharers[append.partial] = left - append.copies

    @contextmanager
    def truncating(self, seq: int, length: int) -> Iterator[None]:
        """Drop a sequence's last keys, once the body has run.

        Pages that no other sequence holds are zeroed and become free. A partial last page that others share
        is replaced by a copy. Nothing is changed when the body raises, or this does before it. Dropping that
        has begun is completed, also when it raises: keys may be gone.

        Args:
            seq: a live sequence.
            length: tokens to keep, at most those it has.

        Raises:
            UnknownSequenceError: not a live sequence.
            OutOfPagesError: a copy is needed and no page is free.
        """
        sequence = self._get(seq)
        kept, tokens = blocks_of(length), length % BLOCK_TOKENS
        last = sequence.pages[kept - 1] if tokens and length < sequence.length else None
        copies = last is not None and self.allocator.ref_count(last) > 1
        dropped = sequence.pages[kept - copies :]
        before = self.allocator.savepoint(int(copies))
        begun: Savepoint | None = None
        remaining = sequence.pages[: kept - copies]
        try:
            if copies:
                remaining.extend(self.allocator.allocate(1))
                self.pages[remaining[-1]] = self.pages[last]
            yield
            begun = self.allocator.savepoint(touching=dropped)
            self._cut(sequence, remaining, length, dropped)
        except BaseException:
            if begun is None:
                self.allocator.rollback(before)
                self._zero(before.free)
            else:  # keys may be gone, so what has begun is completed
                self.allocator.rollback(begun)
                self._cut(sequence, remaining, length, dropped)
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

    def own_pages(self, seq: int, first_block: int = 0) -> int:
        """Pages from a block on that no other sequence holds: those that :meth:`free` frees."""
        return sum(self.allocator.ref_count(page) == 1 for page in self._get(seq).pages[first_block:])

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
        if type(seq) is int and (found := self._sequences.get(seq)) is not None:
            return found
        # A bool or a float would find the integer it equals.
        number = as_int(seq)
        found = None if number is None else self._sequences.get(number)
        # Looked up once: readers of a length or a table do not wait for a call that frees it.
        if found is None:
            raise UnknownSequenceError(seq)
        return found

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
        self._release(sequence.pages)
        self._sequences.pop(seq, None)
        self._tables.drop(sequence)

    def _cut(self, sequence: _Sequence, remaining: array[int], length: int, dropped: Sequence[int]) -> None:
        """Leaves a sequence some pages and tokens. May be repeated."""
        sequence.synced = min(sequence.synced, max(len(remaining) - 1, 0))
        sequence.pages[:] = remaining
        sequence.length = length
        if length % BLOCK_TOKENS:
            self._zero_tokens(remaining[-1], length % BLOCK_TOKENS)
        self._release(dropped)

    def _release(self, pages: Sequence[int]) -> None:
        """Drops a reference to each page; those without any left are zeroed and become free."""
        own = [page for page in pages if self.allocator.ref_count(page) == 1]
        self.allocator.release([page for page in pages if self.allocator.ref_count(page) > 1])
        self._zero(own)
        self.allocator.release(own)

    def _zero(self, pages: Sequence[int]) -> None:
        if not pages:
            return
        try:
            self.pages.index_fill_(0, uploaded([np.array(pages, dtype=np.int64)], self.pages.device)[0], 0)
        except (RuntimeError, MemoryError):  # where memory ran out there is none for the ids
            for page in pages:
                self.pages[page].zero_()

    def _zero_tokens(self, page: int, first_token: int) -> None:
        codes_of(self.pages[page])[first_token:].zero_()
        scales_of(self.pages[page])[first_token:].zero_()


_FEW_KEYS = 16
"""Keys of a sequence up to which slots are computed one by one."""


@dataclass
class _Append:
    """Keys that are being appended to one sequence."""

    sequence: _Sequence
    start: int
    end: int
    num_blocks: int
    """Before."""
    new_blocks: int
    partial: int | None
    """The last page, where it is partial."""
    copies: bool = False
    """Whether the partial page is shared, so that a copy of it is written."""

    @staticmethod
    def of(sequence: _Sequence, added: int) -> _Append:
        start, blocks = sequence.length, len(sequence.pages)
        partial = sequence.pages[-1] if start % BLOCK_TOKENS else None
        end = start + added
        return _Append(sequence, start, end, blocks, blocks_of(end) - blocks, partial)

    def take(self, fresh: Iterator[int]) -> bool:
        """Gives the sequence its new pages; whether the first of them is a copy of the partial one."""
        pages = self.sequence.pages
        if self.copies:
            pages[-1] = next(fresh)
            self.sequence.synced = min(self.sequence.synced, self.num_blocks - 1)
        if self.new_blocks:
            pages.extend(itertools.islice(fresh, self.new_blocks))
        return self.copies

    def slots(self) -> list[int] | NDArray[np.int64]:
        """The slot of each key."""
        pages, first = self.sequence.pages, self.start // BLOCK_TOKENS
        if self.end - self.start <= _FEW_KEYS:
            tokens = range(self.start, self.end)
            return [pages[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS for token in tokens]
        page_ids = np.array(pages[first : blocks_of(self.end)], dtype=np.int64)
        every = (page_ids[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)
        return every[self.start - first * BLOCK_TOKENS : self.end - first * BLOCK_TOKENS]

    def undo(self) -> None:
        sequence = self.sequence
        sequence.length = self.start
        sequence.synced = min(sequence.synced, self.num_blocks - (self.partial is not None))
        del sequence.pages[self.num_blocks :]
        if self.partial is not None:
            sequence.pages[-1] = self.partial


def _all_slots(appends: Sequence[_Append]) -> NDArray[np.int64]:
    """The slots of all keys. A list is made an array at once: numpy takes a microsecond for each."""
    slots = [append.slots() for append in appends]
    if all(type(own) is list for own in slots):
        return np.array(list(itertools.chain.from_iterable(slots)), dtype=np.int64)
    return np.concatenate(slots)


def check_room(length: int, added: int, argument: str = "k.shape[0]") -> None:
    """Refuse keys that would make a sequence longer than the longest context."""
    if length + added > MAX_SEQ_LEN:
        raise InvalidArgumentError(
            argument,
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
