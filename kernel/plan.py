"""Host-side launch planning."""

from __future__ import annotations

TILE_ROWS = 512
STORE_BLOCKS = 4
MAXIMA_BLOCKS = 16
WORK_ITEM_DWORDS = 8
