"""The oracle itself: its device and precision, and the bounds that other backends are measured by."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel import nvfp4
from kernel.backends import registry
from kernel.backends.reference.backend import score_bounds
from kernel.errors import InvalidArgumentError
from kernel.page import codes_of, scales_of
from tests.support.calls import RAGGED, random_call
from tests.support.compare import oracle_scores


def test_bounds_are_the_largest_sum_of_magnitudes_of_a_cell() -> None:
    """sum_i |q_i k_i|, its maximum over the cell's causal tokens: one request by plain loops over fp64."""
    call = random_call([(290, 40)], 2, seed=81, values="inexact")
    bounds = score_bounds(call.batch())
    pages = call.pages[call.block_table[0, :3].long()]
    keys = nvfp4.dequantize(codes_of(pages), scales_of(pages)).flatten(0, 1).double().abs()
    queries = call.q.double().abs()
    for token in (0, 5, 6, 39):
        sums = queries[token] @ keys[: 250 + token + 1].T
        for block in range(3):
            seen = sums[:, 128 * block : 128 * (block + 1)]
            expected = seen.amax(1).tolist() if seen.shape[1] else [0.0, 0.0]
            assert bounds[:, token, block].tolist() == expected


def test_scores_never_exceed_their_bounds() -> None:
    """|q . k| <= sum_i |q_i k_i|; both are 0 where nothing is visible."""
    call = random_call(RAGGED, 4, seed=82, values="inexact")
    scores, bounds = oracle_scores(call).numpy().astype(np.float64), score_bounds(call.batch())
    visible = np.isfinite(scores)
    assert (np.abs(scores[visible]) <= bounds[visible] * (1 + 2.0**-24)).all()
    assert (bounds[~visible] == 0).all()


def test_scores_are_exact_whatever_the_order_of_summation() -> None:
    """A permutation of the dims permutes the sum and changes no bit: fp64 holds every partial sum."""
    call = random_call([(512, 64)], 1, seed=83, values="inexact")
    pages = call.pages[call.block_table[0, :4].long()]
    keys = nvfp4.dequantize(codes_of(pages), scales_of(pages)).flatten(0, 1).double()
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    products = call.q.double()[:, 0][:, order] @ keys[:, order].T
    products.masked_fill_(torch.arange(512) > torch.arange(448, 512)[:, None], -torch.inf)
    expected = products.view(64, 4, 128).amax(2).float()
    assert torch.equal(oracle_scores(call)[0], expected)


def test_only_the_cpu_and_exact_arithmetic_are_offered() -> None:
    """Another device or precision is refused by name."""
    with pytest.raises(InvalidArgumentError, match=r"^device = 'cuda:0': must be 'cpu'"):
        registry.create("reference", "cuda:0")
    with pytest.raises(InvalidArgumentError, match=r"^precision = 'fast': must be 'exact'"):
        registry.create("reference", precision="fast")
    assert registry.create("reference", "cpu").precision == "exact"
