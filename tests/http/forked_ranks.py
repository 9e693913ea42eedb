"""A sidecar whose ranks are forks, as it is itself, and have a second to end."""

from __future__ import annotations

import sys

import server.ranks
from server.serve import main
from tests.support.process import forkserver

if __name__ == "__main__":
    server.ranks.get_context = lambda _: forkserver()  # type: ignore[attr-defined, assignment]
    server.ranks._END_SECONDS = 1.0
    sys.exit(main())
