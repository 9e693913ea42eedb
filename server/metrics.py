"""Prometheus metrics of one server, and the recent latencies that the page shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from indexer.wire import RouteLatency

RECENT = 512
"""Requests of a route whose latency quantiles are computed."""
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE"})
"""Methods that some route has; anything else that a client invents is counted as one."""
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """A registry of its own, so that several servers can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Histogram(
            "nvfp4_indexer_request_seconds",
            "Time from a request's headers to the end of its answer",
            ("method", "route", "status"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._stages = Histogram(
            "nvfp4_indexer_stage_seconds",
            "Time of each stage of a call",
            ("route", "stage"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.received = Counter(
            "nvfp4_indexer_received_bytes", "Bytes of bodies that were read", registry=self.registry
        )
        self._gauges: dict[str, Gauge] = {}
        self._recent: dict[str, deque[float]] = {}
        self._counts: dict[str, int] = {}

    def request(
        self, route: str, method: str, status: int, seconds: float, stages: Mapping[str, float]
    ) -> None:
        """Counts a request."""
        method = method if method in _METHODS and route != "other" else "other"
        self._requests.labels(method, route, status).observe(seconds)
        for stage, stage_seconds in stages.items():
            self._stages.labels(route, stage).observe(stage_seconds)
        if status < 300 and stages:
            self._recent.setdefault(route, deque(maxlen=RECENT)).append(seconds)
            self._counts[route] = self._counts.get(route, 0) + 1

    def latencies(self) -> list[RouteLatency]:
        """Latencies of the last successful requests of every route that ran a call."""
        latencies = []
        for route, recent in self._recent.items():
            ordered = sorted(recent)
            p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
            calls = self._counts[route]
            latencies.append(RouteLatency(route, calls, round(1e3 * p50, 3), round(1e3 * p99, 3)))
        return latencies

    def exposition(self, gauges: Mapping[str, tuple[str, float]]) -> bytes:
        """Returns the text that Prometheus reads.

        Args:
            gauges: description and current value of each gauge by name.
        """
        for name, (text, value) in gauges.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"nvfp4_indexer_{name}", text, registry=self.registry)
            self._gauges[name].set(value)
        return generate_latest(self.registry)
