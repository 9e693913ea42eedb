"""What a device reaches when it does nothing but one thing: the floor that a call is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

_RUNS = 5
_CPU_SIZE, _GPU_SIZE = 1024, 8192
_CPU_BYTES, _GPU_BYTES = 1 << 26, 1 << 29


@dataclass(frozen=True)
class Peaks:
    """Best of some runs on the device itself."""

    flop_per_second: float
    bytes_per_second: float
    source: str


@lru_cache(maxsize=4)
def measured_peaks(device: torch.device) -> Peaks:
    """Measure a device once: takes some tens of milliseconds and up to 1 GiB of its memory."""
    gpu = device.type == "cuda"
    size, dtype = (_GPU_SIZE, torch.bfloat16) if gpu else (_CPU_SIZE, torch.float32)
    left = torch.randn(size, size, dtype=torch.float32, device=device).to(dtype)
    product = torch.empty_like(left)
    flop = 2 * size**3 / _best_seconds(lambda: torch.mm(left, left, out=product), device)
    num_bytes = _GPU_BYTES if gpu else _CPU_BYTES
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)  # zeros can move faster
    target = torch.empty_like(source)
    moved = 2 * source.numel() / _best_seconds(lambda: target.copy_(source), device)
    name = str(dtype).removeprefix("torch.")
    return Peaks(flop, moved, f"measured here: {name} {size}^3 product, copy of {source.numel() >> 20} MiB")


@lru_cache(maxsize=4)
def measured_fp8_rate(device: torch.device) -> float | None:
    """Floating point operations a second of an E4M3 product, measured once.

    None on a CPU, and where torch has no such product for the GPU.
    """
    if device.type != "cuda":
        return None
    left = torch.randn(_GPU_SIZE, _GPU_SIZE, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones((), dtype=torch.float32, device=device)

    def product() -> object:
        return torch._scaled_mm(left, left.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    try:
        return 2 * _GPU_SIZE**3 / _best_seconds(product, device)
    except (RuntimeError, ValueError):  # torch's, for a GPU without it
        return None


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_RUNS):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
