"""Comparisons that name the first cell that differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernel.backends.base import SCORE_TOLERANCE, Backend, Order, Precision
from kernel.backends.reference import ReferenceBackend
from kernel.backends.reference.backend import score_bounds
from tests.support.calls import Call, pages_on


def oracle_scores(call: Call, columns: int | None = None) -> torch.Tensor:
    """The oracle's scores ``[H, total_q, columns]``; NaN in rows of no request, of which there are none."""
    batch = call.batch()
    scores = torch.full(
        (call.num_heads, call.total_q, batch.num_score_blocks if columns is None else columns), float("nan")
    )
    ReferenceBackend().score(batch, scores)
    return scores


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless two tensors have one shape, one dtype and the same bytes."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if actual.dtype == torch.float32:
        differ = actual.contiguous().view(torch.int32) != expected.contiguous().view(torch.int32)
    else:
        differ = actual != expected
    if bool(differ.any()):
        cell = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(differ.sum())} of {differ.numel()} cells differ, the first at {cell}: "
            f"{actual[cell].item()!r} instead of {expected[cell].item()!r}"
        )


def assert_within_bounds(scores: torch.Tensor, call: Call, precision: Precision) -> None:
    """Fail unless scores lie within the bound of the oracle's, and sentinels and -inf are equal."""
    expected, actual = oracle_scores(call), scores
    assert actual.shape == expected.shape
    computed = torch.isfinite(expected) & (expected.abs() < 1e28)
    assert_same_bits(actual[~computed], expected[~computed])
    values = expected[computed].numpy().astype(np.float64)
    errors = np.abs(actual[computed].numpy().astype(np.float64) - values)
    # The oracle's own rounding to float32 is not the backend's error.
    allowed: NDArray[np.float64] = (
        SCORE_TOLERANCE[precision] * score_bounds(call.batch())[computed.numpy()] + np.abs(values) * 2.0**-24
    )
    outside = ~(errors <= allowed)  # NaN is outside
    assert not outside.any(), f"{outside.sum()} of {outside.size} scores differ by more than the bound"


# Top-k by the contract's sentence, one row at a time in plain Python: it checks the oracle's as well.


def selected_row(scores: list[float], num_blocks: int, topk: int) -> list[int]:
    """Score descending, ties to the lower id, NaN as -inf, -1 where there are fewer than ``topk`` blocks."""

    def score(block: int) -> float:
        return -math.inf if math.isnan(scores[block]) else scores[block]

    best = sorted(range(num_blocks), key=lambda block: (-score(block), block))[:topk]
    return best + [-1] * (topk - len(best))


def selected(scores: torch.Tensor, num_blocks: torch.Tensor, topk: int) -> torch.Tensor:
    """Block ids ``[H, total_q, topk]`` of scores ``[H, total_q, S]``."""
    rows = [
        [selected_row(row, nb, topk) for row, nb in zip(head, num_blocks.tolist(), strict=True)]
        for head in scores.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int32).view(*scores.shape[:2], topk)


def in_block_order(block_ids: torch.Tensor) -> torch.Tensor:
    """The same set ascending, -1 last."""
    rows = [
        sorted(block for block in row if block >= 0) + [-1] * row.count(-1)
        for row in block_ids.flatten(0, 1).tolist()
    ]
    return torch.tensor(rows, dtype=torch.int32).view(block_ids.shape)


# What the oracle writes.


def oracle_inserted(keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What host pages become when the oracle inserts keys: a copy ``[num_pages, 9216]``."""
    written = pages.clone(memory_format=torch.contiguous_format)
    ReferenceBackend().insert(keys, written, slots)
    return written


# Run a backend on a call from the host and bring the result back, watching what it must not touch.

UNTOUCHED = -777.25
"""What score buffers hold before a call: no score of any test."""
UNTOUCHED_ID = -777
DECODE_QUERIES = 16
"""Most queries of a request that a backend decodes."""


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """The host's arithmetic takes denormals for zero and makes none, as some libraries have it."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def without_decode(backend: Backend) -> Iterator[None]:
    """Makes a backend score every request as prefill."""
    most, backend.max_decode_queries = backend.max_decode_queries, 0
    try:
        yield
    finally:
        backend.max_decode_queries = most


def scores_of(backend: Backend, call: Call, columns: int | None = None) -> torch.Tensor:
    """The scores ``[H, total_q, columns]`` on the host, from prefill; decode must give the same bits.

    Requests of few queries are scored again as the backend does by itself; other rows must stay untouched.
    """
    batch = call.batch(backend.device)
    shape = (call.num_heads, call.total_q, batch.num_score_blocks if columns is None else columns)
    scores = torch.full(shape, UNTOUCHED, device=backend.device)
    with without_decode(backend):
        backend.score(batch, scores)
    scores = scores.cpu()

    few = [request for request in batch.requests if request.query_len <= DECODE_QUERIES]
    decoded = torch.full(shape, UNTOUCHED, device=backend.device)
    backend.score(batch.subset(few), decoded)
    expected = torch.full(shape, UNTOUCHED)
    for request in few:
        rows = slice(request.query_start, request.query_start + request.query_len)
        expected[:, rows] = scores[:, rows]
    assert_same_bits(decoded.cpu(), expected)
    return scores


def topk_of(
    backend: Backend, scores: torch.Tensor, num_blocks: torch.Tensor, topk: int, order: Order = "score"
) -> torch.Tensor:
    """Block ids ``[H, total_q, topk]`` on the host."""
    block_ids = torch.full((*scores.shape[:2], topk), UNTOUCHED_ID, dtype=torch.int32, device=backend.device)
    backend.topk(scores.to(backend.device), num_blocks.to(backend.device), block_ids, order)
    return block_ids.cpu()


def selection_of(backend: Backend, call: Call, topk: int, order: Order = "score") -> torch.Tensor:
    """Block ids ``[H, total_q, topk]`` on the host, without a score buffer."""
    block_ids = torch.full(
        (call.num_heads, call.total_q, topk), UNTOUCHED_ID, dtype=torch.int32, device=backend.device
    )
    backend.select(call.batch(backend.device), block_ids, order)
    return block_ids.cpu()


def inserted(backend: Backend, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What host pages become when keys are inserted: a copy ``[num_pages, 9216]`` on the host."""
    device_pages = pages_on(pages.clone(), backend.device)
    backend.insert(keys.to(backend.device), device_pages, slots.to(backend.device))
    return device_pages.cpu()
