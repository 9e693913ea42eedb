"""The formats: E2M1 codes, E4M3 scales, the LUT, the scored key, the query cast."""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np
import pytest
import torch

from kernel import nvfp4
from kernel.backends.base import Backend
from kernel.backends.reference.quantizer import (
    E4M3_MAGNITUDES,
    e4m3_bytes,
    e4m3_values,
    magnitude_lut,
    quantize_query,
)
from tests.support.call import Call, cumulative
from tests.support.compare import assert_same_bits
from tests.support.page_bytes import EVERY_BYTE, NAN, ONE, pack_page
from tests.support.run import scores_of

E2M1 = (
    Fraction(0),
    Fraction(1, 2),
    Fraction(1),
    Fraction(3, 2),
    Fraction(2),
    Fraction(3),
    Fraction(4),
    Fraction(6),
)
"""The contract's list of magnitudes."""


def e4m3(octet: int) -> Fraction:
    """An E4M3 byte's value: sign, 4 exponent bits of bias 7, 3 mantissa bits, subnormal at exponent 0."""
    exponent, mantissa = octet >> 3 & 15, octet & 7
    magnitude = (
        Fraction(mantissa, 8) * Fraction(1, 64)
        if exponent == 0
        else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )
    return -magnitude if octet & 0x80 else magnitude


def rounded(value: Fraction) -> int:
    """The byte of the E4M3 value nearest to a magnitude: of two equally near the even byte, 448 beyond it."""
    return min(range(NAN), key=lambda octet: (abs(e4m3(octet) - value), octet % 2))


@functools.cache
def expected_lut() -> list[list[int]]:
    """256 x 8 by rational arithmetic."""
    return [[rounded(m * e4m3(s & 0x7F)) if s & 0x7F != NAN else 0 for m in E2M1] for s in range(256)]


def test_e4m3_has_its_values() -> None:
    """E4M3 (float8_e4m3fn): every byte's value, by rational arithmetic and as torch reads it."""
    values = e4m3_values(EVERY_BYTE)
    finite = (EVERY_BYTE & 0x7F) != NAN
    assert [Fraction(value) for value in values[finite]] == [e4m3(int(octet)) for octet in EVERY_BYTE[finite]]
    assert np.isnan(values[~finite]).all()
    as_torch = torch.from_numpy(EVERY_BYTE.copy()).view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(values, as_torch, equal_nan=True)


def test_the_lut_holds_every_rounded_product() -> None:
    """LUT: 256 x 8 bytes, e4m3(e2m1 * scale); NaN scales read as 0, a scale's sign is not in it."""
    expected = torch.tensor(expected_lut(), dtype=torch.uint8)
    assert_same_bits(torch.from_numpy(magnitude_lut()), expected)
    assert_same_bits(nvfp4.build_lut("cpu"), expected)
    assert expected[0x7E].tolist() == [0, 0x76, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E]  # saturates at 448


def test_every_scale_and_code_is_scored_as_its_rounded_product(backend: Backend) -> None:
    """Scored key = e4m3_rne_satfinite(e2m1 * scale); either sign bit flips it; NaN scales read as 0.

    Page p's first token has scale byte 8p + g in group g and the 16 codes as its dims. Request 32p + r asks
    with one-hot queries of four heads for its dims 4r to 4r + 3, so that one product decides each score.
    """
    pages = np.zeros((32, 9216), dtype=np.uint8)
    for page in range(32):
        codes, scales = np.zeros((128, 128), dtype=np.uint8), np.zeros((128, 8), dtype=np.uint8)
        codes[0] = np.tile(np.arange(16), 8)
        scales[0] = np.arange(8 * page, 8 * page + 8)
        pages[page] = pack_page(codes, scales)
    queries = np.tile(np.eye(128, dtype=np.uint8) * ONE, (32, 1)).reshape(1024, 4, 128)
    call = Call(
        q=torch.from_numpy(queries).view(torch.float8_e4m3fn),
        pages=torch.from_numpy(pages),
        block_table=torch.arange(32, dtype=torch.int32).repeat_interleave(32)[:, None],
        cu_seqlens_q=cumulative([1] * 1024),
        seq_lens=torch.ones(1024, dtype=torch.int32),
    )
    scores = scores_of(backend, call)[:, :, 0].T.reshape(256, 16)
    lut = expected_lut()
    for scale in range(256):
        for code in range(16):
            magnitude = e4m3(lut[scale][code & 7])
            expected = -magnitude if (code >> 3) ^ (scale >> 7) else magnitude
            assert Fraction(scores[scale, code].item()) == expected, f"scale {scale:#x}, code {code}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_are_cast_saturating_to_the_nearest_even(dtype: torch.dtype) -> None:
    """Query cast: saturating RNE to E4M3, no scale; every bfloat16 and every float16."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = values[torch.isfinite(values)]
    expected = torch.from_numpy(quantize_query(values.double().numpy()))
    assert_same_bits(nvfp4.quantize_query(values).view(torch.uint8), expected)
    in_range = values.abs() < 464
    assert_same_bits(expected[in_range], values[in_range].float().to(torch.float8_e4m3fn).view(torch.uint8))


def test_queries_next_to_a_midpoint_go_to_the_nearer_side() -> None:
    """RNE on float32: halfway goes to the even byte, and the next float32 on either side to its own side."""
    midpoints = ((E4M3_MAGNITUDES[:-1] + E4M3_MAGNITUDES[1:]) / 2).astype(np.float32)
    below, above = np.nextafter(midpoints, np.float32(0)), np.nextafter(midpoints, np.float32(1e9))
    values = np.concatenate([below, midpoints, above])
    lower = np.arange(0x7E)
    expected = np.concatenate([lower, lower + lower % 2, lower + 1]).astype(np.uint8)
    assert_same_bits(torch.from_numpy(e4m3_bytes(values)), torch.from_numpy(expected))
    assert_same_bits(
        nvfp4.quantize_query(torch.from_numpy(values)).view(torch.uint8), torch.from_numpy(expected)
    )


@pytest.mark.parametrize("value", [448.0, 464.0, 465.0, 479.9, 1e9, 3.4e38])
def test_queries_saturate_at_448(value: float) -> None:
    """Saturating cast: nothing past 448 becomes NaN, also where torch's own cast gives one."""
    for sign in (1, -1):
        expected = 0x7E if sign > 0 else 0xFE
        assert nvfp4.quantize_query(torch.tensor([sign * value])).view(torch.uint8).item() == expected
        assert quantize_query(np.array([sign * value])).item() == expected
