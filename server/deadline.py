"""Until when a request must have reached the device."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from server.problems import ProblemError


@dataclass(frozen=True)
class Deadline:
    """So many seconds after a request came.

    Attributes:
        seconds: the time it has.
        began: ``time.monotonic()`` when it came.
    """

    seconds: float
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds until then, 0 afterwards."""
        return max(0.0, self.began + self.seconds - time.monotonic())

    def problem(self, detail: str) -> ProblemError:
        """The 504 of a request that was too late."""
        return ProblemError(
            504,
            "deadline",
            detail,
            argument="deadline_seconds",
            value=round(time.monotonic() - self.began, 3),
            limit=self.seconds,
        )
