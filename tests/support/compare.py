"""Comparisons that name the first cell that differs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.backends.base import SCORE_TOLERANCE, Precision
from kernel.backends.reference import ReferenceBackend
from kernel.backends.reference.backend import score_bounds
from tests.support.call import Call


def oracle_scores(call: Call, columns: int | None = None) -> torch.Tensor:
    """The oracle's scores ``[H, total_q, columns]``; NaN in rows of no request, of which there are none."""
    batch = call.batch()
    scores = torch.full(
        (call.num_heads, call.total_q, batch.num_score_blocks if columns is None else columns), float("nan")
    )
    ReferenceBackend().score_prefill(batch, scores)
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
