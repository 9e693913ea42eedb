"""Mutants of the top-k and insert kernels that compute the same with the same work, reviewed one by one.

An entry names the change without registers (``equivalents.description``) and is asked only about a mutant
that survived every launch.
"""

from __future__ import annotations

import re

REVIEWED: tuple[tuple[str, str], ...] = (
    (
        r"constant shifted: s_lshl2_add_u32 s, s, -8 -> s_lshl2_add_u32 s, s, -7; s_and_b32 s, s, -8",
        "the bit that differs is masked off by the next instruction",
    ),
)
"""(pattern of the change, why nothing can tell)."""


def reason_of(change: str) -> str:
    """The reason of the entry that a change fits, "" without one."""
    return next((reason for pattern, reason in REVIEWED if re.search(pattern, change)), "")
