"""Reports on compiled gfx950 kernels without a GPU: registers, loops, predicted clocks.

Counts are facts of the assembly; clocks come from a model of rates (:mod:`.model`) and from a replay
(:mod:`.timeline`), and are predictions. Nothing here has run on the hardware.
"""

from __future__ import annotations
