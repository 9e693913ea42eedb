"""Engines with exactly one fault each, one file a kind of fault."""

from __future__ import annotations

from tests.support.planted import keys, results, rows
from tests.support.planted.fault import Planted

__all__ = ["every_fault", "keys", "results", "rows"]


def every_fault(kind: type[Planted] = Planted) -> list[type[Planted]]:
    """All that have a name."""
    found = [fault for sub in kind.__subclasses__() for fault in (sub, *every_fault(sub))]
    return [fault for fault in found if hasattr(fault, "name")]
