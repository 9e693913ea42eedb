"""Whether the sidecar in this container is ready: exit code 0, or 1 and the reason. Needs Python only."""

from __future__ import annotations

import os
import sys
import urllib.request

_SECONDS = 4


def main() -> int:
    """Ask the server of this container, past any proxy."""
    port = os.environ.get("NVFP4_INDEXER_PORT", "8421")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(f"http://127.0.0.1:{port}/readyz", timeout=_SECONDS).close()
    except OSError as error:  # an error answer is one, too
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
