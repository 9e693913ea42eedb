"""``python -m server``."""

from __future__ import annotations

import sys

from server.serve import main

if __name__ == "__main__":
    sys.exit(main())
