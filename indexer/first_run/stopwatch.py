"""Times single launches, cold and warm, beside what the device reaches when it only copies or multiplies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from indexer.first_run.attempt import Item
from indexer.peaks import Peaks, measured_fp8_rate, measured_peaks
from indexer.profile import flush_buffer
from indexer.stages import StageTimes

_AHEAD_CLOCKS = 1_000_000
"""A GPU waits for as long, some 0.4 ms, before a timed launch, and a host that enqueues in less is ahead."""


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
        self._fp8_rate = measured_fp8_rate(device)

    def floor(self) -> Item:
        """What the device reaches, as fields."""
        return {
            "measured": self._measured,
            "copy_tbps": self.peaks.bytes_per_second / 1e12,
            "product_tflops": self.peaks.flop_per_second / 1e12,
            "fp8_product_tflops": None if self._fp8_rate is None else self._fp8_rate / 1e12,
            "source": self.peaks.source,
        }

    def measure(self, launch: Callable[[], object], *, num_bytes: int, flop: float = 0.0) -> Item:
        """Fields of a launch: its times, its speed, and how far it is from the floor.

        The kernels multiply E4M3: without the rate of such products a launch that multiplies has no floor.

        Args:
            launch: enqueues it.
            num_bytes: that it must move.
            flop: that it must do.
        """
        bounds = floor_fields(num_bytes / self.peaks.bytes_per_second, flop, self._fp8_rate)
        fields: Item = {"measured": self._measured, "bytes": num_bytes, "flop": flop, **bounds}
        for cache in ("cold", "warm"):
            seconds, host = self._runs(launch, cold=cache == "cold")
            median = statistics.median(seconds)
            fields[cache] = {
                "median_us": 1e6 * median,
                "min_us": 1e6 * min(seconds),
                "max_us": 1e6 * max(seconds),
                "tbps": num_bytes / median / 1e12,
                "tflops": flop / median / 1e12,
                **host_fields(host),
            }
            if "floor_us" in bounds:
                fields[cache]["times_floor"] = 1e6 * median / bounds["floor_us"]
        fields["host_bound"] = any(fields[cache].get("host_bound", False) for cache in ("cold", "warm"))
        return fields

    def _runs(
        self, launch: Callable[[], object], *, cold: bool
    ) -> tuple[list[float], list[tuple[float, float]]]:
        launch()
        found, host = [], []
        for _ in range(self._repeats):
            if cold:
                self._flush.add_(1)
            times = StageTimes(self._device)
            if self._device.type == "cuda":
                with times.stage("wait"):
                    torch.cuda._sleep(_AHEAD_CLOCKS)  # type: ignore[no-untyped-call]
            began = time.perf_counter()
            with times.stage("launch"):
                launch()
            enqueue = time.perf_counter() - began
            found.append(times["launch"])
            if "wait" in times:
                host.append((enqueue, times["wait"]))
        return found, host


def floor_fields(memory: float, flop: float, fp8_rate: float | None) -> Item:
    """The least time of a launch and what sets it; only ``memory_us`` where that cannot be known.

    Args:
        memory: seconds that the device needs to copy as many bytes.
        flop: that the launch does.
        fp8_rate: of an E4M3 product, a second; None if it is not known.
    """
    if flop and fp8_rate is None:
        return {"memory_us": 1e6 * memory}
    compute = flop / fp8_rate if fp8_rate else 0.0
    return {
        "memory_us": 1e6 * memory,
        "floor_us": 1e6 * max(memory, compute),
        "bound_by": "compute" if compute > memory else "memory",
    }


def host_fields(runs: list[tuple[float, float]]) -> Item:
    """Whether the host's own time is in that of the launches: it took longer to enqueue than the GPU waited.

    Args:
        runs: seconds of either; none on a CPU, where nothing is enqueued.
    """
    if not runs:
        return {}
    enqueue, wait = (statistics.median(column) for column in zip(*runs))
    return {"enqueue_us": 1e6 * enqueue, "wait_us": 1e6 * wait, "host_bound": enqueue > wait}
