"""Arithmetic that has to be IEEE's is, whatever the thread's floating-point environment was before."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kernel.float_environment import default_float_environment
from tests.support.compare import flushed_denormals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="FE_DFL_ENV is glibc's and musl's")
LEAST = np.array([1e-45], dtype=np.float32)
UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}
"""FE_UPWARD."""


THIRD = 1 / 3


def is_kept() -> bool:
    """Whether arithmetic keeps the least denormal."""
    return bool((LEAST * np.float32(2) > 0).all())


def third() -> float:
    """A quotient that is rounded."""
    return float((np.ones(1) / np.full(1, 3.0))[0])


@pytest.fixture
def rounding_upward() -> Iterator[None]:
    mode = UPWARD.get(platform.machine())
    if mode is None:
        pytest.skip("FE_UPWARD of this CPU is not known here")
    process = ctypes.CDLL(None)
    before = process.fegetround()
    process.fesetround(mode)
    yield
    process.fesetround(before)


def test_denormals_are_kept_inside_and_flushed_again_behind() -> None:
    assert is_kept()
    with flushed_denormals():
        assert not is_kept()
        with default_float_environment():
            assert is_kept()
        assert not is_kept()
    assert is_kept()


def test_rounding_is_to_nearest_inside_and_as_it_was_behind(rounding_upward: None) -> None:
    def failing() -> None:
        with default_float_environment():
            assert third() == THIRD
            raise ZeroDivisionError

    assert third() > THIRD
    with pytest.raises(ZeroDivisionError):
        failing()
    assert third() > THIRD
