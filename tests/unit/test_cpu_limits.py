"""What the cpu backend must not do: work that no row sees, memory that grows, addresses that wrap."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel.backends import cpu
from kernel.backends.base import Precision
from kernel.backends.cpu import CpuBackend, score
from kernel.checks import checked_batch
from kernel.contract import PAGE_BYTES
from kernel.errors import InvalidArgumentError
from kernel.nvfp4 import build_lut, quantize_query
from tests.support.call import Call, cumulative
from tests.support.calls import random_call, strided_pages
from tests.support.compare import assert_same_bits, oracle_scores
from tests.support.run import scores_of, selection_of


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
    small, large = (largest_tensor_of_select(blocks, 16) for blocks in (300, 1200))
    assert small == large
    assert large <= 4 << 20


def test_select_memory_does_not_grow_with_the_queries() -> None:
    small, large = (largest_tensor_of_select(40, queries) for queries in (1024, 3000))
    assert large <= small + 3000 * 4 * 128 * 4  # the queries given


def test_only_blocks_that_a_tile_sees_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first prefill of 2,048 tokens: about half of the blocks, counted in tokens times rows."""
    multiplied = 0
    write = score.TileMaxima.write

    def counting(
        self: score.TileMaxima,
        tile: score.RowTile,
        keys: torch.Tensor,
        first_position: int,
        out: torch.Tensor,
    ) -> None:
        nonlocal multiplied
        multiplied += keys.shape[0] * tile.queries.shape[1]
        assert first_position <= tile.last_position
        assert first_position + keys.shape[0] - 128 <= tile.last_position
        write(self, tile, keys, first_position, out)

    monkeypatch.setattr(score.TileMaxima, "write", counting)
    call = long_call(16, 2048)
    scores_of(CpuBackend(), call)
    visible = int(call.batch().num_blocks_per_query().sum()) * 128 * 4
    assert multiplied == visible


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
    backend.score_prefill(batch, token_major.transpose(0, 1)[:, :, 1:10])
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
    CpuBackend().score_prefill(batch, scores)
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
