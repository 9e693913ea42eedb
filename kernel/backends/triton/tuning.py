"""Launch parameters, measured on an H200 (docs/performance.md); other devices get the conservative ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MANY_PAGES = 16
"""Pages of a program beside which its start is short."""


@dataclass(frozen=True)
class PrefillTuning:
    """How a prefill tile is run."""

    warps: int
    stages: int
    """Depth of the pipeline over key blocks."""
    programs_per_multiprocessor: int
    """Programs that run at once."""


@dataclass(frozen=True)
class DecodeTuning:
    """How decode is run."""

    warps: int
    stages: int
    """Pages under way in a program."""
    programs_per_multiprocessor: int
    registers: int | None = None
    """Most registers of a thread; None: the compiler's choice."""
    rounds: int = 1
    """Times that many programs are launched where each has many pages: they end at different times."""

    def programs(self, multiprocessors: int, blocks: int) -> int:
        """Programs to launch for a line of at most so many blocks."""
        at_once = multiprocessors * self.programs_per_multiprocessor
        if blocks >= _MANY_PAGES * at_once:
            return at_once * min(self.rounds, blocks // (_MANY_PAGES * at_once))
        return max(1, min(blocks, multiprocessors * min(4, self.programs_per_multiprocessor)))


@dataclass(frozen=True)
class Tuning:
    """Everything that depends on the device."""

    multiprocessors: int
    ptx: bool
    """Whether the device converts to E4M3 (PTX for sm_89 or newer)."""
    hopper: bool
    """Whether the device is of compute capability 9.0, for which there are kernels in Gluon."""
    fp8_dot: bool
    """Whether the device multiplies E4M3 matrices (``precision="fast"``)."""
    prefill_exact: PrefillTuning
    prefill_fast: PrefillTuning
    decode_exact: DecodeTuning
    decode_fast: DecodeTuning

    def decode(self, *, exact: bool) -> DecodeTuning:
        """How decode is run in a precision."""
        return self.decode_exact if exact else self.decode_fast


def tuning_for(device: torch.device) -> Tuning:
    """The parameters for a device; for the interpreter where there is none."""
    if device.type != "cuda":
        small = PrefillTuning(warps=4, stages=1, programs_per_multiprocessor=1)
        decode = DecodeTuning(4, 1, 1)
        return Tuning(2, False, False, False, small, small, decode, decode)
    properties = torch.cuda.get_device_properties(device)
    count = properties.multi_processor_count
    if torch.version.hip is not None:
        prefill = PrefillTuning(warps=8, stages=2, programs_per_multiprocessor=1)
        decode = DecodeTuning(4, 2, 4)
        return Tuning(count, False, False, False, prefill, prefill, decode, decode)
    capability = (properties.major, properties.minor)
    if capability == (9, 0):
        exact = PrefillTuning(warps=4, stages=3, programs_per_multiprocessor=1)
        fast = PrefillTuning(warps=4, stages=4, programs_per_multiprocessor=1)
        decode_exact, decode_fast = DecodeTuning(4, 2, 6, 80, rounds=2), DecodeTuning(4, 2, 5, 96, rounds=2)
        return Tuning(count, True, True, True, exact, fast, decode_exact, decode_fast)
    ptx = capability >= (8, 9)
    exact = PrefillTuning(warps=8, stages=2, programs_per_multiprocessor=1)
    fast = PrefillTuning(warps=8, stages=3, programs_per_multiprocessor=1)
    decode = DecodeTuning(4, 3, 4)
    return Tuning(count, ptx, False, ptx, exact, fast, decode, decode)
