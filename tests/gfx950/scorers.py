"""Runs the prefill and decode scorers through FlyDSL's launchers on the simulated device."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kernel.backends.flydsl.geometry import Layout
from kernel.backends.flydsl.launch import DecodeLauncher, DeviceRequests, PrefillLauncher, request_fields
from kernel.batch import ScoreBatch
from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import Schedule
from kernel.gfx950.hip import SimulatedDevice, simulated_device
from kernel.plan import MAXIMA_BLOCKS
from kernel.step import Lengths
from tests.support.calls import Call
from tests.support.compare import assert_same_bits, oracle_scores

POISON = float("nan")
"""What outputs hold before a launch: no score is NaN."""


def heads_in_turn(values: Iterable[Any]) -> list[Any]:
    """Pairs of ``heads`` and a value; heads take turns, and the other pairs of a value are nightly."""
    return [
        pytest.param(heads, value, marks=() if at % 3 == turn else pytest.mark.nightly)
        for at, value in enumerate(values)
        for turn, heads in enumerate(SUPPORTED_HEADS)
    ]


HEADS = [pytest.param(n, marks=() if n == 4 else pytest.mark.nightly) for n in SUPPORTED_HEADS]
"""For what one number of heads shows: the others are nightly."""


@contextmanager
def device_with(compute_units: int = 256, schedule: Schedule | None = None) -> Iterator[SimulatedDevice]:
    """The simulated device with other properties: fewer compute units give longer segments."""
    device = simulated_device()
    before = device.schedule
    device.compute_units = compute_units
    device.schedule = schedule or before
    try:
        yield device
    finally:
        device.schedule = before
        del device.compute_units  # back to the class's


def scored(
    call: Call,
    *,
    compute_units: int = 256,
    schedule: Schedule | None = None,
    columns: int | None = None,
    maxima: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores ``[H, total_q, columns]`` and, if asked for, the maxima of their 16-block groups."""
    batch = call.batch()
    width = batch.num_score_blocks if columns is None else columns
    scores = torch.full((call.num_heads, call.total_q, width), POISON)
    groups = torch.full((*scores.shape[:2], -(-width // MAXIMA_BLOCKS)), POISON) if maxima else None
    with device_with(compute_units, schedule):
        prefill(batch, scores, groups)
    return scores, groups


def prefill(batch: ScoreBatch, scores: torch.Tensor, maxima: torch.Tensor | None = None) -> None:
    """Score a batch with the prefill scorer alone."""
    lengths, columns = Lengths.of(batch.requests), batch.block_table.shape[1]
    items = launcher().work(lengths, batch.num_heads, columns, grouped=maxima is not None)
    launcher().launch(batch, torch.from_numpy(items), scores, maxima)


def group_maxima(scores: torch.Tensor) -> torch.Tensor:
    """The greatest score of each 16 blocks: ``[H, total_q, ceil(S / 16)]``."""
    padding = -scores.shape[2] % MAXIMA_BLOCKS
    padded = torch.nn.functional.pad(scores, (0, padding), value=-torch.inf)
    return padded.view(*padded.shape[:2], padded.shape[2] // MAXIMA_BLOCKS, MAXIMA_BLOCKS).amax(-1)


@functools.cache
def launcher() -> PrefillLauncher:
    """One launcher for all tests: it keeps its compiled kernels."""
    return PrefillLauncher(simulated_device())


# ---- The decode scorer ----


@functools.cache
def decode_launcher(layout: Layout = "registers") -> DecodeLauncher:
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
        decode(batch, scores, groups, fill=fill, launcher=decode_launcher(layout))
    return scores, groups


def decode(
    batch: ScoreBatch,
    scores: torch.Tensor,
    maxima: torch.Tensor | None = None,
    *,
    fill: bool = True,
    launcher: DecodeLauncher | None = None,
) -> None:
    """Score a batch with the decode scorer alone."""
    lengths = Lengths.of(batch.requests)
    fields = torch.from_numpy(request_fields(lengths[lengths.query_lens > 0]))
    launcher = launcher or decode_launcher()
    launcher.launch(batch, DeviceRequests.of(fields), scores, maxima, fill=fill)


def assert_exact(
    call: Call,
    *,
    compute_units: int = 256,
    schedule: Schedule | None = None,
    columns: int | None = None,
    layout: Layout = "registers",
    with_maxima: Iterable[bool] = (False, True),
) -> None:
    """The oracle's bits in every cell, with and without maxima, and theirs in the maxima."""
    expected = oracle_scores(call, columns)
    for maxima in with_maxima:
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
