"""Where a part of a first run runs and how large its calls are, and the items that it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from client.first_run import SIMULATED
from kernel.backends.flydsl.backend import FlydslBackend
from kernel.backends.flydsl.runtime import Device

Item = dict[str, Any]
"""JSON fields of one check or measurement, ``name`` and ``ok`` among them."""


def attempt(name: str, run: Callable[[], Item]) -> Item:
    """Run an item; an error becomes its result, so that the items after it run.

    Args:
        name: of the item.
        run: returns its fields, ``ok`` where it can be false.
    """
    try:
        return {"name": name, "ok": True, **run()}
    except Exception as error:
        return {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the calls.

    Attributes:
        context: keys of a checked case's request.
        queries: its query tokens.
        repeats: measured runs, after a warm-up run.
        prefill_heads: index heads of measured prefills.
        prefill_queries: their query tokens.
        prefill_contexts: their keys.
        decodes: (requests, queries of each, keys of each) of measured decode steps.
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


M3_SIZES = Sizes(
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
SIMULATED_SIZES = Sizes(
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
"""Small enough for a CPU to interpret."""


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Attributes:
        backend: one of :data:`client.first_run.BACKENDS`.
        folder: for the part's own files.
    """

    backend: str
    folder: Path

    @property
    def simulated(self) -> bool:
        """Whether a CPU interprets the kernels, so that no time is a measurement of them."""
        return self.backend == SIMULATED

    @property
    def sizes(self) -> Sizes:
        """How large the calls are."""
        return SIMULATED_SIZES if self.simulated else M3_SIZES

    def device(self) -> Device:
        """The device that launches go to.

        Raises:
            DeviceUnavailableError: it is not there.
        """
        if self.simulated:
            from kernel.gfx950.hip import simulated_device

            return simulated_device()
        from kernel.backends.flydsl.runtime import RocmDevice

        return RocmDevice(torch.device("cuda"))

    def operations(self) -> FlydslBackend:
        """The backend's operations.

        Raises:
            DeviceUnavailableError: the device is not there.
        """
        return FlydslBackend(self.backend, self.device(), "exact")
