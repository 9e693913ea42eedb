"""Where a call's time went, as it travels: plain dataclasses that client, server and profiler share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StageMs:
    """A stage of the profiled call, milliseconds over the runs."""

    stage: str
    median_ms: float
    min_ms: float
    max_ms: float


@dataclass(frozen=True)
class Floor:
    """The least time that the device's own measured speed allows.

    Attributes:
        tflops: of a matrix product, TFLOP/s.
        tbps: of a copy, TB/s.
        source: how they were measured.
        compute_ms: the call's work at that speed.
        memory_ms: the call's bytes at that speed.
        bound_by: ``compute`` or ``memory``, the longer one.
    """

    tflops: float
    tbps: float
    source: str
    compute_ms: float
    memory_ms: float
    bound_by: str


@dataclass(frozen=True)
class Profile:
    """Where a call's time goes, beside what the device could do.

    Attributes:
        longest_context: tokens.
        stages: in the order in which they ran.
        device_ms: median of score and top-k together, or of select.
        flop: ``2 * 128 * 128`` for every visible (row, block).
        bytes: queries and each page in use once in, any scores and block ids once out.
        tflops: achieved TFLOP/s.
        tbps: achieved TB/s.
        times_floor: ``device_ms`` over the floor.
        trace: a chrome trace, if one was asked for.
    """

    backend: str
    device: str
    precision: str
    cache: str
    repeats: int
    num_heads: int
    total_q: int
    batch: int
    longest_context: int
    stages: tuple[StageMs, ...]
    device_ms: float
    flop: int
    bytes: int
    tflops: float
    tbps: float
    floor: Floor
    times_floor: float
    trace: dict[str, Any] | None = field(default=None, repr=False)
