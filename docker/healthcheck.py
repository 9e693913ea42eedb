"""Whether the sidecar in this container is ready: exit code 0, or 1 and the reason. Needs Python only."""

from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path

_SECONDS = 4


def main() -> int:
    """Ask the server of this container, wherever its flags made it listen, past any proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        url = Path(os.environ["NVFP4_INDEXER_URL_FILE"]).read_text(encoding="utf-8").strip()
        opener.open(f"{url}/readyz", timeout=_SECONDS).close()
    except (OSError, KeyError, ValueError) as error:  # an error answer is one, too
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
