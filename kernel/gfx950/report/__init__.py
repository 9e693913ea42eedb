"""What the compiler's output of the gfx950 kernels says without a GPU: registers, loops, predicted clocks.

Counts are facts of the assembly; clocks come from a model of rates (:mod:`.model`) and from a replay
(:mod:`.timeline`), and are predictions. Nothing here has run on the hardware.
"""

from __future__ import annotations
