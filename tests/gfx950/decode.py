"""Runs the decode scorer through FlyDSL's launcher on the simulated device."""

from __future__ import annotations

import functools

import torch

from kernel.backends.flydsl.geometry import Layout
from kernel.backends.flydsl.launch import DecodeLauncher
from kernel.gfx950 import Schedule
from kernel.gfx950.hip import simulated_device
from kernel.plan import MAXIMA_BLOCKS
from tests.gfx950.prefill import POISON, device_with, group_maxima
from tests.support.call import Call
from tests.support.compare import assert_same_bits, oracle_scores


@functools.cache
def launcher(layout: Layout = "registers") -> DecodeLauncher:
    """One launcher of a layout for all tests: it keeps its compiled kernels."""
    return DecodeLauncher(simulated_device(), layout)


def decoded(
    call: Call,
    *,
    compute_units: int = 256,
    schedule: Schedule | None = None,
    columns: int | None = None,
    maxima: bool = False,
    fill: bool = True,
    layout: Layout = "registers",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores ``[H, total_q, columns]`` and, if asked for, the maxima of their 16-block groups."""
    batch = call.batch()
    width = batch.num_score_blocks if columns is None else columns
    scores = torch.full((call.num_heads, call.total_q, width), POISON)
    groups = torch.full((*scores.shape[:2], -(-width // MAXIMA_BLOCKS)), POISON) if maxima else None
    with device_with(compute_units, schedule):
        launcher(layout)(batch, scores, groups, fill=fill)
    return scores, groups


def assert_exact(
    call: Call,
    *,
    compute_units: int = 256,
    schedule: Schedule | None = None,
    columns: int | None = None,
    layout: Layout = "registers",
) -> None:
    """The oracle's bits in every cell, with and without maxima, and theirs in the maxima."""
    expected = oracle_scores(call, columns)
    for maxima in (False, True):
        scores, groups = decoded(
            call,
            compute_units=compute_units,
            schedule=schedule,
            columns=columns,
            maxima=maxima,
            layout=layout,
        )
        assert_same_bits(scores, expected)
        if groups is not None:
            assert_same_bits(groups, group_maxima(expected))
