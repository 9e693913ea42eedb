"""Figures of the compiled kernels against ``kernel_limits.json``: none may get worse.

A change that makes a figure better should lower its limit, with what ``nvfp4-indexer kernel report --json``
says. Every clock is a prediction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Figures = dict[str, Any]

LIMITS: dict[str, Figures] = json.loads(Path(__file__).with_name("kernel_limits.json").read_text())
AT_LEAST = (
    "waves_per_simd",
    "mfma_share",
    "predicted_utilisation",
    "predicted_utilisation_beside_unmasked",
)
"""Figures whose limit is a floor; every other one has a ceiling."""


def worse(fields: Figures) -> list[str]:
    """The figures of a kernel's report that are worse than its limits."""
    return [
        f"{place}{key} {found[key]}, limit {limit}"
        for place, found, limits in _places(fields)
        for key, limit in limits.items()
        if (found[key] < limit if key in AT_LEAST else found[key] > limit)
    ]


def assert_every_limit_bites(fields: Figures, at_least: int) -> None:
    """Each of at least so many figures, made a little worse than its limit, alone, is seen."""
    tried = 0
    for place, found, limits in _places(fields):
        for key, limit in limits.items():
            if limit == 0 and key in AT_LEAST:
                continue  # a share of nothing cannot get worse
            before, found[key] = found[key], limit * 0.999 if key in AT_LEAST else limit + 1
            assert worse(fields) == [f"{place}{key} {found[key]}, limit {limit}"]
            found[key] = before
            tried += 1
    assert tried >= at_least


def _places(fields: Figures) -> Iterator[tuple[str, Figures, Figures]]:
    """The kernel, its page, and each of its loops and shapes: figures and limits."""
    limits = LIMITS[fields["name"]]
    yield "", fields, {key: limit for key, limit in limits.items() if not isinstance(limit, dict)}
    if "page" in limits:
        yield "page: ", fields["page"], limits["page"]
    for part, label in (("loops", "role"), ("works", "shape")):
        found = {one[label]: one for one in fields.get(part, ())}
        for name, own in limits.get(part, {}).items():
            yield f"{name}: ", found[name], own
