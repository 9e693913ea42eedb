"""A case as tensors and in a scorer: no copy where none is needed, the same answer in both forms."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch

from indexer.case import Case, decode_case, encode_case, read_case
from indexer.case.container import Array
from indexer.made_cases import Shape, make_case
from indexer.oracle import run_oracle
from indexer.profile import plan_balance
from indexer.replay import as_tensor, flop, load_case
from indexer.verify import selftest_case
from kernel.errors import InvalidArgumentError
from tests.support.cases import CODE, CUT, paged_case, small_case


def paged(case: Case, seed: int = 0) -> Case:
    """The same call over the pages that a scorer made of its keys, permuted and among others."""
    loaded = load_case(case)
    scorer = loaded.scorer
    order = np.random.default_rng(seed).permutation(2 * len(scorer.pages))
    pages = np.full((order.size, 9216), 0x7E, dtype=np.uint8)
    pages[order[: len(scorer.pages)]] = scorer.pages.cpu().numpy()
    block_table = np.full((case.batch, 70), -1, dtype=np.int32)
    for row, seq in enumerate(scorer.sequences):
        table = scorer.block_table(seq).numpy()
        block_table[row, : table.size] = order[table]
    return dataclasses.replace(case, index_k=None, pages=pages, block_table=block_table)


@pytest.mark.parametrize("path", [CODE, CUT], ids=lambda path: path.stem)
def test_both_forms_give_what_is_expected(path: str) -> None:
    case = read_case(path)
    for form in (case, decode_case(encode_case(paged(case)))):
        result = load_case(form).score()
        assert result.scores is not None
        assert case.expected_block_ids is not None
        assert (result.block_ids.cpu().numpy() == case.expected_block_ids).all()
        assert (result.num_blocks.cpu().numpy() == case.num_blocks_per_query()).all()


def test_engine_shape_of_pages_is_only_a_shape() -> None:
    flat = paged_case()
    assert flat.pages is not None
    shaped = dataclasses.replace(flat, pages=flat.pages.reshape(-1, 128, 72))
    one, other = load_case(flat).score(), load_case(shaped).score()
    assert one.scores is not None
    assert other.scores is not None
    assert torch.equal(one.scores, other.scores)
    assert (run_oracle(shaped).scores == run_oracle(flat).scores).all()


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn, np.int32, np.uint8]
)
def test_tensor_shares_memory_and_has_the_values(dtype: type) -> None:
    array: Array = np.arange(24).reshape(2, 12).astype(dtype)
    for source in (array, np.frombuffer(array.tobytes(), dtype=dtype).reshape(2, 12)):
        tensor = as_tensor(source)
        assert tensor.data_ptr() == source.__array_interface__["data"][0]
        assert tensor.float().tolist() == array.astype(np.float32).tolist()


def test_misaligned_arrays_are_copied() -> None:
    octets = np.zeros(9216 + 17, dtype=np.uint8)
    odd = octets[1:9].view(np.float32)
    assert as_tensor(odd).data_ptr() % 4 == 0
    for start in range(17):
        pages = octets[start : start + 9216].reshape(1, 9216)
        assert as_tensor(pages, alignment=16).data_ptr() % 16 == 0


def test_tensor_keeps_its_buffer_alive() -> None:
    tensor = as_tensor(decode_case(encode_case(small_case(seed=3))).index_q)
    junk = [bytes(3000) for _ in range(100)]
    assert torch.equal(tensor.float(), torch.from_numpy(small_case(seed=3).index_q.astype(np.float32)))
    assert len(junk) == 100


def test_case_without_rows_or_requests_is_legal() -> None:
    nothing = np.zeros(0, dtype=np.int32)
    empty = small_case(
        index_q=np.zeros((0, 2, 128), np.float32),
        index_k=np.zeros((0, 128), np.float32),
        cu_seqlens_q=np.zeros(1, np.int32),
        seq_lens=nothing,
    )
    pages = dataclasses.replace(
        empty, index_k=None, pages=np.zeros((0, 9216), np.uint8), block_table=np.zeros((0, 0), np.int32)
    )
    padding = small_case(
        index_q=np.zeros((0, 2, 128), np.float32),
        cu_seqlens_q=np.zeros(3, np.int32),
    )
    for case in (empty, pages, padding):
        assert load_case(case).score().block_ids.shape == (2, 0, 16)
        assert run_oracle(case).block_ids.shape == (2, 0, 16)


def test_work_counts_visible_blocks_only() -> None:
    # Visible blocks 1, 2, 2 and 1, 1, for each of two heads.
    assert flop(small_case()) == 2 * 128 * 128 * 2 * 7


@pytest.mark.parametrize("name", ["index_q", "index_k"])
def test_values_that_are_not_finite_are_refused(name: str) -> None:
    case = selftest_case()
    getattr(case, name)[1] = np.nan
    with pytest.raises(InvalidArgumentError, match="must be finite"):
        load_case(case).score()


def test_ids_in_block_order_are_the_same_set() -> None:
    loaded = load_case(read_case(CODE))
    by_score, by_block = loaded.score(), loaded.score(order="block", return_scores=False)
    assert by_block.scores is None
    assert torch.equal(by_score.block_ids.sort(dim=2).values, by_block.block_ids)


# The balance of the gfx950 plan, against what can be counted by hand.


def test_a_decode_call_has_no_prefill_plan() -> None:
    assert plan_balance(make_case("m3", Shape(context=5000, queries=16), 0)) is None


def test_one_tile_is_one_workgroup() -> None:
    balance = plan_balance(make_case("m3", Shape(context=128, queries=128, heads=4), 0))
    assert balance is not None
    assert (balance.items, balance.slots) == (1, 512)
    assert balance.slot_blocks[0] == 1 + 6 / 4  # its block, and what an item costs beside
    assert set(balance.slot_blocks[1:]) == {0.0}
    assert balance.busy_share == pytest.approx(1 / 512)


def test_a_large_call_keeps_the_device_busy() -> None:
    balance = plan_balance(make_case("m3", Shape(context=65536, queries=4096, heads=4), 0))
    assert balance is not None
    assert balance.busy_share > 0.85
    # Every tile of 512 rows (128 tokens) scores all blocks that its last row sees, and no block twice.
    blocks = sum((65536 - 4096 + 128 * (tile + 1)) // 128 for tile in range(32))
    assert sum(balance.slot_blocks) == blocks + balance.items * 6 / 4


def test_decode_requests_are_counted_apart() -> None:
    balance = plan_balance(make_case("ragged", Shape(context=3000, queries=100), 0))
    assert balance is not None
    assert balance.decode_requests == 5
