"""The insert kernels' division of work. Needs no FlyDSL."""

from __future__ import annotations

from kernel.contract import GROUPS

THREADS = 256
KEYS_PER_WORKGROUP = THREADS // GROUPS
LOAD_BYTES = 16
"""Keys are loaded in pieces of so many bytes, aligned to them."""
