"""The gfx950 insert kernels, compiled and interpreted: the oracle's pages, byte for byte."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.geometry import KeyType
from kernel.gfx950 import SCHEDULES, Kernel, Schedule
from tests.gfx950 import compiled
from tests.gfx950.row_launches import DTYPES, hard_keys, insert_launch

SLOW = slice(0, None, 9)
"""Every ninth scale; nightly each."""


def kernel_of(key_type: KeyType) -> Kernel:
    return compiled.kernel(geometry.insert_name(key_type))


@pytest.fixture(params=KeyType, ids=lambda key_type: str(key_type.value))
def key_type(request: pytest.FixtureRequest) -> KeyType:
    found: KeyType = request.param
    return found


def test_pages_are_the_oracles(key_type: KeyType) -> None:
    """Thresholds exactly and one step aside, ties of the scale, denormals, both zeros, skipped slots."""
    insert_launch(key_type, hard_keys(key_type, SLOW)).run(kernel_of(key_type))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_pages_are_the_oracles_at_every_scale(key_type: KeyType) -> None:
    for seed in range(3):
        insert_launch(key_type, hard_keys(key_type, slice(None), seed), seed).run(kernel_of(key_type))


@pytest.mark.parametrize("num", [1, 31, 32, 33])
def test_any_number_of_keys(key_type: KeyType, num: int) -> None:
    """Lanes past the last key load and store nothing."""
    keys = torch.randn(num, 128, generator=torch.Generator().manual_seed(num)).to(DTYPES[key_type])
    insert_launch(key_type, keys, num).run(kernel_of(key_type))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_order_of_waves_writes_the_same_bytes(schedule: Schedule) -> None:
    keys = torch.randn(70, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    insert_launch(KeyType.BFLOAT16, keys).under(schedule).run(kernel_of(KeyType.BFLOAT16))


def test_the_code_object_keeps_float32_denormals(key_type: KeyType) -> None:
    """Codes are made in fp32 denormals: flushed, every magnitude below 1 would become 0."""
    modes = re.findall(
        r"\.amdhsa_float_denorm_mode_32 (\d+)", compiled.assembly(geometry.insert_name(key_type))
    )
    assert modes == ["3"]


def test_codes_do_not_depend_on_the_reciprocals_last_bits() -> None:
    """``v_rcp_f32`` is good to one unit in the last place. Off by four, every bfloat16 gets the same code."""
    scales = np.arange(1, 0x7F, dtype=np.uint8)[::5]
    values = (np.arange(0x7F80, dtype=np.uint32)[::3] << np.uint32(16)).view(np.float32)
    for octet in scales:
        scale = float(torch.tensor([int(octet)], dtype=torch.uint8).view(torch.float8_e4m3fn).float())
        limits = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * scale
        expected = (values.astype(np.float64)[:, None] > limits).sum(1)
        for off in (-4, -1, 0, 1, 4):
            reciprocal = (np.array([1 / scale], np.float32).view(np.int32) + off).view(np.float32)
            factor = (reciprocal * np.float32(2.0**-126 * (1 - 2.0**-10))).astype(np.float32)
            with np.errstate(all="ignore"):
                bits = (values * factor).view(np.uint32)
            codes = np.minimum((bits + np.uint32(1 << 21)) >> np.uint32(22), 7)
            np.testing.assert_array_equal(codes, expected)
