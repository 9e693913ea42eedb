"""Mistakes in what moves or counts across lanes: another lane is read, another half is counted."""

from __future__ import annotations

import re
from collections.abc import Iterator

_OTHER_LANES = (
    ("row_mirror", "row_half_mirror"),
    ("row_half_mirror", "row_mirror"),
    ("quad_perm:[1,0,3,2]", "quad_perm:[2,3,0,1]"),
    ("quad_perm:[2,3,0,1]", "quad_perm:[3,2,1,0]"),
    ("quad_perm:[3,2,1,0]", "quad_perm:[1,0,3,2]"),
    ("row_ror:8", "row_ror:4"),
    ("row_ror:4", "row_ror:2"),
    ("row_ror:2", "row_ror:1"),
    ("row_ror:1 ", "row_ror:2 "),
)
_OTHER_COUNTS = {
    "v_permlane32_swap": "v_permlane16_swap",
    "v_permlane16_swap": "v_permlane32_swap",
    "v_mbcnt_hi": "v_mbcnt_lo",
    "v_mbcnt_lo": "v_mbcnt_hi",
    "s_bcnt1_i32_b64": "s_ff1_i32_b64",
    "s_ff1_i32_b64": "s_bcnt1_i32_b64",
}


def lane_changes(text: str) -> Iterator[str]:
    """Every such change of an instruction."""
    for one, other in _OTHER_LANES:
        if one in text:
            yield text.replace(one, other)
            break
    for one, other in _OTHER_COUNTS.items():
        if text.startswith(one):
            yield text.replace(one, other, 1)
    median = re.match(r"(v_med3_i32) (v\d+), (v\d+), (v\d+), (v\d+)$", " ".join(text.split()))
    if median is not None:
        name, to, one, two, keep = median.groups()
        yield f"{name} {to}, {one}, {one}, {keep}"
        yield f"{name} {to}, {two}, {two}, {keep}"
