"""Lengths, offsets and ids that a captured launch cannot refuse: nothing is touched out of bounds.

The simulated device faults on any access outside the tensors of a launch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernel.backends.flydsl.launch import DeviceRequests
from kernel.batch import ScoreBatch
from kernel.contract import SUPPORTED_HEADS
from kernel.errors import LaunchError
from kernel.gfx950 import RaceError
from tests.gfx950.decode import launcher
from tests.gfx950.prefill import POISON, device_with, group_maxima
from tests.support.call import Call
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, oracle_scores

LEAST, MOST = -(2**31), 2**31 - 1
COLUMNS, TOKENS, BATCH = 6, 9, 9


def hostile(heads: int, local_blocks: int) -> tuple[Call, ScoreBatch, DeviceRequests]:
    """A legal call of one query at the end of five blocks, and a batch of it and eight illegal requests."""
    good = random_call([(600, 1)], heads, seed=9).forcing(0, local_blocks)
    random = np.random.default_rng(heads)
    num_pages = good.pages.shape[0]
    ids = np.array([-1, MOST, LEAST, num_pages, 0, 1], np.int32)
    table = torch.from_numpy(random.choice(ids, (BATCH, COLUMNS - 1)))
    table[0] = good.block_table[0, :5]
    queries = good.q.view(torch.uint8).expand(TOKENS, -1, -1).contiguous().view(torch.float8_e4m3fn)
    seq_lens = [600, MOST, -5, 100_000, 3, LEAST, 640, 1, 513]
    bounds = [0, 1, 2, 3, 4, 2, MOST, LEAST, 7, 9]
    table_rows = [0, 1, BATCH, MOST, -1, LEAST, 6, 7, 8]
    columns = (table_rows, bounds[:-1], bounds[1:], seq_lens)
    requests = DeviceRequests(*(torch.tensor(column, dtype=torch.int32) for column in columns))
    good = replace(good, block_table=good.block_table[:, : COLUMNS - 1])
    return good, replace(good.batch(), q=queries, block_table=table), requests


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
@pytest.mark.parametrize("local_blocks", [0, 1])
@pytest.mark.parametrize("wants_maxima", [False, True])
def test_nothing_leaves_the_buffers(heads: int, local_blocks: int, wants_maxima: bool) -> None:
    """Whatever the others hold, the legal request's row is exact."""
    legal, batch, requests = hostile(heads, local_blocks)
    scores = torch.full((heads, TOKENS, COLUMNS), POISON)
    maxima = torch.full((heads, TOKENS, 1), POISON) if wants_maxima else None
    for compute_units in (1, 4):
        with device_with(compute_units):
            launcher().launch(batch, requests, scores, maxima)
        expected = oracle_scores(legal, COLUMNS)
        assert_same_bits(scores[:, :1], expected)
        if maxima is not None:
            assert_same_bits(maxima[:, :1], group_maxima(expected))


@pytest.mark.parametrize("seed", range(2))
def test_every_number_may_be_anything(seed: int) -> None:
    """Seeded garbage in all four arrays and the block table. Requests may then claim the same rows, which the
    device tells at the end of a launch as a race of their stores; an access outside ends it at once."""
    _, batch, _ = hostile(4, 0)
    random = np.random.default_rng(seed)
    extremes = np.array([LEAST, LEAST + 1, -200, -1, 0, 1, 5, 9, 16, 129, 1000, MOST - 127, MOST - 1, MOST])
    garbage = random.choice(extremes, (4, 70)).astype(np.int32)
    table = torch.from_numpy(random.choice(extremes, (BATCH, COLUMNS)).astype(np.int32))
    scores, maxima = torch.full((4, TOKENS, 20), POISON), torch.full((4, TOKENS, 2), POISON)
    requests = DeviceRequests(*torch.from_numpy(garbage))
    with device_with(1):
        try:
            launcher().launch(replace(batch, block_table=table), requests, scores, maxima)
        except LaunchError as error:
            if not isinstance(error.__cause__, RaceError):
                raise
