"""Stage times: by the clock on a CPU, by events that are read late on a GPU."""

from __future__ import annotations

import pytest
import torch

from indexer.pipeline import StageTimes


def test_parts_of_a_stage_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 11.0, 20.0, 24.0])
    monkeypatch.setattr("indexer.pipeline.time.perf_counter", lambda: next(clock))
    times = StageTimes(torch.device("cpu"))
    for name in ("check", "score", "check"):
        with times.stage(name):
            pass
    assert dict(times) == {"check": 6.0, "score": 1.0}
    assert (len(times), repr(times)) == (2, "{'check': 6.0, 'score': 1.0}")
    with pytest.raises(KeyError):
        times["topk"]


def test_a_gpu_s_events_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.name = Event.made
            Event.made += 1

        def record(self, stream: str) -> None:
            log.append(f"record {self.name} on {stream}")

        def synchronize(self) -> None:
            log.append(f"wait {self.name}")

        def elapsed_time(self, end: Event) -> float:
            return 1000.0 * (end.name - self.name) + self.name

    monkeypatch.setattr("indexer.pipeline.torch.cuda.Event", Event)
    monkeypatch.setattr("indexer.pipeline.torch.cuda.current_stream", lambda device: f"stream of {device}")
    times = StageTimes(torch.device("cuda:1"))
    for name in ("score", "topk", "score"):
        with times.stage(name):
            log.append(name)
    assert list(times) == ["score", "topk"]
    assert len(times) == 2
    assert "wait" not in " ".join(log)
    assert log[:3] == ["record 0 on stream of cuda:1", "score", "record 1 on stream of cuda:1"]
    assert dict(times) == {"score": pytest.approx(2.004), "topk": pytest.approx(1.002)}
    assert [entry for entry in log if "wait" in entry] == ["wait 1", "wait 5", "wait 3"]
    assert times["score"] == pytest.approx(2.004)
