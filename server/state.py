"""What the routes share: the settings, the worker, and the engine once it is warm."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from server.engine import Engine
from server.metrics import Metrics
from server.problems import ProblemError, of_error
from server.settings import Settings
from server.worker import Worker

WARMING = "the backend is being prepared and checked against the oracle"
"""What a server says until it is ready."""


@dataclass
class ServerState:
    """One server's."""

    settings: Settings
    worker: Worker
    metrics: Metrics
    engine: Engine | None = None
    """None until the self-test passed."""
    failed: bool = False
    """Whether the warm-up failed. The server then ends."""
    end: Callable[[], None] = lambda: None
    """Ends the server."""
    started: float = field(default_factory=time.monotonic)

    def ready_engine(self) -> Engine:
        """The engine.

        Raises:
            ProblemError: 503, warming up or being shut down, or a rank of the scorer ended.
        """
        if self.worker.stopping:
            detail = "the server is being shut down; nothing was done"
            raise ProblemError(503, "stopping", detail, {"Retry-After": "1"})
        if self.engine is None:
            raise ProblemError(503, "warming", f"{WARMING}; nothing was done", {"Retry-After": "1"})
        if self.engine.lost is not None:
            raise of_error(self.engine.lost)
        return self.engine


def state_of(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state
