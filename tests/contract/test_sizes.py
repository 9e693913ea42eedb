"""Sizes that must work: long contexts, many queries, large batches, offsets past 2^31 and 2^32 bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernel.backends.base import Backend
from kernel.batch import ScoreBatch
from tests.support.calls import (
    MODERATE_SCALES,
    Call,
    cumulative,
    random_call,
    random_page,
    sparse_pages,
    sparse_scores,
)
from tests.support.compare import (
    assert_same_bits,
    oracle_inserted,
    oracle_scores,
    scores_of,
    selected,
    selection_of,
    without_decode,
)

GIB = 1 << 30


@pytest.mark.parametrize("batch", [1, 2, 1025])
def test_batches_of_1_to_1025_ragged_requests(backend: Backend, batch: int) -> None:
    """Decode with a prefill, empty requests and every short length among 1,025 requests."""
    lengths = [(1 + row % 150, min(1 + row % 150, 1)) if row % 7 else (0, 0) for row in range(1, batch)]
    call = random_call([(200, 40), *lengths], 1, seed=51)
    scores = scores_of(backend, call)
    assert_same_bits(scores, oracle_scores(call))
    num_blocks = call.batch().num_blocks_per_query()
    assert_same_bits(selection_of(backend, call, 16), selected(scores, num_blocks, 16))


def test_65536_queries_in_a_call(product_backend: Backend) -> None:
    """65,536 query tokens in 512 requests of short context: four of them, 128 times."""
    four = random_call([(130, 128), (129, 128), (200, 128), (257, 128)], 1, seed=52)
    call = replace(
        four,
        q=four.q.view(torch.uint8).repeat(128, 1, 1).view(torch.float8_e4m3fn),
        block_table=four.block_table.repeat(128, 1),
        cu_seqlens_q=cumulative([128] * 512),
        seq_lens=four.seq_lens.repeat(128),
    )
    assert call.total_q == 65536
    expected = oracle_scores(four)
    assert_same_bits(scores_of(product_backend, call), expected.repeat(1, 128, 1))
    expected_ids = selected(expected, four.batch().num_blocks_per_query(), 2)
    assert_same_bits(selection_of(product_backend, call, 2), expected_ids.repeat(1, 128, 1))


@pytest.mark.nightly
def test_65536_queries_of_one_request(product_backend: Backend) -> None:
    """A whole prefill of 65,536 tokens: its selection, on rows spread over it, equals the oracle's."""
    call = random_call([(65536, 65536)], 1, seed=53)
    selection = selection_of(product_backend, call, 16)
    for last in (64, 12_345, 32_768, 50_001, 65_536):
        rows = slice(last - 64, last)
        part = replace(
            call,
            q=call.q.view(torch.uint8)[rows].view(torch.float8_e4m3fn),
            cu_seqlens_q=cumulative([64]),
            seq_lens=torch.tensor([last], dtype=torch.int32),
        )
        expected = selected(oracle_scores(part), part.batch().num_blocks_per_query(), 16)
        assert_same_bits(selection[:, rows].contiguous(), expected)


def million_token_call(context: int, queries: int) -> Call:
    """A context of up to 8,192 blocks on 512 distinct pages."""
    random = np.random.default_rng(54)
    pages = np.stack([random_page(random, MODERATE_SCALES) for _ in range(512)])
    call = random_call([(1, 1)] * queries, 4, seed=54)
    block_table = random.integers(0, 512, (1, -(-context // 128)), dtype=np.int32)
    return replace(
        call,
        pages=torch.from_numpy(pages),
        block_table=torch.from_numpy(block_table),
        cu_seqlens_q=cumulative([queries]),
        seq_lens=torch.tensor([context], dtype=torch.int32),
    )


@pytest.mark.parametrize(
    ("context", "queries"),
    [
        (131_073, 2),
        pytest.param(1_048_576, 3, marks=pytest.mark.nightly),
        pytest.param(1_048_449, 2, marks=pytest.mark.nightly),
    ],
)
def test_long_contexts_are_scored(product_backend: Backend, context: int, queries: int) -> None:
    """Up to 1,048,576 tokens, 8,192 blocks: every score (pages repeat, so that scores tie), the selection."""
    call = million_token_call(context, queries)
    scores = scores_of(product_backend, call)
    assert scores.shape[2] == -(-context // 128)
    assert_same_bits(scores, oracle_scores(call))
    expected = selected(scores, call.batch().num_blocks_per_query(), 16)
    assert_same_bits(selection_of(product_backend, call, 16), expected)


def test_a_million_tokens_are_selected_from(product_backend: Backend) -> None:
    """The longest context, one decode step: the selection from all of its 8,192 blocks."""
    call = million_token_call(1_048_576, 1)
    expected = selected(oracle_scores(call), torch.tensor([8192]), 16)
    assert_same_bits(selection_of(product_backend, call, 16), expected)


DISTANT = [
    pytest.param(16 * (1 << 20), [0, 1, 127, 128, 129, 255, 256, 257, 300], id="16 MiB apart"),
    pytest.param(9216, [0, 233_015, 233_016, 233_017, 466_032, 466_033, 466_034, 470_000], id="9216 B apart"),
    pytest.param(GIB + 16, [0, 1, 2, 3, 4, 5, 6, 7, 8], id="1 GiB apart"),
]
"""Page strides, and page ids on both sides of 2^31 and 2^32 bytes."""


@pytest.mark.parametrize(("page_stride", "page_ids"), DISTANT)
def test_pages_past_4_gib_are_read(backend: Backend, page_stride: int, page_ids: list[int]) -> None:
    """page_id * page_stride passes 2^31 and 2^32: every page there is read as it is near the start."""
    near = random_call([(128 * len(page_ids) - 77, 5)], 4, seed=55, values="inexact")
    used = near.block_table[0, : len(page_ids)].long()
    pages = sparse_pages(max(page_ids) + 1, page_stride, backend.device)
    pages[torch.tensor(page_ids, device=pages.device)] = near.pages[used].to(pages.device)
    far = replace(near, pages=pages, block_table=torch.tensor([page_ids], dtype=torch.int32))
    assert_same_bits(scores_of(backend, far), scores_of(backend, near))
    assert_same_bits(selection_of(backend, far, 4), selection_of(backend, near, 4))


@pytest.mark.parametrize(("page_stride", "page_ids"), DISTANT)
def test_pages_past_4_gib_are_written(backend: Backend, page_stride: int, page_ids: list[int]) -> None:
    """Inserting into a page past 2^31 and 2^32 bytes writes that page."""
    device = backend.device
    keys = torch.randn(3 * len(page_ids), 128, generator=torch.Generator().manual_seed(56))
    tokens = torch.tensor([0, 64, 127]).repeat(len(page_ids))
    distant = torch.tensor(page_ids).repeat_interleave(3) * 128 + tokens
    pages = sparse_pages(max(page_ids) + 1, page_stride, device)
    backend.insert(keys.to(device), pages, distant.to(device))
    near = torch.zeros(len(page_ids), 9216, dtype=torch.uint8)
    near_slots = torch.arange(len(page_ids)).repeat_interleave(3) * 128 + tokens
    written = pages[torch.tensor(page_ids, device=device)].cpu()
    assert_same_bits(written, oracle_inserted(keys, near, near_slots))


def test_score_buffers_of_4_gib(backend: Backend) -> None:
    """H=4, 32,768 queries, 8,192 blocks is exactly 2^32 bytes: the last rows of every head are right."""
    call = random_call([(300, 1), (401, 2)], 4, seed=57)
    near = call.batch(backend.device)
    first = 32768 - call.total_q
    q = torch.zeros(32768, 4, 128, dtype=torch.uint8, device=backend.device)
    q[first:] = near.q.view(torch.uint8)
    requests = [replace(request, query_start=first + request.query_start) for request in near.requests]
    far: ScoreBatch = replace(near, q=q.view(torch.float8_e4m3fn)).subset(requests)
    scores = sparse_scores((4, 32768, 8192), backend.device)

    expected = oracle_scores(call, columns=8192)
    with without_decode(backend):
        backend.score(far, scores)
    assert_same_bits(scores[:, first:].cpu(), expected)
    assert not bool(scores[:, first - 1].any())
    scores[:, first:] = 0
    backend.score(far, scores)
    assert_same_bits(scores[:, first:].cpu(), expected)

    num_blocks = call.batch().num_blocks_per_query()
    block_ids = torch.zeros(4, call.total_q, 16, dtype=torch.int32, device=backend.device)
    backend.topk(scores[:, first:], num_blocks.to(backend.device), block_ids, "score")
    assert_same_bits(block_ids.cpu(), selected(expected[:, :, :8], num_blocks, 16))
