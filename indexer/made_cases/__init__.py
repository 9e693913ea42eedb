"""Makes cases of known difficulty: the same arguments give the same bytes anywhere. Imports no torch."""

from __future__ import annotations

from indexer.made_cases.kinds import KINDS, Shape, make_case

__all__ = ["KINDS", "Shape", "make_case"]
