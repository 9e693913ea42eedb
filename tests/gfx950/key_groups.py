"""Groups of 16 key values that are hard to quantise: on and next to every threshold, ties of the scale."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kernel.backends.flydsl.geometry import KeyType
from kernel.backends.reference.quantizer import E4M3_MAGNITUDES

THRESHOLDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
DTYPES = {
    KeyType.BFLOAT16: torch.bfloat16,
    KeyType.FLOAT16: torch.float16,
    KeyType.FLOAT32: torch.float32,
}
_SCALES = E4M3_MAGNITUDES[1:].astype(np.float64)
Float64Array = npt.NDArray[np.float64]


def hard_keys(key_type: KeyType, scales: slice, seed: int = 0) -> torch.Tensor:
    """Keys ``[n, 128]`` of the type; ``scales`` picks from the 126 scales, ascending."""
    dtype = DTYPES[key_type]
    picked = _SCALES[scales]
    thresholds = torch.cat([*_on_thresholds(picked, dtype)])
    turned = torch.roll(thresholds, 5, dims=1)  # so that every place of a group has every threshold
    groups = torch.cat(
        [thresholds, turned, *_on_midpoints(picked, dtype), *_alone(dtype), *_others(dtype, seed)]
    )
    groups = groups[torch.isfinite(groups).all(1)]  # the largest scales' limits are past float16
    padding = -groups.shape[0] % 8
    return torch.cat([groups, groups.new_zeros(padding, 16)]).reshape(-1, 128)


def _on_thresholds(scales: Float64Array, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Every threshold of a scale, and the next value of the type on either side, with both signs."""
    limits = torch.from_numpy(scales[:, None] * THRESHOLDS).to(dtype)
    exact = torch.from_numpy(6 * scales[:, None]).to(dtype)
    rounded = torch.from_numpy(6 * (1 + 1 / 32) * scales[:, None]).to(dtype)  # to the same scale
    largest = torch.where(torch.arange(len(scales))[:, None] % 2 == 1, rounded, exact)
    zero = torch.full_like(largest, -0.0)
    for step in (0, 1, -1):
        values = _stepped(limits, step)
        yield torch.cat([values, -values, largest, zero], dim=1)
        yield torch.cat([-values, values, -largest, zero], dim=1)


def _on_midpoints(scales: Float64Array, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """A largest magnitude whose sixth lies between two scales, or next to that, in one place or another."""
    limits = torch.from_numpy(3 * (scales[:-1] + scales[1:])[:, None]).to(dtype)
    for step in (0, 1, -1):
        largest = _stepped(limits, step)
        groups = torch.cat([largest / 7, largest / 3, -largest, largest.new_zeros(len(largest), 13)], dim=1)
        # of two neighbouring midpoints one is rounded down: both take each place
        yield torch.stack([group.roll(at // 2) for at, group in enumerate(groups)])


def _alone(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The largest magnitude in each place, of either sign and with any bits; nothing else is near it."""
    for value in (-1000.0, 1.99, -0.003):
        yield torch.diag(torch.full((16,), value)).to(dtype)


def _others(dtype: torch.dtype, seed: int) -> Iterator[torch.Tensor]:
    """Magnitudes from the least denormal to the greatest number; zeros; a negative that rounds to 0."""
    generator = torch.Generator().manual_seed(seed)
    exponents = range(-14, 15, 7) if dtype == torch.float16 else range(-126, 127, 36)
    for exponent in exponents:
        yield (torch.randn(4, 16, generator=generator) * 2.0**exponent).to(dtype)
    info = torch.finfo(dtype)
    special = [0.0, -0.0, info.tiny, -info.tiny, info.smallest_normal / 8, -info.smallest_normal / 8]
    special += [info.max, -info.max, 2.0**-11, -(2.0**-11)]
    yield torch.tensor(special, dtype=dtype)[torch.randint(0, 10, (12, 16), generator=generator)]
    yield torch.tensor(special[:6], dtype=dtype)[torch.randint(0, 6, (6, 16), generator=generator)]


def _stepped(values: torch.Tensor, step: int) -> torch.Tensor:
    """The next value of the type: up for 1, down for -1."""
    integer = torch.int32 if values.dtype == torch.float32 else torch.int16
    return (values.view(integer) + step).view(values.dtype)
