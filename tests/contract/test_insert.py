"""Insert: keys to codes and scales as the contract has it, written to their slots and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel.backends.base import Backend
from kernel.backends.reference.quantizer import E4M3_MAGNITUDES
from tests.support.calls import strided_pages
from tests.support.compare import assert_same_bits, flushed_denormals, inserted, oracle_inserted

THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
SCALES = [float(value) for value in E4M3_MAGNITUDES[1:]]
"""Every scale a writer may write: 2^-9 to 448."""


def assert_inserted_like_the_oracle(backend: Backend, keys: torch.Tensor) -> None:
    """Insert keys at consecutive slots of a cache and compare every byte."""
    pages = torch.full((keys.shape[0] // 128 + 1, 9216), 0xA5, dtype=torch.uint8)
    slots = torch.arange(keys.shape[0])
    assert_same_bits(inserted(backend, keys, pages, slots), oracle_inserted(keys, pages, slots))


def keys_of(groups: torch.Tensor) -> torch.Tensor:
    """Keys ``[n, 128]`` of groups ``[m, 16]``, padded with zero groups."""
    padding = -groups.shape[0] % 8
    return torch.cat([groups, torch.zeros(padding, 16, dtype=groups.dtype)]).view(-1, 128)


@pytest.mark.parametrize("scale", [2.0**-9, 7 * 2.0**-9, 0.1015625, 1.0, 1.875, 13.0, 448.0])
def test_every_bfloat16_gets_the_code_of_the_oracle(backend: Backend, scale: float) -> None:
    """The code counts the thresholds * scale that |x| strictly exceeds: every bfloat16 up to 6 * scale."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    values = values[values.float().abs() <= 6 * scale]
    values = torch.cat([values, torch.zeros(-values.numel() % 15, dtype=torch.bfloat16)]).view(-1, 15)
    largest = torch.full((values.shape[0], 1), 6 * scale, dtype=torch.bfloat16)
    assert largest[0].item() == 6 * scale
    assert_inserted_like_the_oracle(backend, keys_of(torch.cat([largest, values], dim=1)))


def test_every_bfloat16_amax_gets_the_scale_of_the_oracle(backend: Backend) -> None:
    """scale = e4m3_rne(clamp(amax/6, 2^-9, 448)), for every finite bfloat16 alone in a group."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    values = values[torch.isfinite(values)]
    groups = torch.zeros(values.numel(), 16, dtype=torch.bfloat16)
    groups[:, 5] = values
    assert_inserted_like_the_oracle(backend, keys_of(groups))


@pytest.mark.parametrize("sign", [1, -1])
def test_ties_go_to_the_smaller_magnitude(backend: Backend, sign: int) -> None:
    """Every scale: |x| = threshold * scale has the lower code, the next float32 above it the upper one.

    No oracle: the codes follow from the sentence.
    """
    for step, first_code in ((0, 0), (1, 1), (-1, 0)):
        limits = torch.tensor(SCALES)[:, None] * torch.tensor(THRESHOLDS)
        values = limits if step == 0 else torch.nextafter(limits, torch.tensor(torch.inf * step))
        groups = torch.zeros(len(SCALES), 16)
        groups[:, 0] = torch.tensor(SCALES) * 6
        groups[:, 1:8] = sign * values
        pages = torch.zeros(1, 9216, dtype=torch.uint8)
        written = inserted(backend, keys_of(groups), pages, torch.arange(-(-len(SCALES) // 8)))
        for row in range(len(SCALES)):
            octets = written[0, row * 8 : row * 8 + 4].tolist()
            codes = [nibble for octet in octets for nibble in (octet & 15, octet >> 4)]
            below = [first_code + index for index in range(7)]
            assert codes == [7] + [code + (8 if sign < 0 else 0) for code in below], f"scale {SCALES[row]}"
            assert written[0, 8192 + row] == row + 1


def test_scales_round_to_the_nearest_even(backend: Backend) -> None:
    """amax/6 halfway between two E4M3 values goes to the even byte; one float32 step decides otherwise.

    No oracle: amax = 6 * midpoint is exact in float32. A reciprocal of 6 or another order would miss some.
    """
    midpoints = torch.from_numpy((E4M3_MAGNITUDES[1:-1] + E4M3_MAGNITUDES[2:]) / 2)
    halfway = (6 * midpoints).float()
    lower = torch.arange(1, 0x7E)
    for amax, expected in (
        (halfway, lower + lower % 2),
        (torch.nextafter(halfway, torch.tensor(0.0)), lower),
        (torch.nextafter(halfway, torch.tensor(torch.inf)), lower + 1),
    ):
        groups = torch.zeros(len(lower), 16)
        groups[:, 15] = -amax
        pages = torch.zeros(1, 9216, dtype=torch.uint8)
        written = inserted(backend, keys_of(groups), pages, torch.arange(-(-len(lower) // 8)))
        assert written[0, 8192 : 8192 + len(lower)].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("value", "scale_byte", "code"),
    [
        (0.0, 0x01, 0),
        (-0.0, 0x01, 0),
        (1e-45, 0x01, 0),
        (-1e-45, 0x01, 8),
        (-1e-30, 0x01, 8),
        (2.0**-11, 0x01, 0),
        (-(2.0**-11), 0x01, 8),
        (1.0001 * 2.0**-11, 0x01, 1),
        (6 * 2.0**-9, 0x01, 7),
        (2688.0, 0x7E, 7),
        (-2688.0, 0x7E, 15),
        (2689.0, 0x7E, 7),
        (3.4e38, 0x7E, 7),
        (-3.4e38, 0x7E, 15),
    ],
)
def test_extreme_values(backend: Backend, value: float, scale_byte: int, code: int) -> None:
    """Zero groups get scale 2^-9 and codes 0, -0.0 code 0, a tiny negative x code 8; no scale passes 448."""
    keys = torch.zeros(1, 128)
    keys[0, 17] = value
    pages = torch.full((1, 9216), 0xEE, dtype=torch.uint8)
    written = inserted(backend, keys, pages, torch.tensor([9]))
    codes, scales = written[0, 9 * 64 : 10 * 64].tolist(), written[0, 8192 + 72 : 8192 + 80].tolist()
    assert scales == [0x01, scale_byte] + [0x01] * 6
    assert codes == [0] * 8 + [code << 4] + [0] * 55


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_random_keys_get_the_bytes_of_the_oracle(backend: Backend, dtype: torch.dtype, seed: int) -> None:
    """Every key type, magnitudes from tiny to large in one key, at scattered slots of a strided cache."""
    random = np.random.default_rng(seed)
    wide = random.standard_normal((150, 128)) * 2.0 ** random.integers(-14, 14, (150, 128))
    keys = torch.from_numpy(wide).clamp(-60000, 60000).to(dtype)
    pages = strided_pages(7, 9216 + 16 * seed)
    pages.fill_(0x3C)
    slots = torch.from_numpy(random.permutation(7 * 128)[:150])
    assert_same_bits(inserted(backend, keys, pages, slots), oracle_inserted(keys, pages, slots))


def test_negative_slots_are_skipped(backend: Backend) -> None:
    """A negative slot is skipped: nothing is written for it, before the cache least of all."""
    storage = torch.full((4, 9216), 0x77, dtype=torch.uint8, device=backend.device)
    keys = torch.ones(5, 128, device=backend.device)
    slots = torch.tensor([-1, 130, -128, -(2**40), 255], device=backend.device)
    backend.insert(keys, storage[1:3], slots)
    expected = torch.full((2, 9216), 0x77, dtype=torch.uint8)
    expected = oracle_inserted(torch.ones(2, 128), expected, torch.tensor([130, 255]))
    assert_same_bits(storage[1:3].cpu(), expected)
    assert bool((storage[0] == 0x77).all())
    assert bool((storage[3] == 0x77).all())


def test_gaps_between_pages_are_left_alone(backend: Backend) -> None:
    """Only the 9,216 bytes of a page are written, and none of the bytes between pages."""
    slab = torch.full((3, 9216 + 48), 0x66, dtype=torch.uint8, device=backend.device)
    pages = slab[:, :9216]
    backend.insert(
        torch.ones(384, 128, device=backend.device), pages, torch.arange(384, device=backend.device)
    )
    assert bool((slab[:, 9216:] == 0x66).all())
    assert not bool((slab[:, :9216] == 0x66).any())


def test_no_keys_change_nothing(backend: Backend) -> None:
    """n = 0 is legal."""
    pages = torch.full((1, 9216), 0x42, dtype=torch.uint8)
    written = inserted(backend, torch.zeros(0, 128), pages, torch.zeros(0, dtype=torch.int64))
    assert_same_bits(written, pages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_the_host_does_to_denormals_changes_no_byte(backend: Backend, dtype: torch.dtype) -> None:
    """Flushed, a negative denormal loses its sign; the gfx950 kernel computes codes in denormals, too.

    No oracle: the codes follow from the sentence, and those of ordinary keys from the same call before.
    """
    tiny = torch.finfo(dtype).smallest_normal
    groups = torch.randn(8, 16, generator=torch.Generator().manual_seed(9)).to(dtype)
    groups[::2, 1:] = 0.0  # beside a large key, and alone
    groups[0, 0] = groups[2, 0] = 0.0
    groups[:, 2], groups[:, 3], groups[:, 4] = tiny / 2, -tiny / 4, -0.0
    assert bool((groups[:, 2] > 0).all())
    assert bool((groups[:, 3] < 0).all())
    pages, slots = torch.zeros(1, 9216, dtype=torch.uint8), torch.arange(1)
    written = inserted(backend, keys_of(groups), pages, slots)
    assert torch.equal(written[0, 1:64:8] >> 4, torch.full((8,), 8, dtype=torch.uint8)), (
        "the sign of -denormal"
    )
    assert torch.equal(written[0, 1:64:8] & 15, torch.zeros(8, dtype=torch.uint8)), "a denormal"
    assert torch.equal(written[0, 2:64:8] & 15, torch.zeros(8, dtype=torch.uint8)), "-0.0"
    with flushed_denormals():
        assert_same_bits(inserted(backend, keys_of(groups), pages, slots), written)
