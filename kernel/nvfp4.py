"""NVFP4 numerics: queries to E4M3, keys to E2M1 codes with an E4M3 scale per 16 dims, and back.

A code is E2M1 (bit 3 the sign, bits 0-2 an index into :data:`E2M1_MAGNITUDES`); a scale is one E4M3 byte.
The key that is scored is ``e4m3_rne_satfinite(e2m1 * scale)``, itself an E4M3 value of at most 448.

Sign of a scale byte: its bit 7 flips the signs of its 16 keys. The LUT holds magnitudes only, so its rows
``s`` and ``s ^ 0x80`` are equal; the sign of a key is ``code bit 3 XOR scale bit 7``. The NaN bytes 0x7F and
0xFF read as magnitude 0, whose sign has no effect on a score.

Everything here runs on whatever device its arguments are on.
"""

from __future__ import annotations

import torch

from kernel.backends.base import ScaleChoice
from kernel.contract import GROUP_DIMS, GROUPS, HEAD_DIM, TOKEN_CODE_BYTES

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each 3-bit index."""
CODE_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints of the magnitudes: the index is how many of them (times the scale) the value strictly exceeds."""
E4M3_MAX = 448.0
"""Largest E4M3 value."""
MIN_SCALE = 2.0**-9
"""Smallest scale written, the least positive E4M3 value; also the scale of an all-zero group."""
E4M3_NAN = 0x7F
"""The E4M3 byte whose magnitude bits mean NaN."""

_MINUS_ZERO = -(1 << 31)
"""The bits of -0.0."""
_QUANTIZE_TOKENS = 8192
"""Tokens quantised at a time: bounds the float32 temporaries to a few times 4 MiB."""


def e4m3_rne_satfinite(values: torch.Tensor) -> torch.Tensor:
    """Round to E4M3, to nearest and ties to even, saturating at 448 (the cast of an older torch gives NaN).

    Args:
        values: float32, any shape; NaN stays NaN.

    Returns:
        float8_e4m3fn, same shape.
    """
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def build_lut(device: torch.device | str) -> torch.Tensor:
    """The E4M3 magnitude bytes of every scale byte: ``lut[s, m] = e4m3(E2M1_MAGNITUDES[m] * |scale s|)``.

    Returns:
        ``[256, 8]`` uint8 on ``device``. Rows 0x7F and 0xFF (NaN) are 0. Signs: see the module.
    """
    scale_bytes = torch.arange(256, dtype=torch.uint8, device="cpu") & 0x7F
    scales = scale_bytes.view(torch.float8_e4m3fn).float().nan_to_num(nan=0.0)
    magnitudes = scales[:, None] * torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device="cpu")
    return e4m3_rne_satfinite(magnitudes).view(torch.uint8).to(device)


def quantize_query(q: torch.Tensor) -> torch.Tensor:
    """Queries as they are scored: saturating round-to-nearest-even cast to E4M3, no scale.

    Args:
        q: float32, bfloat16 or float16, any shape, finite.

    Returns:
        float8_e4m3fn, same shape.
    """
    return e4m3_rne_satfinite(q.float())


def quantize_keys(keys: torch.Tensor, choice: ScaleChoice = "six") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise keys to NVFP4 as the contract has it.

    ``scale = e4m3_rne(clamp(amax / 6, 2^-9, 448))`` per 16 dims. The magnitude index of ``x`` is the number
    of ``threshold * scale`` that ``|x|`` strictly exceeds; the sign bit is set exactly when ``x < 0``.

    Args:
        keys: ``[n, 128]`` float32, bfloat16 or float16, finite.
        choice: of each group's scale, see :data:`kernel.backends.base.ScaleChoice`.

    Returns:
        codes ``[n, 64]`` uint8 (dim 2i in the low nibble of byte i) and scales ``[n, 8]`` uint8.
    """
    codes = keys.new_empty((keys.shape[0], TOKEN_CODE_BYTES), dtype=torch.uint8)
    scales = keys.new_empty((keys.shape[0], GROUPS), dtype=torch.uint8)
    for start in range(0, keys.shape[0], _QUANTIZE_TOKENS):
        rows = slice(start, start + _QUANTIZE_TOKENS)
        codes[rows], scales[rows] = (
            _quantize_tokens(keys[rows]) if choice == "six" else _four_over_six(keys[rows])
        )
    return codes, scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The keys as they are scored: exactly the E4M3 values.

    Args:
        codes: ``[..., 8 * G]`` uint8, eight bytes a group; of pages by :func:`kernel.page.codes_of`.
        scales: ``[..., G]`` uint8; of pages by :func:`kernel.page.scales_of`.

    Returns:
        ``[..., 16 * G]`` float32.
    """
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).reshape(*scales.shape, GROUP_DIMS)
    lut = build_lut(codes.device).flatten()
    scale_bytes = scales.unsqueeze(-1)
    magnitudes = lut[scale_bytes.long() * len(E2M1_MAGNITUDES) + (nibbles & 7)]
    signs = ((nibbles & 8) << 4) ^ (scale_bytes & 0x80)
    values: torch.Tensor = (magnitudes | signs).view(torch.float8_e4m3fn).float()
    return values.flatten(-2)


def _quantize_tokens(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = keys.float().reshape(-1, GROUPS, GROUP_DIMS)
    indices, scales = _indices_and_scales(groups.abs(), 6.0)
    return _packed(indices, groups), scales.view(torch.uint8)


def _four_over_six(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales by amax/6, or by amax/4 in groups whose largest error that makes smaller."""
    groups = keys.float().reshape(-1, GROUPS, GROUP_DIMS)
    magnitudes = groups.abs()
    six, four = (_indices_and_scales(magnitudes, top) for top in (6.0, 4.0))
    better = _largest_errors(magnitudes, *four) < _largest_errors(magnitudes, *six)
    (six_indices, six_scales), (four_indices, four_scales) = six, four
    indices = torch.where(better.unsqueeze(-1), four_indices, six_indices)
    scales = torch.where(better, four_scales.view(torch.uint8), six_scales.view(torch.uint8))
    return _packed(indices, groups), scales


def _indices_and_scales(magnitudes: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices ``[n, 8, 16]`` uint8 and scales ``[n, 8]`` E4M3 if amax is scaled to ``top``, 6 or 4."""
    # float32 division is exact enough: next to a midpoint m of two E4M3 values, amax / 6 differs from m by at
    # least 2/3 of m's last place, so it never rounds onto m. Division by 4 is exact.
    scales = (magnitudes.amax(-1) / top).clamp(MIN_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)
    # Exact products: 3 significant bits times 4.
    limits = scales.float().unsqueeze(-1)
    indices = torch.zeros(magnitudes.shape, dtype=torch.uint8, device=magnitudes.device)
    for threshold in CODE_THRESHOLDS:
        indices += magnitudes > limits * threshold
    return indices, scales


def _largest_errors(magnitudes: torch.Tensor, indices: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[n, 8]`` float64, of each group's keys as they are scored."""
    table = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device=indices.device)
    scored = e4m3_rne_satfinite(table[indices.long()] * scales.float().unsqueeze(-1)).float()
    return (scored.double() - magnitudes.double()).abs().amax(-1)


def _packed(indices: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Codes ``[n, 64]`` uint8 of magnitude indices and the signs of ``groups``."""
    bits = groups.view(torch.int32)  # a host that flushes denormals finds that none is below 0
    codes = indices | ((bits < 0) & (bits != _MINUS_ZERO)).to(torch.uint8) << 3
    pairs = codes.reshape(-1, HEAD_DIM // 2, 2)
    packed: torch.Tensor = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed
