"""Where a part runs and how large its calls are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kernel.backends.flydsl.backend import FlydslBackend
from kernel.backends.flydsl.runtime import Device

BACKENDS = ("flydsl", "flydsl-sim")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the calls.

    Attributes:
        context: keys of a checked case's request.
        queries: its query tokens.
        repeats: runs that are measured, after one that is not.
        prefill_heads: index heads of measured prefills.
        prefill_queries: their query tokens.
        prefill_contexts: their keys.
        decodes: requests, queries of each and keys of each, of measured decode steps.
        topk_blocks: columns of measured selections.
        inserts: keys of measured insertions.
    """

    context: int
    queries: int
    repeats: int
    prefill_heads: tuple[int, ...]
    prefill_queries: int
    prefill_contexts: tuple[int, ...]
    decodes: tuple[tuple[int, int, int], ...]
    topk_blocks: tuple[int, ...]
    inserts: tuple[int, ...]


M3 = Sizes(
    context=8192,
    queries=64,
    repeats=20,
    prefill_heads=(4, 1),
    prefill_queries=8192,
    prefill_contexts=(131_072, 524_288),
    decodes=(
        (32, 1, 131_072),
        (32, 4, 131_072),
        (1, 1, 524_288),
        (1, 4, 524_288),
        (1, 1, 131_072),
        (128, 1, 8192),
    ),
    topk_blocks=(1024, 2048, 4096, 8192),
    inserts=(65_536, 1_048_576),
)
"""The shapes of ``docs/gfx950.md``, and some around them."""
SIMULATED = Sizes(
    context=300,
    queries=5,
    repeats=1,
    prefill_heads=(1,),
    prefill_queries=3,
    prefill_contexts=(300,),
    decodes=((2, 1, 300),),
    topk_blocks=(20,),
    inserts=(40,),
)
"""So small that a CPU can interpret them."""


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Attributes:
        backend: one of :data:`BACKENDS`.
        folder: where files of its own go.
    """

    backend: str
    folder: Path

    @property
    def simulated(self) -> bool:
        """Whether no figure is a measurement of the kernels."""
        return self.backend == "flydsl-sim"

    @property
    def sizes(self) -> Sizes:
        """How large the calls are."""
        return SIMULATED if self.simulated else M3

    def device(self) -> Device:
        """Where launches go.

        Raises:
            DeviceUnavailableError: it is not there.
        """
        if self.simulated:
            from kernel.gfx950.hip import simulated_device

            return simulated_device()
        from kernel.backends.flydsl.rocm import RocmDevice

        return RocmDevice(torch.device("cuda"))

    def launchers(self) -> FlydslBackend:
        """The backend's operations.

        Raises:
            DeviceUnavailableError: what is missing.
        """
        return FlydslBackend(self.backend, self.device(), "exact")
