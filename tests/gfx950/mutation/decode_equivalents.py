"""Mutants of the decode scorer that compute the same, reviewed one by one.

An entry names the change without registers and line numbers, so that it outlives a recompilation. It is asked
only about a mutant that survived every launch: it cannot hide one that some launch catches.
"""

from __future__ import annotations

import re

from kernel.gfx950 import Kernel
from tests.gfx950.mutation.equivalents import Equivalent, description
from tests.gfx950.mutation.mutants import Mutant

REVIEWED: tuple[Equivalent, ...] = ()


def reviewed(kernel: Kernel, mutant: Mutant) -> str:
    """The reason of the entry that a mutant fits, "" without one."""
    text = description(kernel, mutant)
    return next((one.reason for one in REVIEWED if re.search(one.change, text)), "")
