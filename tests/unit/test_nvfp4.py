"""The torch numerics against exact arithmetic and against the oracle's quantiser."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernel import nvfp4
from kernel.backends.reference import quantizer
from kernel.contract import HEAD_DIM

MAGNITUDES = [
    Fraction(byte & 7) * Fraction(1, 512)
    if byte < 8
    else Fraction(8 + (byte & 7), 8) * Fraction(2) ** ((byte >> 3) - 7)
    for byte in range(0x7F)
]
"""The E4M3 magnitudes of bytes 0x00 to 0x7E."""
MIDPOINTS = [(low + high) / 2 for low, high in itertools.pairwise(MAGNITUDES)]


def e4m3_byte(value: Fraction) -> int:
    """Byte of the nearest magnitude, ties to the even byte, saturating; exact."""
    below = sum(midpoint < value for midpoint in MIDPOINTS)
    on_midpoint = below < len(MIDPOINTS) and MIDPOINTS[below] == value
    return below + (below & 1) if on_midpoint else below


def rounded_bytes(values: torch.Tensor) -> NDArray[np.uint8]:
    """What E4M3 bytes float32 values should round to: bracketed by the exact midpoints."""
    numbers = values.double().numpy()
    midpoints = np.array([float(midpoint) for midpoint in MIDPOINTS])
    below = np.searchsorted(midpoints, np.abs(numbers), side="left")
    on_midpoint = midpoints[np.minimum(below, len(midpoints) - 1)] == np.abs(numbers)
    below = below + (below & 1) * on_midpoint
    encoded: NDArray[np.uint8] = (below + 0x80 * np.signbit(numbers)).astype(np.uint8)
    return encoded


def around(values: list[Fraction], steps: int = 2) -> torch.Tensor:
    """float32 values and their neighbours, ``steps`` places up and down, of both signs."""
    bits = torch.tensor([float(value) for value in values]).view(torch.int32)
    near = (bits[:, None] + torch.arange(-steps, steps + 1)).clamp(min=0).view(-1).to(torch.int32)
    magnitudes = near.view(torch.float32)
    return torch.cat((magnitudes, -magnitudes))


def test_exact_oracle_of_this_file() -> None:
    assert [e4m3_byte(value) for value in MAGNITUDES] == list(range(0x7F))
    assert [float(MAGNITUDES[byte]) for byte in (1, 8, 0x38, 0x7E)] == [2.0**-9, 2.0**-6, 1.0, 448.0]
    assert e4m3_byte(Fraction(3, 1024)) == 2
    assert e4m3_byte(Fraction(1, 1024)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_query_cast_of_every_16_bit_value(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    values = values[~values.isnan()]
    assert np.array_equal(
        nvfp4.quantize_query(values).view(torch.uint8).numpy(), rounded_bytes(values.float())
    )


def test_query_cast_next_to_every_midpoint() -> None:
    extremes = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 464.0, 465.0, -1e30, torch.inf, -torch.inf])
    values = torch.cat((around(MIDPOINTS), around(MAGNITUDES[1:]), extremes))
    assert np.array_equal(nvfp4.quantize_query(values).view(torch.uint8).numpy(), rounded_bytes(values))


def test_lut_is_exact() -> None:
    codes = [Fraction(magnitude) for magnitude in nvfp4.E2M1_MAGNITUDES]
    expected = [[e4m3_byte(scale * code) for code in codes] for scale in MAGNITUDES] + [[0] * 8]
    lut = nvfp4.build_lut("cpu")
    assert (lut.shape, lut.dtype) == ((256, 8), torch.uint8)
    assert lut[:128].tolist() == expected
    assert torch.equal(lut[128:], lut[:128])


def test_dequantize_every_scale_and_code_byte() -> None:
    scale_bytes = torch.arange(256, dtype=torch.uint8)[:, None, None].expand(256, 32, 8)
    code_bytes = torch.arange(256, dtype=torch.uint8).view(1, 32, 8).repeat(256, 1, 8)
    values = nvfp4.dequantize(code_bytes, scale_bytes)
    assert (values.shape, values.dtype) == ((256, 32, HEAD_DIM), torch.float32)
    for scale in range(256):
        magnitude = MAGNITUDES[scale & 0x7F] if scale & 0x7F != 0x7F else Fraction(0)
        products = [float(MAGNITUDES[e4m3_byte(magnitude * Fraction(m))]) for m in nvfp4.E2M1_MAGNITUDES]
        by_code = [*products, *(-product for product in products)]
        if scale & 0x80:
            by_code = [-value for value in by_code]
        pairs = values[scale, :, :16].reshape(256, 2).tolist()
        assert pairs == [[by_code[byte & 0xF], by_code[byte >> 4]] for byte in range(256)]
    assert torch.equal(values[..., :16].repeat(1, 1, 8), values)


def test_dequantized_groups_take_their_own_scale() -> None:
    codes = torch.full((2, 64), 0x22, dtype=torch.uint8)  # 1.0 everywhere
    scales = torch.arange(0x30, 0x40, dtype=torch.uint8).view(2, 8)
    expected = [float(MAGNITUDES[scale]) for scale in range(0x30, 0x40)]
    assert nvfp4.dequantize(codes, scales).view(16, 16).tolist() == [[value] * 16 for value in expected]


def test_scale_of_every_midpoint() -> None:
    """amax / 6 next to a midpoint of two scales: float32 division must not decide otherwise than exact."""
    largest = around([6 * midpoint for midpoint in MIDPOINTS], steps=3)
    largest = largest[largest != 0]
    keys = torch.zeros(largest.shape[0], HEAD_DIM)
    keys[:, 5] = largest
    scales = nvfp4.quantize_keys(keys)[1]
    expected = [max(e4m3_byte(abs(Fraction(value)) / 6), 1) for value in largest.tolist()]
    assert scales[:, 0].tolist() == expected
    assert bool((scales[:, 1:] == 1).all())


def test_codes_next_to_every_threshold() -> None:
    """Each scale with each threshold, hit exactly and missed by one place: ties go to the smaller one."""
    for scale in range(1, 0x7F):
        limits = [MAGNITUDES[scale] * Fraction(threshold) for threshold in nvfp4.CODE_THRESHOLDS]
        values = around(limits, steps=1)
        keys = torch.zeros(values.shape[0], HEAD_DIM)
        keys[:, 0] = float(6 * MAGNITUDES[scale])
        keys[:, 1] = values
        codes, scales = nvfp4.quantize_keys(keys)
        assert bool((scales[:, 0] == scale).all())
        magnitudes = [sum(abs(Fraction(value)) > limit for limit in limits) for value in values.tolist()]
        expected = [magnitude | 8 * (value < 0) for magnitude, value in zip(magnitudes, values.tolist())]
        assert (codes[:, 0] >> 4).tolist() == expected
        assert bool((codes[:, 0] & 0xF == 7).all())


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.0, 0), (-0.0, 0), (1e-45, 0), (-1e-45, 8), (-1e-3, 8), (0.25, 0), (-0.25, 8), (6.0, 7), (-6.0, 15)],
)
def test_sign_bit_is_set_exactly_below_zero(value: float, code: int) -> None:
    keys = torch.zeros(1, HEAD_DIM)
    keys[0, 0], keys[0, 3] = 6.0, value
    codes, scales = nvfp4.quantize_keys(keys)
    assert codes[0, 1] == code << 4
    assert scales[0, 0] == 0x38


@pytest.mark.parametrize(
    ("value", "scale", "code"),
    [(0.0, 0x01, 0), (1e-30, 0x01, 0), (2688.0, 0x7E, 7), (3e38, 0x7E, 7), (-3e38, 0x7E, 15)],
)
def test_extreme_groups(value: float, scale: int, code: int) -> None:
    codes, scales = nvfp4.quantize_keys(torch.full((1, HEAD_DIM), value))
    assert scales.tolist() == [[scale] * 8]
    assert codes.tolist() == [[code * 0x11] * 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_as_the_oracle_quantises_them(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(nvfp4._QUANTIZE_TOKENS // 8, HEAD_DIM, generator=generator)
    keys *= torch.exp2(torch.randint(-12, 9, (keys.shape[0], 1), generator=generator))
    keys[:, ::7] = (keys[:, ::7] * 4).round() / 4
    keys[3], keys[4, :40] = 0.0, -0.0
    keys = keys.to(dtype)
    codes, scales = nvfp4.quantize_keys(keys)
    expected_codes, expected_scales = quantizer.quantize_keys(keys.double().numpy())
    assert np.array_equal(scales.numpy(), expected_scales)
    assert np.array_equal(codes.numpy(), expected_codes[:, ::2] | expected_codes[:, 1::2] << 4)
    values = quantizer.dequantize_keys(expected_codes, expected_scales)
    assert np.array_equal(nvfp4.dequantize(codes, scales).double().numpy(), values)


def test_chunks_and_strided_keys_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(21, 2 * HEAD_DIM, generator=torch.Generator().manual_seed(3))[:, ::2]
    codes, scales = nvfp4.quantize_keys(keys)
    monkeypatch.setattr(nvfp4, "_QUANTIZE_TOKENS", 4)
    chunked_codes, chunked_scales = nvfp4.quantize_keys(keys.contiguous())
    assert torch.equal(codes, chunked_codes)
    assert torch.equal(scales, chunked_scales)


def test_no_keys() -> None:
    codes, scales = nvfp4.quantize_keys(torch.zeros(0, HEAD_DIM))
    assert (codes.shape, scales.shape) == ((0, 64), (0, 8))
    assert nvfp4.dequantize(codes, scales).shape == (0, HEAD_DIM)
