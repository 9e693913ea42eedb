"""Failures of such indexers that people reported in public: a test for each, by repository and number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from indexer.case import Case, read_case, write_case
from indexer.replay import load_case
from kernel.backends import registry
from kernel.backends.base import Backend
from kernel.errors import InvalidArgumentError
from tests.contract import simulated
from tests.support.allocations import TensorSizes
from tests.support.calls import ONE, Call, Lengths, cumulative, random_call, sparse_pages, staircase_call
from tests.support.compare import (
    assert_same_bits,
    assert_within_bounds,
    inserted,
    oracle_inserted,
    oracle_scores,
    scores_of,
    selected,
    selection_of,
    topk_of,
)


def expected_ids(call: Call, topk: int) -> torch.Tensor:
    return selected(oracle_scores(call), call.batch().num_blocks_per_query(), topk)


def one_page_call(keys: torch.Tensor, backend: Backend) -> Call:
    """128 one-hot queries, query p for dim p, over 128 keys that the backend inserted."""
    pages = inserted(backend, keys, torch.zeros(1, 9216, dtype=torch.uint8), torch.arange(128))
    return Call(
        q=torch.eye(128).to(torch.float8_e4m3fn)[:, None],
        pages=pages,
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        cu_seqlens_q=cumulative([128]),
        seq_lens=torch.tensor([128], dtype=torch.int32),
    )


@pytest.mark.parametrize(("total_q", "heads"), [(4, 4), (2, 2), (5, 4), (3, 2)])
def test_row_1_token_major_and_head_major(backend: Backend, total_q: int, heads: int) -> None:
    """vllm #48603 #48604 #48929 #49149: layouts mixed up, invisible unless total_q != H."""
    call = random_call([(128 * 20 + 7, total_q)], heads, seed=101)
    assert_same_bits(scores_of(backend, call), oracle_scores(call))
    assert_same_bits(selection_of(backend, call, 16), expected_ids(call, 16))


@pytest.mark.parametrize("heads", [3, 5, 6, 8])
def test_row_2_head_counts_that_are_no_power_of_two(heads: int) -> None:
    """vllm #49157 #49199: such head counts are refused by name, at construction."""
    with pytest.raises(
        InvalidArgumentError, match=rf"^num_index_heads = {heads}: must be one of \(1, 2, 4\)"
    ):
        IndexerConfig(num_index_heads=heads, num_pages=1)


def test_row_3_offsets_past_32_bits(backend: Backend) -> None:
    """vllm #52109, aiter #4774 #4427, b12x #20 #45: page id * stride past 2 GiB (more in test_sizes.py)."""
    near = random_call([(300, 2)], 4, seed=103)
    pages = sparse_pages(4, 3 << 29, backend.device)
    pages[1:] = near.pages[near.block_table[0, :3].long()].to(pages.device)
    far = replace(near, pages=pages, block_table=torch.tensor([[1, 2, 3]], dtype=torch.int32))
    assert_same_bits(scores_of(backend, far), oracle_scores(near))


def test_row_4_requests_that_pad_a_graph(backend: Backend) -> None:
    """TensorRT-LLM #18034: requests of no query and no key among the others change nothing."""
    lengths = [(300, 2), (1, 1), (2305, 3)]
    padded = [(0, 0), lengths[0], (0, 0), (700, 0), lengths[1], (0, 0), lengths[2], (0, 0), (0, 0)]
    call = random_call(padded, 4, seed=104)
    assert_same_bits(scores_of(backend, call), oracle_scores(call))
    assert_same_bits(selection_of(backend, call, 16), expected_ids(call, 16))


def test_row_5_slot_minus_one(backend: Backend) -> None:
    """TensorRT-LLM #18673: a key with slot -1 was written below the cache."""
    storage = torch.full((3, 9216), 0x11, dtype=torch.uint8, device=backend.device)
    slots = torch.full((4,), -1, device=backend.device)
    backend.insert(torch.ones(4, 128, device=backend.device), storage[1:2], slots)
    assert bool((storage == 0x11).all())


def test_row_6_block_stride(backend: Backend) -> None:
    """TensorRT-LLM #16223: a wrong stride between blocks, hidden by low page ids."""
    call = random_call([(1000, 3)], 2, seed=106, page_stride=9216 + 1024)
    assert int(call.block_table[0, :8].max()) > 8
    assert_same_bits(scores_of(backend, call), oracle_scores(call))


@pytest.mark.parametrize("blocks", range(1, 18))
def test_row_7_fewer_blocks_than_k(backend: Backend, blocks: int) -> None:
    """vllm-ascend #13177: a context of fewer blocks than k crashed."""
    call = random_call([(128 * blocks, 1)], 4, seed=107)
    ids = selection_of(backend, call, 16)
    assert_same_bits(ids, expected_ids(call, 16))
    assert bool((ids[:, :, min(blocks, 16) :] == -1).all())


def test_row_8_ascending_ids(backend: Backend, ragged: Lengths) -> None:
    """sglang #30971: the attention kernel needs ascending ids."""
    call = random_call(ragged, 2, seed=108)
    ascending = selection_of(backend, call, 16, "block")
    as_sets = ascending.where(ascending >= 0, torch.tensor(2**31 - 1))
    assert bool((as_sets[:, :, 1:] >= as_sets[:, :, :-1]).all())
    assert_same_bits(ascending.sort(dim=2).values, selection_of(backend, call, 16).sort(dim=2).values)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_row_9_every_head_count(backend: Backend, heads: int) -> None:
    """aiter #5464: no build for 4 heads."""
    call = random_call([(400, 20), (129, 1)], heads, seed=109)
    assert_same_bits(scores_of(backend, call), oracle_scores(call))


def test_row_10_ties_and_repeated_runs(backend: Backend) -> None:
    """aiter #4376 #4415, sglang #37591 #31115: ties at the last place went either way."""
    scores = torch.tensor([2.0, 1.0, 1.0, 3.0]).repeat(50).view(1, 1, 200)
    threes, twos = list(range(3, 200, 4)), list(range(0, 200, 4))
    for _ in range(3):
        ids = topk_of(backend, scores, torch.tensor([200], dtype=torch.int32), 64)
        assert ids[0, 0].tolist() == threes + twos[:14]


def test_row_11_how_the_prefill_was_split(backend: Backend) -> None:
    """pypto-lib #592, colibri #1554: the selection depended on the split (more in test_determinism.py)."""
    call = random_call([(128 * 18 + 100, 130)], 2, seed=111, values="inexact")
    whole = selection_of(backend, call, 16)
    for first in (1, 27, 28, 29, 129):
        halves = replace(
            call,
            block_table=call.block_table.expand(2, -1).contiguous(),
            cu_seqlens_q=cumulative([first, 130 - first]),
            seq_lens=torch.tensor([128 * 18 - 30 + first, 128 * 18 + 100], dtype=torch.int32),
        )
        assert_same_bits(selection_of(backend, halves, 16), whole)


def test_row_12_causal_mask_inside_a_block(backend: Backend) -> None:
    """tt-metal #48700: the mask was missing inside a block, where local_blocks = 1 hides it."""
    scores = scores_of(backend, staircase_call([(128, 128)]))
    assert scores.flatten().tolist() == list(range(128))


def test_row_13_hardware_that_a_test_assumed(backend: Backend, ragged: Lengths) -> None:
    """vllm #53448: a test assumed the number of compute units; here one thread or two give the same bytes."""
    call = random_call(ragged, 4, seed=113, values="inexact")
    scores, threads = scores_of(backend, call), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert_same_bits(scores_of(backend, call), scores)
    finally:
        torch.set_num_threads(threads)


def test_row_14_odd_scales(backend: Backend) -> None:
    """Model-Optimizer #1633, flashinfer #3398 #4676: NaN scale bytes, zero scales, underflow."""
    call = random_call([(256, 128)], 4, seed=114, values="bytes")
    for scale in (0x00, 0x01, 0x7F, 0x80, 0x81, 0xFF):
        call.pages[:, 8192:] = scale
        scores = scores_of(backend, call)
        assert_same_bits(scores, oracle_scores(call))
        assert bool((scores == 0).all()) == (scale & 0x7F in (0x00, 0x7F))
    keys = torch.cat([torch.zeros(1, 128), torch.full((1, 128), 1e-38), torch.full((1, 128), 3e38)])
    pages, slots = torch.zeros(1, 9216, dtype=torch.uint8), torch.arange(3)
    assert_same_bits(inserted(backend, keys, pages, slots), oracle_inserted(keys, pages, slots))


def test_row_15_needles_past_128k_keys(backend: Backend) -> None:
    """mlx-lm #1454: scores all zero past 128K keys, the trailing blocks were picked."""
    call = random_call([(128, 4), (128, 4)], 4, seed=115)
    call.q.view(torch.uint8)[:] = ONE
    hay, needle = call.block_table[:2, 0]
    call.pages[needle.long(), 70 * 64 : 71 * 64] = 0x77  # 6.0 in every dim, scale 2
    call.pages[needle.long(), 8192 + 70 * 8 : 8192 + 71 * 8] = 0x40
    table = hay.repeat(1, 1100)
    needles = [3, 600, 1023, 1024, 1025, 1091]
    table[0, needles] = needle
    call = replace(call, q=call.q[:2], block_table=table, cu_seqlens_q=cumulative([2]))
    call = replace(call, seq_lens=torch.tensor([128 * 1100 - 5], dtype=torch.int32))
    scores = scores_of(backend, call)
    assert bool((scores[:, :, needles] == 12.0 * 128).all())
    assert selection_of(backend, call, 6).tolist() == [[needles] * 2] * 4


def test_row_16_reused_pages(backend: Backend) -> None:
    """ATOM #1368: stale index pages, masked below 2,048 tokens as 16 blocks cover everything; here 4 of 7."""
    generator = torch.Generator().manual_seed(116)
    old, new = (torch.randn(128 * 6 + 50, 128, generator=generator) for _ in range(2))
    q = torch.randn(3, 4, 128, generator=generator)
    config = IndexerConfig(4, num_pages=7, topk_blocks=4, local_blocks=0, backend=backend.name)
    reused, fresh = IndexScorer(config), IndexScorer(config)
    first = reused.add_sequence()
    reused.append_keys(first, (8 * old).to(reused.device))
    reused.free_sequence(first)
    results = []
    for scorer in (reused, fresh):
        seq = scorer.add_sequence()
        scorer.append_keys(seq, new[:-60].to(scorer.device))
        scorer.append_keys(seq, new[-60:-20].to(scorer.device))
        results.append(scorer.score(q.to(scorer.device), [seq]))
    assert results[0].scores is not None
    assert results[1].scores is not None
    assert_same_bits(results[0].scores.cpu(), results[1].scores.cpu())
    assert_same_bits(results[0].block_ids.cpu(), results[1].block_ids.cpu())


def test_row_17_one_backend_writes_another_reads(backend: Backend) -> None:
    """vllm #48558: the write side and the read side disagreed about the page."""
    call = random_call([(300, 5), (128, 1)], 2, seed=117)
    keys = torch.randn(428, 128, generator=torch.Generator().manual_seed(117))
    tables = call.block_table.long()
    tokens = torch.arange(300)
    slots = torch.cat([tables[0, tokens // 128] * 128 + tokens % 128, tables[1, 0] * 128 + tokens[:128]])
    written = replace(call, pages=inserted(backend, keys, call.pages, slots))
    for status in registry.statuses():
        # The simulated device is slow, and reads what the cpu backend writes: the bytes of the reference.
        if status.usable and (backend.name, status.name) != ("reference", simulated.NAME):
            reader = registry.create(status.name)
            assert_same_bits(written.pages, inserted(reader, keys, call.pages, slots))
            assert_within_bounds(scores_of(reader, written), written, reader.precision)


def test_row_18_a_call_replayed_from_a_file(backend: Backend, tmp_path: Path) -> None:
    """vllm #50557 #49070: faults in production, none in isolation: dump the call, replay it anywhere."""
    call = random_call([(700, 3), (0, 0), (300, 9)], 4, seed=118, values="inexact").forcing(1, 2)
    case = Case(
        index_q=call.q.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn),
        cu_seqlens_q=call.cu_seqlens_q.numpy(),
        seq_lens=call.seq_lens.numpy(),
        pages=np.ascontiguousarray(call.pages.numpy()),
        block_table=call.block_table.numpy(),
        init_blocks=1,
        local_blocks=2,
    )
    write_case(case, tmp_path / "dumped.safetensors")
    result = load_case(read_case(tmp_path / "dumped.safetensors"), backend.name).score()
    assert result.scores is not None
    assert_same_bits(result.scores.cpu(), scores_of(backend, call))
    assert_same_bits(result.block_ids.cpu(), selection_of(backend, call, 16))


def test_row_19_every_place_of_an_operand(backend: Backend) -> None:
    """aiter #5626: a lane map was half assumed. Each (token, dim) is the only key value there is, once."""
    for shift in (0, 1, 16, 37, 64, 127):
        keys = torch.zeros(128, 128)
        keys[torch.arange(128), (torch.arange(128) + shift) % 128] = 6.0 * 2.0 ** (torch.arange(128) % 5)
        call = one_page_call(keys, backend)
        assert_same_bits(scores_of(backend, call), oracle_scores(call))


def test_row_23_precision_is_named(backend: Backend) -> None:
    """DeepGEMM #37, DeepSeek-V3 #197: fp8 accumulation keeps fewer bits, so results name their precision."""
    scorer = IndexScorer(IndexerConfig(4, num_pages=1, backend=backend.name))
    seq = scorer.add_sequence()
    scorer.append_keys(seq, torch.ones(3, 128, device=scorer.device))
    result = scorer.score(torch.ones(1, 4, 128, device=scorer.device), [seq])
    assert (result.precision, result.backend) == ("exact", backend.name)


def test_row_24_scales_of_every_token(backend: Backend) -> None:
    """vllm #40991: scales packed at the page's end were read interleaved: garbage from token 1 on."""
    keys = torch.diag(6.0 * 2.0 ** (torch.arange(128) % 7 - 3.0))
    scores = scores_of(backend, one_page_call(keys, backend))
    assert scores[0, :, 0].tolist() == keys.diag().tolist()


def test_row_25_no_score_buffer(product_backend: Backend) -> None:
    """vllm #45663: out of memory for scores no one asked for: without them nothing grows with the context."""
    one = random_call([(128, 61)], 1, seed=125)
    scorer = IndexScorer(IndexerConfig(1, num_pages=0, backend=product_backend.name))

    def sizes(blocks: int, return_scores: bool) -> set[int]:
        call = replace(
            one,
            block_table=one.block_table[:, :1].repeat(1, blocks),
            seq_lens=torch.tensor([128 * blocks], dtype=torch.int32),
        )
        tensors = (call.q, call.pages, call.block_table, call.cu_seqlens_q, call.seq_lens)
        on_device = [tensor.to(scorer.device) for tensor in tensors]
        made = TensorSizes()
        with made:
            result = scorer.score_paged(*on_device, return_scores=return_scores)
        assert (result.scores is not None) == return_scores
        return made.storage_bytes

    buffer_bytes = 61 * 2051 * 4
    assert buffer_bytes in sizes(2051, return_scores=True)
    # Both contexts end alike modulo 512 blocks, so what differs in size is what grows with the context.
    grown = sizes(2051, return_scores=False) - sizes(1027, return_scores=False)
    if product_backend.name == "triton":
        # Its workspace is bounded, whatever the call: keys dequantised, and scores in groups of 16.
        workspace = 2051 * 128 * 128 * 2 + 2 * buffer_bytes
        grown = {size for size in grown if not buffer_bytes < size < workspace}
    assert max(grown, default=0) < buffer_bytes
