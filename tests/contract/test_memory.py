"""What is read and written: strided buffers, guarded bytes, other requests' rows, what lies past the keys."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from kernel.backends.base import Backend, Order
from tests.contract import simulated
from tests.support.calls import Lengths, random_call
from tests.support.compare import (
    UNTOUCHED,
    UNTOUCHED_ID,
    assert_same_bits,
    oracle_scores,
    scores_of,
    selection_of,
    without_decode,
)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_scores_go_to_the_cells_of_a_strided_buffer_only(backend: Backend, heads: int, decode: bool) -> None:
    """Any strides with stride(2) == 1: what lies between rows and heads and around the buffer stays."""
    lengths = [(300, 16), (0, 0), (129, 1), (1, 1), (700, 3)]
    call = random_call(lengths, heads, seed=21)
    expected = oracle_scores(call, columns=20)
    storage = torch.full((heads + 2, call.total_q + 4, 33), UNTOUCHED, device=backend.device)
    with nullcontext() if decode else without_decode(backend):
        backend.score(call.batch(backend.device), storage[1:-1, 2:-2, 5:25])
    whole = torch.full(storage.shape, UNTOUCHED)
    whole[1:-1, 2:-2, 5:25] = expected
    assert_same_bits(storage.cpu(), whole)


def test_scores_go_to_a_token_major_buffer(backend: Backend, ragged: Lengths) -> None:
    """[H, total_q, S] may be a permuted view of [total_q, H, S]."""
    call = random_call(ragged, 4, seed=22)
    batch = call.batch(backend.device)
    storage = torch.full((call.total_q, 4, batch.num_score_blocks), UNTOUCHED, device=backend.device)
    with without_decode(backend):
        backend.score(batch, storage.transpose(0, 1))
    assert_same_bits(storage.cpu().transpose(0, 1).contiguous(), oracle_scores(call))


@pytest.mark.parametrize("kept", [[0], [3], [0, 6], [1, 8], [6, 9], []])
def test_rows_of_requests_left_out_stay_untouched(backend: Backend, ragged: Lengths, kept: list[int]) -> None:
    """A subset of a batch writes the rows of its own requests: scores, and ids of a selection."""
    call = random_call(ragged, 2, seed=23).forcing(0, 1)
    batch = call.batch(backend.device)
    subset = batch.subset([batch.requests[i] for i in kept])
    expected = torch.full((2, call.total_q, batch.num_score_blocks), UNTOUCHED)
    expected_ids = torch.full((2, call.total_q, 5), UNTOUCHED_ID, dtype=torch.int32)
    scores, block_ids = expected.to(backend.device), expected_ids.to(backend.device)
    with without_decode(backend):
        backend.score(subset, scores)
    backend.select(subset, block_ids, "score")
    oracle, ids = oracle_scores(call), selection_of(backend, call, 5)
    for request in subset.requests:
        rows = slice(request.query_start, request.query_start + request.query_len)
        expected[:, rows] = oracle[:, rows]
        expected_ids[:, rows] = ids[:, rows]
    assert_same_bits(scores.cpu(), expected)
    assert_same_bits(block_ids.cpu(), expected_ids)


@pytest.mark.parametrize("order", ["score", "block"])
def test_ids_go_to_the_cells_of_a_strided_buffer_only(backend: Backend, order: Order) -> None:
    """Block ids may be written into a view: nothing around it changes, from scores and from a selection."""
    call = random_call([(300, 16), (0, 0), (700, 3)], 2, seed=24)
    batch = call.batch(backend.device)
    scores = scores_of(backend, call).to(backend.device)
    expected = torch.full((2, 19, 9), UNTOUCHED_ID, dtype=torch.int32)
    expected[:, :, 2:7] = selection_of(backend, call, 5, order)
    for write in ("topk", "select"):
        storage = torch.full((2, 19, 9), UNTOUCHED_ID, dtype=torch.int32, device=backend.device)
        if write == "topk":
            num_blocks = batch.num_blocks_per_query().to(backend.device)
            backend.topk(scores, num_blocks, storage[:, :, 2:7], order)
        else:
            backend.select(batch, storage[:, :, 2:7], order)
        assert_same_bits(storage.cpu(), expected)


@pytest.mark.parametrize("page_stride", [9216, 9232, 9216 + 4096, 16384, 3 * 9216])
def test_pages_lie_any_multiple_of_16_bytes_apart(
    backend: Backend, ragged: Lengths, page_stride: int
) -> None:
    """page_stride may exceed 9,216 (packed views of several layers' caches)."""
    call = random_call(ragged, 2, seed=25, page_stride=page_stride)
    assert_same_bits(scores_of(backend, call), oracle_scores(call))


def test_scoring_reads_only(backend: Backend, ragged: Lengths) -> None:
    """Pages, queries, block table and lengths are as they were after scoring and selecting."""
    call = random_call(ragged, 4, seed=26).forcing(1, 1)
    batch = call.batch(backend.device)
    inputs = (batch.q.view(torch.uint8), batch.pages, batch.block_table, batch.lut)
    before = [tensor.cpu().clone() for tensor in inputs]
    scores = torch.empty(4, call.total_q, batch.num_score_blocks, device=backend.device)
    with without_decode(backend):
        backend.score(batch, scores)
    backend.score(batch.subset(batch.requests[5:7]), scores)
    backend.select(batch, torch.empty(4, call.total_q, 16, dtype=torch.int32, device=backend.device), "score")
    for tensor, old in zip(inputs, before, strict=True):
        assert_same_bits(tensor.cpu(), old)


def test_padding_columns_may_hold_anything(backend: Backend, ragged: Lengths) -> None:
    """Columns past a request's blocks may hold anything, -1 and ids past the cache included."""
    call = random_call(ragged, 2, seed=27)
    scores = scores_of(backend, call)
    columns = torch.arange(call.block_table.shape[1])
    garbage = torch.tensor([-1, -(2**31), 2**31 - 1, call.pages.shape[0]], dtype=torch.int32)
    for turn in (0,) if backend.name == simulated.NAME else range(4):
        for row, request in enumerate(call.batch().requests):
            padding = columns[request.num_blocks :]
            call.block_table[row, padding] = garbage[(padding + turn) % 4]
        assert_same_bits(scores_of(backend, call), scores)


def test_bytes_past_the_last_key_change_nothing(backend: Backend, ragged: Lengths) -> None:
    """Bytes of a request's last page past seq_len, and pages no request uses, may hold anything."""
    call = random_call(ragged, 2, seed=28)
    scores = scores_of(backend, call)
    used = torch.zeros(call.pages.shape, dtype=torch.bool)
    for row, request in enumerate(call.batch().requests):
        for block in range(request.num_blocks):
            page, tokens = int(call.block_table[row, block]), min(128, request.seq_len - 128 * block)
            used[page, : tokens * 64] = True
            used[page, 8192 : 8192 + tokens * 8] = True
    for octet in (0xFF, 0x77) if backend.name == simulated.NAME else (0x00, 0x7F, 0xFF, 0x77):
        call.pages[~used] = octet
        assert_same_bits(scores_of(backend, call), scores)
