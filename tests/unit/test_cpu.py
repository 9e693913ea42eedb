"""A row's bits depend on its query and its keys alone: not on neighbours, chunks, tiles, threads or the path.

All on inexact values, where another order of summation shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel import threads as cpu_threads
from kernel.backends import cpu
from kernel.backends.base import Order, Precision
from kernel.backends.cpu import CpuBackend, topk
from kernel.backends.cpu import backend as cpu_module
from kernel.backends.cpu.plan import Layout
from kernel.checks import checked_batch
from kernel.contract import PAGE_BYTES
from kernel.errors import InvalidArgumentError
from kernel.nvfp4 import build_lut, quantize_query
from kernel.step import Lengths, PlanHeader, Step
from kernel.threads import HELPER_NAME, on_one_thread, run_tasks
from tests.support.calls import Call, cumulative, random_call, strided_pages
from tests.support.compare import (
    assert_same_bits,
    assert_within_bounds,
    oracle_scores,
    scores_of,
    selection_of,
    topk_of,
)

LENGTHS = [(5000, 700), (2305, 3), (1, 1), (0, 0), (640, 17), (129, 129)]


def one_request(call: Call, row: int, first: int, last: int) -> Call:
    """Queries ``first`` to ``last`` of a request, alone, with only the keys up to the last of them."""
    start = int(call.cu_seqlens_q[row])
    prefix = int(call.seq_lens[row]) - (int(call.cu_seqlens_q[row + 1]) - start)
    return dataclasses.replace(
        call,
        q=call.q[start + first : start + last],
        block_table=call.block_table[row : row + 1],
        cu_seqlens_q=cumulative([last - first]),
        seq_lens=torch.tensor([prefix + last], dtype=torch.int32),
    )


@pytest.fixture
def cpu_backend() -> CpuBackend:
    return CpuBackend()


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_inexact_values_are_within_the_bound(cpu_backend: CpuBackend) -> None:
    call = random_call([(900, 100), (2305, 3)], values="inexact")
    assert_within_bounds(scores_of(cpu_backend, call), call, "exact")


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_batch_neighbours_and_split_points(cpu_backend: CpuBackend, heads: int) -> None:
    call = random_call(LENGTHS, heads, values="inexact", seed=heads)
    together = scores_of(cpu_backend, call)
    random = torch.Generator().manual_seed(heads)
    splits = sorted({0, 700, 1, *torch.randint(2, 700, (6,), generator=random).tolist()})
    for first, last in itertools.pairwise(splits):
        alone = scores_of(cpu_backend, one_request(call, 0, first, last))
        assert_same_bits(alone, together[:, first:last, : alone.shape[2]])
        assert bool((together[:, first:last, alone.shape[2] :] == -torch.inf).all())
    row = scores_of(cpu_backend, one_request(call, 1, 1, 2))
    assert_same_bits(row, together[:, 701:702, : row.shape[2]])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 15, 16, 17, 31, 33, 49, 63, 65, 127, 200, 257, 511, 513, 1025])
def test_every_tile_width(cpu_backend: CpuBackend, rows: int) -> None:
    """Rows of one call of each size against the same rows scored one at a time."""
    call = random_call([(1300, rows)], 1, values="inexact", seed=rows)
    together = scores_of(cpu_backend, call)
    for place in {0, rows // 3, rows - 1}:
        alone = scores_of(cpu_backend, one_request(call, 0, place, place + 1))
        assert_same_bits(alone, together[:, place : place + 1, : alone.shape[2]])


def test_chunks_and_groups(cpu_backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(LENGTHS, values="inexact").forcing(1, 2)
    scores = scores_of(cpu_backend, call)
    monkeypatch.setattr(cpu_module, "CHUNK_ROWS", 52)
    monkeypatch.setattr(cpu_module, "MAX_GROUP_BLOCKS", 5)
    assert_same_bits(scores_of(CpuBackend(), call), scores)


def test_threads(cpu_backend: CpuBackend, threads: None) -> None:
    call = random_call(LENGTHS, values="inexact")
    results = []
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        results.append((scores_of(cpu_backend, call), selection_of(cpu_backend, call, 16)))
    for scores, selection in results[1:]:
        assert_same_bits(scores, results[0][0])
        assert_same_bits(selection, results[0][1])


@pytest.mark.parametrize("order", ["score", "block"])
@pytest.mark.parametrize("k", [1, 16, 64])
def test_select_is_score_then_topk(
    cpu_backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, order: Order, k: int
) -> None:
    call = random_call(LENGTHS, values="inexact").forcing(2, 1)
    expected = topk_of(
        cpu_backend, scores_of(cpu_backend, call), call.batch().num_blocks_per_query(), k, order
    )
    for pending in (32, 40, 256):
        monkeypatch.setattr(topk, "_PENDING_BLOCKS", pending)
        assert_same_bits(selection_of(cpu_backend, call, k, order), expected)


def test_float64_where_float32_tiles_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every float64 sum is exact, so the scores are the oracle's after rounding to float32, all bits."""
    monkeypatch.setattr(cpu_module, "_agrees", lambda *_: False)
    cpu_module.agreeing_shapes.cache_clear()
    try:
        fallback = CpuBackend()
        assert cpu_module.agreeing_shapes()[0] == torch.float64
    finally:
        cpu_module.agreeing_shapes.cache_clear()
    call = random_call(LENGTHS[1:], values="inexact").forcing(0, 1)
    exact = scores_of(fallback, call)
    assert_within_bounds(exact, call, "exact")
    for row in range(4):
        if call.seq_lens[row]:
            alone = scores_of(fallback, one_request(call, row, 0, 1))
            start = int(call.cu_seqlens_q[row])
            assert_same_bits(alone, exact[:, start : start + 1, : alone.shape[2]])


def test_a_narrow_width_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    agrees = cpu_module._agrees

    def only_wide(keys: torch.Tensor, queries: torch.Tensor, product: torch.Tensor) -> bool:
        return queries.shape[0] >= 128 and agrees(keys, queries, product)

    monkeypatch.setattr(cpu_module, "_agrees", only_wide)
    cpu_module.agreeing_shapes.cache_clear()
    try:
        tiles = cpu_module.RowTiles()
    finally:
        cpu_module.agreeing_shapes.cache_clear()
    assert min(tiles.widths) >= 128
    queries = torch.zeros(3, 128).to(torch.float8_e4m3fn)
    assert [tile.queries.shape[1] for tile in tiles.split(queries, 0, 1)] == [min(tiles.widths)]


# Tasks on threads: each operation on the thread that calls it, and nothing left behind.


def test_tasks_run_once_each_on_threads_of_one_thread(threads: None) -> None:
    """Helpers take tasks too; numbers of threads are as before, for this thread and for new ones."""
    torch.set_num_threads(3)
    seen: list[tuple[int, int, int]] = []
    together = threading.Barrier(3, timeout=30)

    def task(number: int, _: None) -> None:
        if number < 3:
            together.wait()
        seen.append((number, torch.get_num_threads(), threading.get_ident()))

    with on_one_thread() as count:
        run_tasks((partial(task, number) for number in range(20)), lambda: None, count)
    assert sorted(number for number, _, _ in seen) == list(range(20))
    assert {used for _, used, _ in seen} == {1}
    assert len({thread for _, _, thread in seen}) == 3
    assert torch.get_num_threads() == 3
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 3
    assert not [thread for thread in threading.enumerate() if thread.name == HELPER_NAME]


@pytest.mark.parametrize("where", ["here", "helper"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_error_of_a_task_ends_the_call(where: str, error: type[BaseException]) -> None:
    """It is raised here after all threads have ended; no further task is begun."""
    begun, ended = [], []
    together = threading.Barrier(2, timeout=30)

    def task(number: int, _: None) -> None:
        begun.append(number)
        together.wait()
        if (threading.current_thread() is threading.main_thread()) == (where == "here"):
            raise error(number)
        time.sleep(0.05)
        ended.append(number)

    with pytest.raises(error):
        run_tasks((partial(task, number) for number in range(9)), lambda: None, 2)
    assert sorted(begun) == [0, 1]
    assert len(ended) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == HELPER_NAME]


def test_tasks_run_here_where_the_system_has_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    done: list[int] = []
    run_tasks((lambda _, number=number: done.append(number) for number in range(5)), lambda: None, 4)  # type: ignore[misc]
    assert done == list(range(5))


def test_without_the_setters_operations_take_their_threads(
    cpu_backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    torch.set_num_threads(2)
    call = random_call([(640, 17), (700, 300)], values="inexact")
    expected = scores_of(cpu_backend, call), selection_of(cpu_backend, call, 16)
    monkeypatch.setattr(cpu_threads, "_setters", lambda: None)
    with on_one_thread() as count:
        assert (count, torch.get_num_threads()) == (1, 2)
    assert_same_bits(scores_of(cpu_backend, call), expected[0])
    assert_same_bits(selection_of(cpu_backend, call, 16), expected[1])


def test_tile_batches_spread_over_threads(cpu_backend: CpuBackend, threads: None) -> None:
    """Decode requests enough for several tasks, in inference mode, whose tensors only it may write."""
    call = random_call([(1300 + 100 * row, 1) for row in range(40)], 4, values="inexact").forcing(1, 1)
    batch, ids = call.batch(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        layout = Layout.of(
            Lengths.of(batch.requests), PlanHeader.of(Step.of(batch)), 60, cpu_module.ROW_WIDTHS, count
        )
        assert (len(layout.tile_batches) == 1) == (count == 1)
        with torch.inference_mode():
            block_ids = torch.empty(4, 40, 16, dtype=torch.int32)
            cpu_backend.select(batch, block_ids, "score")
            scores = torch.empty(4, 40, batch.num_score_blocks)
            cpu_backend.score(batch, scores)
        ids.append((block_ids, scores))
    assert_same_bits(ids[0][0], ids[1][0])
    assert_same_bits(ids[0][1], ids[1][1])


# What the cpu backend must not do: work that no row sees, memory that grows, addresses that wrap.


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the bytes of the largest storage that an operation returns, but those it is told to ignore."""

    def __init__(self, *ignored: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest: int = 0
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._ignored:
                    self.largest = max(self.largest, storage.nbytes())
        return result


def long_call(blocks: int, queries: int, heads: int = 4, num_pages: int = 64) -> Call:
    """A call whose context reads the same few pages again and again."""
    generator = torch.Generator().manual_seed(blocks)
    return Call(
        q=quantize_query(torch.randn(queries, heads, 128, generator=generator)),
        pages=torch.randint(0, 256, (num_pages, PAGE_BYTES), dtype=torch.uint8, generator=generator),
        block_table=torch.randint(0, num_pages, (1, blocks), generator=generator, dtype=torch.int32),
        cu_seqlens_q=cumulative([queries]),
        seq_lens=torch.tensor([blocks * 128], dtype=torch.int32),
    )


def largest_tensor_of_select(blocks: int, queries: int) -> int:
    call = long_call(blocks, queries)
    batch = call.batch()
    block_ids = torch.empty((4, queries, 16), dtype=torch.int32)
    backend, recorder = CpuBackend(), LargestTensor(call.pages)
    with recorder:
        backend.select(batch, block_ids, "score")
    return recorder.largest


def test_select_memory_does_not_grow_with_the_context() -> None:
    batch, small, large = (largest_tensor_of_select(blocks, 16) for blocks in (1024, 1100, 1700))
    assert small == large
    assert max(large, batch) <= 4 << 20


def test_select_memory_does_not_grow_with_the_queries() -> None:
    small, large = (largest_tensor_of_select(40, queries) for queries in (1024, 3000))
    assert large <= small + 3000 * 4 * 128 * 4  # the queries given


def test_only_blocks_that_a_tile_sees_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first prefill of 2,048 tokens: about half of the blocks, counted in tokens times rows."""
    multiplied: list[int] = []
    write = cpu_module.TileMaxima.write

    def counting(
        self: cpu_module.TileMaxima,
        tile: cpu_module.RowTile,
        keys: torch.Tensor,
        first_position: int,
        out: torch.Tensor,
    ) -> None:
        multiplied.append(keys.shape[0] * tile.queries.shape[1])
        assert first_position <= tile.last_position
        assert first_position + keys.shape[0] - 128 <= tile.last_position
        write(self, tile, keys, first_position, out)

    monkeypatch.setattr(cpu_module.TileMaxima, "write", counting)
    call = long_call(16, 2048)
    scores_of(CpuBackend(), call)
    visible = int(call.batch().num_blocks_per_query().sum()) * 128 * 4
    assert sum(multiplied) == visible


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_short_requests_share_all_operations_but_their_products() -> None:
    """Of 30 requests instead of 2, of which all blocks fit one group: 28 products and their views more."""
    backend, counts = CpuBackend(), []
    for requests in (2, 30):
        call = random_call([(100, 3)] * requests)
        q, pages = call.q, call.pages
        plan = backend.plan(Step.of(call.forcing(1, 1).batch()))
        with Operations() as operations:
            backend.select_plan(plan, q, pages, torch.empty(4, 3 * requests, 16, dtype=torch.int32))
            backend.score_plan(plan, q, pages, torch.empty(4, 3 * requests, 2))
        counts.append(operations.counts)
    more = counts[1] - counts[0]
    assert more.pop("aten.mm.out") == 2 * 28
    assert set(more) == {"aten.slice.Tensor", "aten.view.default"}


def test_requests_of_one_tile_and_longer_ones_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several widths, too wide, padded too much, too long for a tile batch: all rows in their places."""
    monkeypatch.setattr("kernel.backends.cpu.plan.TILE_BATCH_CELLS", 1 << 14)
    lengths = [
        (600, 520),
        (300, 3),
        (300, 128),
        (4300, 80),
        (129, 1),
        (4500, 120),
        (40, 8),
        (0, 0),
        (260, 33),
    ]
    call = random_call(lengths, 4, values="inexact").forcing(1, 1)
    step = Step.of(call.batch())
    layout = Layout.of(Lengths.of(call.batch().requests), PlanHeader.of(step), 40, cpu_module.ROW_WIDTHS, 1)
    assert sorted(tiles.width for tiles in layout.tile_batches) == [16, 32, 256, 512]
    assert [request.table_row for request in layout.longer] == [0, 3, 5]
    backend = CpuBackend()
    together, ids = scores_of(backend, call), selection_of(backend, call, 16)
    for row, (_, query_len) in enumerate(lengths):
        start = int(call.cu_seqlens_q[row])
        for place in {0, query_len // 2, query_len - 1} if query_len else ():
            alone = one_request(call, row, place, place + 1)
            scores, rows = scores_of(backend, alone), slice(start + place, start + place + 1)
            assert_same_bits(scores, together[:, rows, : scores.shape[2]])
            assert_same_bits(selection_of(backend, alone, 16), ids[:, rows])


def test_page_offsets_past_32_bits() -> None:
    """Pages 2 GiB apart, of which only those used are ever touched."""
    call = random_call([(700, 3), (200, 200)], values="exact", seed=5)
    used = call.block_table[0, :6].tolist() + call.block_table[1, :2].tolist()
    far = torch.empty(9 << 31, dtype=torch.uint8).as_strided((9, PAGE_BYTES), (1 << 31, 1))
    table = call.block_table.clone()
    for place, page_id in enumerate(used):
        far[8 - place] = call.pages[page_id]
        table[0, :6][call.block_table[0, :6] == page_id] = 8 - place
        table[1, :2][call.block_table[1, :2] == page_id] = 8 - place
    backend = CpuBackend()
    moved = Call(call.q, far, table, call.cu_seqlens_q, call.seq_lens)
    assert_same_bits(scores_of(backend, moved), oracle_scores(call))
    keys = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    near = strided_pages(9, PAGE_BYTES)
    slots = torch.tensor([8 * 128 + 127, -1, 7 * 128])
    backend.insert(keys, near, slots)
    backend.insert(keys, far, slots)
    assert torch.equal(far[8, 127 * 64 : 8192], near[8, 127 * 64 : 8192])
    assert torch.equal(far[8, -8:], near[8, -8:])
    assert torch.equal(far[7, :64], near[7, :64])


@pytest.mark.parametrize("slot", [9 * 128, 1 << 40])
def test_insert_refuses_a_slot_past_the_pages_and_writes_nothing(slot: int) -> None:
    pages = strided_pages(9, PAGE_BYTES)
    with pytest.raises(InvalidArgumentError, match=f"slots = {slot}"):
        CpuBackend().insert(torch.ones(2, 128), pages, torch.tensor([0, slot]))
    assert not bool(pages.any())


def test_insert_of_nothing() -> None:
    pages = strided_pages(2, PAGE_BYTES)
    CpuBackend().insert(torch.ones(2, 128), pages, torch.tensor([-1, -(1 << 40)]))
    CpuBackend().insert(torch.ones(0, 128), pages, torch.empty(0, dtype=torch.int64))
    assert not bool(pages.any())


def test_score_buffers_of_other_strides() -> None:
    call = random_call([(700, 3), (0, 0), (200, 200)], values="inexact").forcing(1, 1)
    backend, batch = CpuBackend(), call.batch()
    scores = scores_of(backend, call, columns=9)
    token_major = torch.full((203, 4, 11), torch.nan)
    backend.score(batch, token_major.transpose(0, 1)[:, :, 1:10])
    assert_same_bits(token_major.transpose(0, 1)[:, :, 1:10], scores)
    assert bool(token_major[:, :, (0, 10)].isnan().all())


def test_a_nan_query_harms_its_row_alone() -> None:
    call = random_call([(700, 30)], values="inexact")
    clean = scores_of(CpuBackend(), call)
    call.q.view(torch.uint8)[4, 2, 77] = 0x7F
    harmed = scores_of(CpuBackend(), call)
    assert bool(harmed[2, 4].isnan().any())
    harmed[2, 4] = clean[2, 4]
    assert_same_bits(harmed, clean)


@pytest.mark.parametrize("queries", [[], [0], [0, 0]])
def test_batches_without_rows(queries: list[int]) -> None:
    batch = checked_batch(
        torch.empty(0, 4, 128).to(torch.float8_e4m3fn),
        strided_pages(1, PAGE_BYTES),
        torch.empty(len(queries), 0, dtype=torch.int32),
        cumulative(queries),
        torch.tensor([5 * 128 * row for row in range(len(queries))], dtype=torch.int32),
        lut=build_lut("cpu"),
        num_heads=4,
        init_blocks=0,
        local_blocks=1,
    )
    scores, block_ids = torch.empty(4, 0, 3), torch.empty(4, 0, 16, dtype=torch.int32)
    CpuBackend().score(batch, scores)
    CpuBackend().select(batch, block_ids, "score")


@pytest.mark.parametrize(("device", "precision"), [("cuda", "exact"), ("cpu:1", "exact"), (None, "half")])
def test_create_refuses(device: str | None, precision: Precision) -> None:
    with pytest.raises(InvalidArgumentError, match=r"device|precision"):
        cpu.create(device, precision)


def test_fast_is_exact_here() -> None:
    call = random_call([(300, 20)], values="inexact")
    assert_same_bits(scores_of(cpu.create(None, "fast"), call), scores_of(cpu.create("cpu", "exact"), call))
    assert cpu.create(None, "fast").precision == "fast"
    assert_same_bits(
        selection_of(cpu.create(None, "fast"), call, 3), selection_of(cpu.create(None, "exact"), call, 3)
    )


# The cpu backend's top-k against sorting rows one by one.

SPECIAL = torch.tensor([0.0, -0.0, torch.nan, -torch.nan, -torch.inf, torch.inf, 1e29, 1e30, 1e-45, -1e-45])


def by_sorting(scores: torch.Tensor, num_blocks: torch.Tensor, k: int, order: Order) -> torch.Tensor:
    ids = torch.full((*scores.shape[:2], k), -1, dtype=torch.int32)
    for head in range(scores.shape[0]):
        for token in range(scores.shape[1]):
            row = scores[head, token, : int(num_blocks[token])].tolist()
            ranked = sorted(
                range(len(row)),
                key=lambda block: (math.inf if math.isnan(row[block]) else -row[block], block),
            )
            found = ranked[:k] if order == "score" else sorted(ranked[:k])
            ids[head, token, : len(found)] = torch.tensor(found, dtype=torch.int32)
    return ids


def rows_of_ties(heads: int, tokens: int, blocks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Few distinct scores, special values among them, and garbage past each row's blocks."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.cat((SPECIAL, torch.tensor([-3.0, -2.5, 1.0, 1.0000001, 2.0, 3e38, -3e38])))
    scores = values[torch.randint(0, len(values), (heads, tokens, blocks), generator=generator)]
    num_blocks = torch.randint(0, blocks + 1, (tokens,), generator=generator, dtype=torch.int32)
    return scores, num_blocks


@pytest.mark.parametrize("order", ["score", "block"])
@pytest.mark.parametrize("k", [1, 2, 15, 16, 17, 63, 64])
def test_ties_and_special_values(k: int, order: Order) -> None:
    scores, num_blocks = rows_of_ties(2, 30, 70, seed=k)
    ids = torch.full((2, 30, k), -7, dtype=torch.int32)
    CpuBackend().topk(scores, num_blocks, ids, order)
    assert_same_bits(ids, by_sorting(scores, num_blocks, k, order))


def test_cells_past_the_blocks_are_not_read() -> None:
    scores, num_blocks = rows_of_ties(4, 20, 40, seed=1)
    results = []
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        filled = scores.where(torch.arange(40) < num_blocks[:, None], garbage)
        ids = torch.full((4, 20, 16), -7, dtype=torch.int32)
        CpuBackend().topk(filled, num_blocks, ids, "score")
        results.append(ids)
    assert all(torch.equal(ids, results[0]) for ids in results)


def test_rows_of_minus_infinity_still_have_their_blocks() -> None:
    scores = torch.full((1, 2, 5), -torch.inf)
    scores[0, 1] = torch.nan
    ids = torch.empty((1, 2, 6), dtype=torch.int32)
    CpuBackend().topk(scores, torch.tensor([3, 5], dtype=torch.int32), ids, "score")
    assert ids.tolist() == [[[0, 1, 2, -1, -1, -1], [0, 1, 2, 3, 4, -1]]]


@pytest.mark.parametrize("order", ["score", "block"])
def test_strided_scores_and_ids_in_chunks(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    monkeypatch.setattr(topk, "_CHUNK_CELLS", 97)
    scores, num_blocks = rows_of_ties(4, 33, 50, seed=2)
    wide_scores = torch.full((33, 4, 80), torch.nan)
    wide_scores[..., :50] = scores.transpose(0, 1)
    wide_ids = torch.full((33, 2, 4, 40), -7, dtype=torch.int32)
    ids = wide_ids[:, 1, :, 4:36:2].transpose(0, 1)
    CpuBackend().topk(wide_scores.transpose(0, 1), num_blocks, ids, order)
    assert_same_bits(ids, by_sorting(scores, num_blocks, 16, order))
    untouched = wide_ids.clone()
    untouched[:, 1, :, 4:36:2] = -7
    assert bool((untouched == -7).all())


@pytest.mark.parametrize("shape", [(4, 0, 8), (1, 3, 0), (2, 3, 8)])
def test_rows_without_blocks(shape: tuple[int, int, int]) -> None:
    ids = torch.full((*shape[:2], 16), -7, dtype=torch.int32)
    CpuBackend().topk(torch.zeros(shape), torch.zeros(shape[1], dtype=torch.int32), ids, "block")
    assert bool((ids == -1).all())


@pytest.mark.parametrize("pending", [7, 16, 256])
def test_running_selection(monkeypatch: pytest.MonkeyPatch, pending: int) -> None:
    monkeypatch.setattr(topk, "_PENDING_BLOCKS", pending)
    scores, num_blocks = rows_of_ties(1, 40, 100, seed=3)
    num_blocks[0] = 100
    parts = [(first, scores[0, :, first : first + 7].t()) for first in range(0, 100, 7)]
    running = topk.RunningTopk(num_blocks, 16)
    for part in parts[::-1]:
        running.add(*part)
    assert_same_bits(running.block_ids("score")[None], by_sorting(scores, num_blocks, 16, "score"))


def test_a_selection_shared_by_threads() -> None:
    """Parts in any order, several taken in at a time: one thread gets the selection of all."""
    scores, num_blocks = rows_of_ties(1, 40, 200, seed=4)
    num_blocks[0] = 200
    parts = [(first, scores[0, :, first : first + 3].t()) for first in range(0, 200, 3)]
    shared = topk.SharedTopk(num_blocks, 16, len(parts))
    with ThreadPoolExecutor(4) as pool:
        found = [one for one in pool.map(lambda part: shared.add([part]), parts) if one is not None]
    (selection,) = found
    assert_same_bits(selection.block_ids("score")[None], by_sorting(scores, num_blocks, 16, "score"))


@pytest.mark.parametrize("order", ["score", "block"])
@pytest.mark.parametrize("blocks", [1, 7, 16, 17, 70])
def test_rows_of_few_and_many_blocks(blocks: int, order: Order) -> None:
    scores, num_blocks = rows_of_ties(1, 200, blocks, seed=blocks)
    cleared = scores[0].masked_fill(torch.arange(blocks) >= num_blocks[:, None], -torch.inf)
    for k in (1, 7, 16, 64):
        found = topk.select_rows(cleared, num_blocks.long(), k, order)
        assert_same_bits(found[None], by_sorting(scores, num_blocks, k, order))
