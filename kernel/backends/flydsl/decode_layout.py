"""Where the decode scorer's pages are on their way, and which of the two a process uses. Needs no FlyDSL.

The scores are the same bits. Which is faster only a benchmark on the device can tell:
NVFP4_INDEXER_DECODE_LAYOUT takes its answer.
"""

from __future__ import annotations

import os
from typing import Literal

from kernel.errors import DeviceUnavailableError

Layout = Literal["registers", "staged"]
"""In registers, or in LDS by DMA."""
LAYOUTS: tuple[Layout, ...] = ("registers", "staged")
DEFAULT: Layout = "registers"
VARIABLE = "NVFP4_INDEXER_DECODE_LAYOUT"


def chosen() -> Layout:
    """The layout that the environment names, else the default.

    Raises:
        DeviceUnavailableError: it names another one.
    """
    named = os.environ.get(VARIABLE) or DEFAULT
    for layout in LAYOUTS:
        if named == layout:
            return layout
    raise DeviceUnavailableError(
        f"{VARIABLE}={named} is no layout of the decode scorer", f"use {' or '.join(LAYOUTS)}, or unset it"
    )
