"""How long each stage of a call took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class StageTimes(Mapping[str, float]):
    """Seconds of each stage, in the order in which they ran.

    On a CPU a stage is timed by the clock. On a GPU, where calls return before their work is done, events are
    recorded around it and read when someone asks: the first look waits for the work, a call never does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as a part of one stage."""
        if self._device.type == "cuda":
            start, end = _event(), _event()
            stream = torch.cuda.current_stream(self._device)
            start.record(stream)
            yield
            end.record(stream)
            self._events.setdefault(name, []).append((start, end))
            self._seconds.setdefault(name, 0.0)
        else:
            began = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def __getitem__(self, name: str) -> float:
        for start, end in self._events.pop(name, ()):
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        return self._seconds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._seconds)

    def __len__(self) -> int:
        return len(self._seconds)

    def __repr__(self) -> str:
        return repr(dict(self))
