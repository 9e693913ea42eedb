"""Same inputs, same bytes: whatever the chunking, split, neighbours or run. Sums are inexact here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernel.backends.base import Backend
from tests.contract import simulated
from tests.support.calls import Call, Lengths, cumulative, random_call
from tests.support.compare import assert_same_bits, scores_of, selection_of

PREFIX, QUERIES = 75, 260
"""A prefill that starts and ends inside a block and covers every ``prefix mod 128`` twice; where the backend
is slow, half of it, which covers each once."""


def prefill(heads: int, queries: int = QUERIES) -> Call:
    return random_call([(PREFIX + queries, queries)], heads, seed=41, values="inexact")


def split(call: Call, ends: list[int]) -> Call:
    """The same prefill as one batch of consecutive chunks, each a request on the same pages."""
    starts = [0, *ends[:-1]]
    return replace(
        call,
        block_table=call.block_table.expand(len(ends), -1).contiguous(),
        cu_seqlens_q=cumulative([end - start for start, end in zip(starts, ends)]),
        seq_lens=torch.tensor([PREFIX + end for end in ends], dtype=torch.int32),
    )


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 17, 64, 127, 128, 129])
def test_chunked_prefill_gives_the_same_rows(backend: Backend, heads: int, chunk: int) -> None:
    """Splitting a prefill at any token gives bit-identical rows, for chunks of 1 to 129 tokens."""
    queries = 135 if backend.name in (simulated.NAME, "reference") else QUERIES
    call = prefill(heads, queries).forcing(1, 1)
    whole = scores_of(backend, call)
    chunks = split(call, [*range(chunk, queries, chunk), queries])
    assert_same_bits(scores_of(backend, chunks), whole)
    assert_same_bits(selection_of(backend, chunks, 2), selection_of(backend, call, 2))


@pytest.mark.parametrize("heads", [1, 2])
def test_split_in_two_at_every_offset_of_a_block(backend: Backend, heads: int) -> None:
    """Every prefix mod 128 as the place of the split."""
    queries = 135 if backend.name == "reference" else QUERIES
    call = prefill(heads, queries)
    whole = scores_of(backend, call)
    for first in range(1, 129):
        assert_same_bits(scores_of(backend, split(call, [first, queries])), whole)


def _shorter(backend: Backend, ragged: Lengths) -> Lengths:
    """Half of the requests on the simulated device: a prompt, no queries, one, three, a chunk of a prompt."""
    return ragged[3:8] if backend.name == simulated.NAME else ragged


def test_rows_do_not_depend_on_their_batch(backend: Backend, ragged: Lengths) -> None:
    """A request alone gives the rows it gives among others, in any order of the requests."""
    call = random_call(_shorter(backend, ragged), 2, seed=42, values="inexact")
    whole, ids = scores_of(backend, call), selection_of(backend, call, 4)
    for row, request in enumerate(call.batch().requests):
        queries = slice(request.query_start, request.query_start + request.query_len)
        alone = replace(
            call,
            q=call.q.view(torch.uint8)[queries].view(torch.float8_e4m3fn),
            block_table=call.block_table[row : row + 1],
            cu_seqlens_q=cumulative([request.query_len]),
            seq_lens=call.seq_lens[row : row + 1],
        )
        columns = whole.shape[2]
        assert_same_bits(scores_of(backend, alone, columns), whole[:, queries].contiguous())
        assert_same_bits(selection_of(backend, alone, 4), ids[:, queries].contiguous())


def test_repeated_runs_give_the_same_bytes(backend: Backend, ragged: Lengths) -> None:
    """No atomics, no races: five runs, one result; of the simulated device, whose order is fixed, two."""
    call = random_call(ragged, 4, seed=43, values="inexact").forcing(0, 1)
    scores, ids = scores_of(backend, call), selection_of(backend, call, 16)
    for _ in range(1 if backend.name == simulated.NAME else 4):
        assert_same_bits(scores_of(backend, call), scores)
        assert_same_bits(selection_of(backend, call, 16), ids)


def test_scores_do_not_depend_on_the_width_of_the_buffer(backend: Backend, ragged: Lengths) -> None:
    """S is a property of the buffer, not of the result."""
    call = random_call(ragged, 2, seed=44, values="inexact")
    narrow = scores_of(backend, call)
    for columns in (20, 32, 37, 64, 129):
        assert_same_bits(scores_of(backend, call, columns)[:, :, : narrow.shape[2]].contiguous(), narrow)


def test_heads_do_not_depend_on_one_another(backend: Backend, ragged: Lengths) -> None:
    """The rows of four heads are those of each head alone, and of two at a time."""
    call = random_call(_shorter(backend, ragged), 4, seed=45, values="inexact")
    whole = scores_of(backend, call)
    octets = call.q.view(torch.uint8)
    pairs = ((1, 2),) if backend.name == simulated.NAME else ((0, 1), (1, 2), (1, 3))
    for heads in ((0,), (3,), *pairs):
        some = replace(call, q=octets[:, list(heads)].contiguous().view(torch.float8_e4m3fn))
        assert_same_bits(scores_of(backend, some), whole[list(heads)])
