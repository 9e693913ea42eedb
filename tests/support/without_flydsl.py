"""Importing FlyDSL, or even looking for it, raises: in a program that imports this, or under pytest's
``-p tests.support.without_flydsl``."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType


class _Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.split(".")[0] == "flydsl":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if any(name.split(".")[0] == "flydsl" for name in sys.modules):
    raise RuntimeError("flydsl was imported before it could be refused")
sys.meta_path.insert(0, _Refusing())
