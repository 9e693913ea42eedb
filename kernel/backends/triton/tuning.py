"""Launch parameters, measured on an H200 (docs/performance.md); other devices get the conservative ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrefillTuning:
    """How a prefill tile is run."""

    warps: int
    stages: int
    """Depth of the software pipeline over key blocks."""
    tma: bool
    """Whether key blocks come by tensor-memory descriptors (Hopper's copy engine)."""
    waves: int
    """Programs wanted, in multiples of the multiprocessors: short grids are split over keys."""


@dataclass(frozen=True)
class DecodeTuning:
    """How decode is run."""

    warps: int
    stages: int
    programs_per_multiprocessor: int


@dataclass(frozen=True)
class Tuning:
    """Everything that depends on the device."""

    multiprocessors: int
    ptx: bool
    """Whether the device executes PTX for sm_89 or newer: byte permutes and E4M3 conversions."""
    fp8_dot: bool
    """Whether the device multiplies E4M3 matrices (``precision="fast"``)."""
    prefill_exact: PrefillTuning
    prefill_fast: PrefillTuning
    decode: DecodeTuning


def tuning_for(device: torch.device) -> Tuning:
    """The parameters for a device; for the interpreter where there is none."""
    if device.type != "cuda":
        small = PrefillTuning(warps=4, stages=1, tma=False, waves=1)
        return Tuning(2, False, False, small, small, DecodeTuning(4, 1, 1))
    properties = torch.cuda.get_device_properties(device)
    count = properties.multi_processor_count
    if torch.version.hip is not None:
        prefill = PrefillTuning(warps=8, stages=2, tma=False, waves=2)
        return Tuning(count, False, False, prefill, prefill, DecodeTuning(4, 2, 4))
    capability = (properties.major, properties.minor)
    ptx = capability >= (8, 9)
    if capability[0] == 9:
        exact = PrefillTuning(warps=8, stages=4, tma=True, waves=2)
        fast = PrefillTuning(warps=4, stages=5, tma=True, waves=2)
    else:
        exact = PrefillTuning(warps=8, stages=2, tma=False, waves=2)
        fast = PrefillTuning(warps=8, stages=3, tma=False, waves=2)
    return Tuning(count, ptx, ptx, exact, fast, DecodeTuning(4, 3, 4))
