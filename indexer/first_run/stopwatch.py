"""Times single launches, cold and warm, beside what the device reaches when it only copies or multiplies."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from indexer.first_run.attempt import Item
from indexer.peaks import Peaks, measured_peaks
from indexer.profile import flush_buffer
from indexer.stages import StageTimes

_AHEAD_CLOCKS = 1_000_000
"""A GPU waits for as long before a timed launch: the host is then ahead of it, and its own time left out."""


class Stopwatch:
    """Of one device.

    Args:
        device: where launches go; its copy bandwidth and its product rate are measured here and now.
        repeats: runs that are measured, after one that is not.
        measured: whether times of launches there are measurements of the kernels; every item says it.
    """

    def __init__(self, device: torch.device, repeats: int, *, measured: bool) -> None:
        self._device, self._repeats, self._measured = device, repeats, measured
        self._flush = flush_buffer(device)
        self.peaks: Peaks = measured_peaks(device)

    def floor(self) -> Item:
        """What the device reaches, as fields."""
        return {
            "measured": self._measured,
            "copy_tbps": self.peaks.bytes_per_second / 1e12,
            "product_tflops": self.peaks.flop_per_second / 1e12,
            "source": self.peaks.source,
        }

    def measure(self, launch: Callable[[], object], *, num_bytes: int, flop: float = 0.0) -> Item:
        """Fields of a launch: its times, its speed, and how far it is from the floor.

        Args:
            launch: enqueues it.
            num_bytes: that it must move.
            flop: that it must do.
        """
        memory = num_bytes / self.peaks.bytes_per_second
        compute = flop / self.peaks.flop_per_second
        floor = max(memory, compute)
        fields: Item = {
            "measured": self._measured,
            "bytes": num_bytes,
            "flop": flop,
            "floor_us": 1e6 * floor,
            "bound_by": "compute" if compute > memory else "memory",
        }
        for cache in ("cold", "warm"):
            seconds = self._seconds(launch, cold=cache == "cold")
            median = statistics.median(seconds)
            fields[cache] = {
                "median_us": 1e6 * median,
                "min_us": 1e6 * min(seconds),
                "max_us": 1e6 * max(seconds),
                "tbps": num_bytes / median / 1e12,
                "tflops": flop / median / 1e12,
                "times_floor": median / floor,
            }
        return fields

    def _seconds(self, launch: Callable[[], object], *, cold: bool) -> list[float]:
        launch()
        found = []
        for _ in range(self._repeats):
            if cold:
                self._flush.add_(1)
            if self._device.type == "cuda":
                torch.cuda._sleep(_AHEAD_CLOCKS)  # type: ignore[no-untyped-call]
            times = StageTimes(self._device)
            with times.stage("launch"):
                launch()
            found.append(times["launch"])
        return found
