"""The scorer's cache: appends, forks, frees, and what an interrupted one leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from indexer import IndexerConfig, IndexScorer, InvalidArgumentError, OutOfPagesError, UnknownSequenceError
from indexer.cache import PageAllocator, memory_bytes
from kernel.contract import PAGE_BYTES
from kernel.errors import IndexerError
from kernel.page import codes_of, scales_of
from tests.support.cases import ROOT
from tests.support.scorer_state import assert_consistent, oracle_pages, pages_of, state_of

if TYPE_CHECKING:
    from _typeshed import TraceFunction

LENGTHS = [1, 127, 128, 129, 300]


def keys(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()


def new_scorer(num_pages: int = 16) -> IndexScorer:
    return IndexScorer(IndexerConfig(4, num_pages, backend="cpu"))


def filled(scorer: IndexScorer, tokens: int, seed: int = 0) -> int:
    seq = scorer.add_sequence()
    scorer.append_keys(seq, keys(tokens, seed))
    return seq


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_append_writes_the_oracle_s_bytes(tokens: int, dtype: torch.dtype) -> None:
    scorer = new_scorer()
    seq = scorer.add_sequence()
    scorer.append_keys(seq, keys(tokens).to(dtype))
    assert scorer.sequence_length(seq) == tokens
    assert torch.equal(pages_of(scorer, seq), oracle_pages(keys(tokens)))
    assert_consistent(scorer)


def test_pages_do_not_depend_on_how_keys_arrive() -> None:
    whole = oracle_pages(keys(300))
    for split in [*range(1, 130), 255, 256, 257, 299]:
        scorer = new_scorer(3)
        seq = scorer.add_sequence()
        scorer.append_keys(seq, keys(300)[:split])
        scorer.append_keys(seq, keys(300)[split:])
        assert torch.equal(pages_of(scorer, seq), whole), split


def test_one_token_at_a_time() -> None:
    scorer = new_scorer(3)
    seq = scorer.add_sequence()
    for key in keys(260):
        scorer.append_keys(seq, key[None])
    assert torch.equal(pages_of(scorer, seq), oracle_pages(keys(260)))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_strided_keys_that_require_a_gradient(backend: str) -> None:
    scorer = IndexScorer(IndexerConfig(4, 16, backend=backend))
    seq = scorer.add_sequence()
    wide = torch.zeros(128, 300)
    wide[:] = keys(300).float().T
    scorer.append_keys(seq, wide.requires_grad_().T)
    assert torch.equal(pages_of(scorer, seq), oracle_pages(keys(300)))


def test_no_keys_are_legal() -> None:
    scorer = new_scorer(0)
    seq = scorer.add_sequence()
    scorer.append_keys(seq, keys(0))
    assert (scorer.sequence_length(seq), scorer.block_table(seq).tolist(), scorer.num_free_pages) == (
        0,
        [],
        0,
    )


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("side", ["parent", "fork"])
def test_a_fork_and_its_parent_go_their_own_ways(tokens: int, side: str) -> None:
    scorer = new_scorer()
    parent = filled(scorer, tokens)
    free = scorer.num_free_pages
    fork = scorer.fork_sequence(parent)
    assert scorer.num_free_pages == free
    assert scorer.block_table(fork).tolist() == scorer.block_table(parent).tolist()

    first, second = (parent, fork) if side == "parent" else (fork, parent)
    untouched = pages_of(scorer, second)
    scorer.append_keys(first, keys(5, seed=1))
    assert torch.equal(pages_of(scorer, second), untouched)
    new_pages = -(-(tokens + 5) // 128) - tokens // 128
    assert scorer.num_free_pages == free - new_pages, "the partial page is copied, full ones are not"
    scorer.append_keys(second, keys(131, seed=2))
    for seq, tail in ((first, keys(5, seed=1)), (second, keys(131, seed=2))):
        assert torch.equal(pages_of(scorer, seq), oracle_pages(torch.cat([keys(tokens), tail])))
    shared = tokens // 128
    assert torch.equal(scorer.block_table(first)[:shared], scorer.block_table(second)[:shared])
    assert not set(scorer.block_table(first)[shared:].tolist()) & set(
        scorer.block_table(second)[shared:].tolist()
    )
    assert_consistent(scorer)


def test_the_last_holder_of_a_partial_page_appends_in_place() -> None:
    scorer = new_scorer()
    parent = filled(scorer, 100)
    fork = scorer.fork_sequence(parent)
    scorer.free_sequence(parent)
    table = scorer.block_table(fork).tolist()
    scorer.append_keys(fork, keys(28, seed=1))
    assert scorer.block_table(fork).tolist() == table
    assert torch.equal(pages_of(scorer, fork), oracle_pages(torch.cat([keys(100), keys(28, seed=1)])))


def test_freed_pages_are_reused_and_never_show_the_old_keys() -> None:
    scorer = new_scorer(3)
    old = filled(scorer, 384)
    scorer.free_sequence(old)
    assert not scorer.pages.any()
    new = filled(scorer, 130, seed=1)
    assert torch.equal(pages_of(scorer, new), oracle_pages(keys(130, seed=1)))
    assert new != old
    with pytest.raises(UnknownSequenceError, match=f"sequence = {old}: not a live sequence"):
        scorer.sequence_length(old)


def test_shared_pages_outlive_the_sequence_that_wrote_them() -> None:
    scorer = new_scorer()
    parent = filled(scorer, 200)
    fork = scorer.fork_sequence(parent)
    scorer.free_sequence(parent)
    assert torch.equal(pages_of(scorer, fork), oracle_pages(keys(200)))
    scorer.free_sequence(fork)
    assert scorer.num_free_pages == 16
    assert_consistent(scorer)


def test_ids_are_never_used_twice() -> None:
    scorer = new_scorer()
    seen = set()
    for _ in range(5):
        seq = scorer.add_sequence()
        fork = scorer.fork_sequence(seq)
        seen |= {seq, fork}
        scorer.free_sequence(fork)
        scorer.free_sequence(seq)
    assert len(seen) == 10


@pytest.mark.parametrize(("forked", "missing"), [(False, 2), (True, 3)])
def test_out_of_pages_leaves_everything_as_it_was(forked: bool, missing: int) -> None:
    scorer = new_scorer(3)
    seq = filled(scorer, 200)
    if forked:
        scorer.fork_sequence(seq)
    before = state_of(scorer)
    with pytest.raises(OutOfPagesError, match=f"{missing} missing; free a sequence") as caught:
        scorer.append_keys(seq, keys(128 * 3 + 56, seed=1))
    assert caught.value.missing == missing
    assert state_of(scorer) == before
    scorer.append_keys(seq, keys(56, seed=1))
    assert torch.equal(pages_of(scorer, seq), oracle_pages(torch.cat([keys(200), keys(56, seed=1)])))


def test_the_copy_of_a_partial_page_counts_as_a_page() -> None:
    scorer = new_scorer(1)
    seq = filled(scorer, 5)
    fork = scorer.fork_sequence(seq)
    before = state_of(scorer)
    with pytest.raises(OutOfPagesError, match="1 more pages are needed and 0 are free, 1 missing"):
        scorer.append_keys(fork, keys(1))
    assert state_of(scorer) == before


def test_a_sequence_ends_at_the_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.cache.MAX_SEQ_LEN", 300)
    scorer = new_scorer()
    seq = filled(scorer, 299)
    before = state_of(scorer)
    with pytest.raises(
        InvalidArgumentError, match=r"k.shape\[0\] = 2: the sequence holds 299 tokens and may hold 300"
    ):
        scorer.append_keys(seq, keys(2))
    assert state_of(scorer) == before
    scorer.append_keys(seq, keys(1))


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("tokens", [1, 128, 200])
def test_a_failing_insert_is_undone(
    monkeypatch: pytest.MonkeyPatch, tokens: int, forked: bool, error: type[BaseException]
) -> None:
    scorer = new_scorer()
    seq = filled(scorer, tokens)
    if forked:
        scorer.fork_sequence(seq)
    before = state_of(scorer)

    def half_done(keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        codes_of(pages)[slots // 128, slots % 128] = 0xEE
        scales_of(pages)[slots[::2] // 128, slots[::2] % 128] = 0xEE
        raise error("injected")

    with monkeypatch.context() as patch:
        patch.setattr(scorer._backend, "insert", half_done)
        named = error is MemoryError
        with pytest.raises(
            InvalidArgumentError if named else error,
            match=r"k.shape\[0\] = 300: inserting them needs more memory" if named else "injected",
        ):
            scorer.append_keys(seq, keys(300, seed=1))
    assert state_of(scorer) == before
    scorer.append_keys(seq, keys(300, seed=1))
    assert torch.equal(pages_of(scorer, seq), oracle_pages(torch.cat([keys(tokens), keys(300, seed=1)])))


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 255, 256, 300])
@pytest.mark.parametrize("forked", [False, True])
def test_a_truncated_sequence_has_its_first_keys(length: int, forked: bool) -> None:
    """A fork keeps all; what is appended afterwards follows the keys that are left."""
    scorer = new_scorer()
    seq = filled(scorer, 300)
    fork = scorer.fork_sequence(seq) if forked else None
    scorer.truncate_sequence(seq, length)
    assert scorer.sequence_length(seq) == length
    assert torch.equal(pages_of(scorer, seq), oracle_pages(keys(300)[:length]))
    assert_consistent(scorer)
    scorer.append_keys(seq, keys(90, seed=1))
    assert torch.equal(pages_of(scorer, seq), oracle_pages(torch.cat((keys(300)[:length], keys(90, seed=1)))))
    if fork is not None:
        assert torch.equal(pages_of(scorer, fork), oracle_pages(keys(300)))
    assert_consistent(scorer)


@pytest.mark.parametrize(
    ("length", "message"),
    [(-1, "length = -1: must be 0 to 300"), (301, "length = 301"), (1.5, "length = 1.5")],
)
def test_wrong_truncations_are_refused(length: int, message: str) -> None:
    scorer = new_scorer()
    seq = filled(scorer, 300)
    before = state_of(scorer)
    with pytest.raises(InvalidArgumentError, match=message):
        scorer.truncate_sequence(seq, length)
    with pytest.raises(UnknownSequenceError):
        scorer.truncate_sequence(7, 0)
    assert state_of(scorer) == before


def test_a_truncation_that_needs_a_page_and_has_none_changes_nothing() -> None:
    scorer = new_scorer(2)
    seq = filled(scorer, 200)
    scorer.fork_sequence(seq)
    before = state_of(scorer)
    with pytest.raises(OutOfPagesError):
        scorer.truncate_sequence(seq, 150)
    assert state_of(scorer) == before
    scorer.truncate_sequence(seq, 128)  # whole blocks stay shared
    assert scorer.block_table(seq).tolist() == [0]


def test_a_truncation_that_has_begun_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroing fails once: the keys are dropped, and the error is raised."""
    scorer = new_scorer(5)
    seq = filled(scorer, 300)
    zero, failures = scorer._cache._zero, [RuntimeError("injected")]

    def failing(pages: list[int]) -> None:
        zero(pages)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(scorer._cache, "_zero", failing)
    with pytest.raises(RuntimeError, match="injected"):
        scorer.truncate_sequence(seq, 100)
    assert scorer.sequence_length(seq) == 100
    assert torch.equal(pages_of(scorer, seq), oracle_pages(keys(100)))
    assert_consistent(scorer)


def test_appends_to_many_sequences_are_all_or_nothing() -> None:
    """Too few pages for the last, a key that is not finite, lengths that do not add up."""
    scorer = new_scorer(5)
    one = filled(scorer, 100)
    two, three = scorer.fork_sequence(one), scorer.add_sequence()
    before = state_of(scorer)
    with pytest.raises(OutOfPagesError):  # a copy for one of the sharers, and four pages: four are free
        scorer.append_keys([one, two, three], keys(405, seed=1), [10, 10, 385])
    assert state_of(scorer) == before
    scorer.append_keys([one, two, three], keys(404, seed=1), [10, 10, 384])
    assert scorer.num_free_pages == 0
    bad = keys(3)
    bad[2, 5] = torch.nan
    scorer = new_scorer(5)
    one, two = filled(scorer, 100), scorer.add_sequence()
    before = state_of(scorer)
    with pytest.raises(InvalidArgumentError, match=r"k\[2, 5\] = nan"):
        scorer.append_keys([one, two], bad, [1, 2])
    for seqs, lens, message in (
        ([one, two], [1, 1], "lens = .1, 1.: must add up to k.shape.0. = 3"),
        ([one, two], [4, -1], "lens = .4, -1.: must be 2 numbers, 0 or more"),
        ([one, one], [1, 2], "seq = .0, 0.: names a sequence twice"),
        ([one, two], [1], "lens = .1.: must be 2 numbers"),
        ([one, two], None, "lens = .1, 1.: must add up"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            scorer.append_keys(seqs, keys(3), lens)
    with pytest.raises(UnknownSequenceError):
        scorer.append_keys([one, 9], keys(2))
    assert state_of(scorer) == before


def test_sharers_of_a_partial_page_append_together() -> None:
    """The last sharer keeps the page, the others get copies."""
    scorer = new_scorer(8)
    one = filled(scorer, 100)
    two, three = scorer.fork_sequence(one), scorer.fork_sequence(one)
    scorer.append_keys([two, one, three], keys(150, seed=1), [40, 10, 100])
    added = dict(zip((two, one, three), torch.split(keys(150, seed=1), [40, 10, 100])))
    for seq, new in added.items():
        assert torch.equal(pages_of(scorer, seq), oracle_pages(torch.cat((keys(100), new))))
    assert scorer.block_table(three)[0] == 0
    assert_consistent(scorer)


def test_block_tables_follow_every_change() -> None:
    """On the device, after appends, forks, copies, truncation and frees; -1 past a sequence's blocks."""
    scorer = new_scorer(12)
    one, two = filled(scorer, 300), filled(scorer, 10)

    def check() -> None:
        live = scorer.sequences
        tables = scorer.block_tables(live)
        for row, seq in zip(tables, live):
            table = scorer.block_table(seq)
            assert row[: len(table)].tolist() == table.tolist()
            assert bool((row[len(table) :] == -1).all())
        wide = torch.full((len(live) + 1, 20), 7, dtype=torch.int32)  # wider than the cache has pages
        assert scorer.block_tables(live, out=wide) is wide
        assert torch.equal(wide[:-1, : tables.shape[1]], tables)
        assert bool((wide[:-1, tables.shape[1] :] == -1).all())
        assert bool((wide[-1] == 7).all())

    check()
    fork = scorer.fork_sequence(one)
    scorer.append_keys([fork, two], keys(200), [100, 100])
    check()
    scorer.truncate_sequence(fork, 40)
    check()
    scorer.append_keys(fork, keys(130))
    scorer.free_sequence(one)
    check()
    three = filled(scorer, 129)  # on the row of the freed one
    check()
    out = torch.full((4, 6), 9, dtype=torch.int32)
    assert scorer.block_tables([three, two], out=out) is out
    assert out[0].tolist() == [*scorer.block_table(three).tolist(), -1, -1, -1, -1]
    assert bool((out[2:] == 9).all())
    with pytest.raises(InvalidArgumentError, match=r"out.shape = \(1, 6\): must be at least \[2, 2\]"):
        scorer.block_tables([three, two], out=out[:1])


def test_kept_block_tables_are_never_stale_nor_the_callers() -> None:
    """The tables of the last call are kept: a change of any of its sequences, or of their order, shows."""
    scorer = new_scorer(12)
    one, two = filled(scorer, 128), filled(scorer, 128)
    queries = torch.randn(2, 4, 128, generator=torch.Generator().manual_seed(5))

    def check(*sequences: int) -> None:
        expected = [scorer.block_table(seq).tolist() for seq in sequences]
        for _ in range(2):  # the second is of the kept tables
            tables = scorer.block_tables(list(sequences))
            assert [[i for i in row if i >= 0] for row in tables.tolist()] == expected
            tables.fill_(11)
        result = scorer.score(queries, list(sequences), local_blocks=0)
        assert result.scores is not None
        for row, seq in enumerate(sequences):
            alone = scorer.score(queries[row : row + 1], [seq], local_blocks=0).scores
            assert alone is not None
            assert torch.equal(result.scores[:, row, : alone.shape[2]], alone[:, 0])
        scorer.block_tables(list(sequences))

    check(one, two)
    check(two, one)
    scorer.append_keys(two, keys(1))  # a block more
    check(two, one)
    scorer.truncate_sequence(two, 128)
    scorer.append_keys(one, keys(1))  # that block is now the other's
    check(two, one)
    scorer.free_sequence(two)
    two = filled(scorer, 257)  # on the row of the freed one
    check(two, one)


def interrupted_at(line: int, operation: Callable[[], object]) -> bool:
    """Run an operation and interrupt it before the given line that it reaches in our packages."""
    reached = 0
    rooms = (str(ROOT / "indexer"), str(ROOT / "kernel"))

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal reached
        if not frame.f_code.co_filename.startswith(rooms):
            return None
        if event == "line":
            reached += 1
            if reached == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(outer)
    return False


MORE = keys(130, seed=1)
OPERATIONS: dict[str, Callable[[IndexScorer, int], object]] = {
    "add": lambda scorer, _: scorer.add_sequence(),
    "append": lambda scorer, seq: scorer.append_keys(seq, MORE),
    "fork": lambda scorer, seq: scorer.fork_sequence(seq),
    "free": lambda scorer, seq: scorer.free_sequence(seq),
    "append to two": lambda scorer, seq: scorer.append_keys(
        [scorer.sequences[-1], scorer.sequences[0]] if seq != scorer.sequences[-1] else [seq],
        MORE,
        [70, 60] if seq != scorer.sequences[-1] else [130],
    ),
    "truncate": lambda scorer, seq: scorer.truncate_sequence(seq, 70),
    "truncate to nothing": lambda scorer, seq: scorer.truncate_sequence(seq, 0),
}


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_at_any_line_leaves_the_state_before_or_after(operation: str, forked: bool) -> None:
    """And where it is the state before, the same scorer goes on."""

    def prepared() -> tuple[IndexScorer, int]:
        scorer = new_scorer(5)
        seq = filled(scorer, 200)
        if forked:
            scorer.fork_sequence(seq)
        return scorer, seq

    scorer, seq = prepared()
    before = state_of(scorer)
    OPERATIONS[operation](scorer, seq)
    after = state_of(scorer)
    line, undone = 0, 0
    scorer, seq = prepared()
    while True:
        line += 1
        interrupted = interrupted_at(line, lambda: OPERATIONS[operation](scorer, seq))  # noqa: B023
        state = state_of(scorer)
        assert state in (before, after), f"interrupted at line {line}"
        undone += state == before
        assert_consistent(scorer)
        if not interrupted:
            break
        if state != before or scorer._lock._is_owned():  # type: ignore[attr-defined]
            # A tracer can interrupt even between the last line of a with block and its exit.
            scorer, seq = prepared()
    assert undone >= 5, "the interrupts did not reach the operation"
    assert line > undone


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("failures", [1, 2])
def test_a_free_that_fails_leaves_no_live_sequence_without_keys(
    monkeypatch: pytest.MonkeyPatch, failures: int, forked: bool
) -> None:
    """Zeroing fails after it zeroed, once, or for good."""
    scorer = new_scorer(5)
    seq, other = filled(scorer, 200), filled(scorer, 5, seed=1)
    fork = scorer.fork_sequence(seq) if forked else None
    if fork is not None:
        scorer.append_keys(fork, keys(3))
    zero, left = scorer._cache._zero, failures

    def failing(pages: list[int]) -> None:
        nonlocal left
        zero(pages)
        if left:
            left -= 1
            raise RuntimeError("injected")

    monkeypatch.setattr(scorer._cache, "_zero", failing)
    with pytest.raises(RuntimeError, match="injected"):
        scorer.free_sequence(seq)
    with pytest.raises(UnknownSequenceError):
        scorer.sequence_length(seq)
    assert torch.equal(pages_of(scorer, other), oracle_pages(keys(5, seed=1)))
    assert not scorer.pages[list(scorer._cache.allocator.free_pages)].any()
    if failures == 1:
        assert_consistent(scorer)
    if fork is not None:
        assert torch.equal(pages_of(scorer, fork), oracle_pages(torch.cat([keys(200), keys(3)])))
        scorer.free_sequence(fork)
    scorer.free_sequence(other)
    own = 1 if forked else 2
    assert scorer.num_free_pages == (5 if failures == 1 else 5 - own), "shared pages are not lost"


def test_pages_are_where_the_scorer_says() -> None:
    scorer = new_scorer(4)
    assert (scorer.pages.shape, scorer.pages.dtype) == ((4, PAGE_BYTES), torch.uint8)
    seq = filled(scorer, 257)
    table = scorer.block_table(seq)
    assert (table.dtype, table.tolist()) == (torch.int32, [0, 1, 2])
    table.fill_(-1)
    assert scorer.block_table(seq).tolist() == [0, 1, 2], "the table given out is a copy"
    assert scorer.sequences == (seq,)


# The page allocator: all or nothing, in a fixed order, and never a page freed twice.


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


# The memory of the host, and of the container around it.

HOST = torch.device("cpu")


def test_the_host_s_memory_is_at_most_what_the_system_reports() -> None:
    assert 0 < memory_bytes(HOST) <= psutil.virtual_memory().total


@pytest.mark.parametrize(("text", "limited"), [("12345\n", True), ("max\n", False), (None, False)])
def test_a_container_s_limit_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, limited: bool
) -> None:
    limit = tmp_path / "memory.max"
    if text is not None:
        limit.write_text(text)
    monkeypatch.setattr("indexer.cache._CONTAINER_LIMITS", (limit,))
    assert (memory_bytes(HOST) == 12345) == limited
    assert limited or memory_bytes(HOST) == psutil.virtual_memory().total
