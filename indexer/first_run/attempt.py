"""One item of a part: what it found, or the error that it ended with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Item = dict[str, Any]
"""JSON fields, ``name`` and ``ok`` among them."""


def attempt(name: str, run: Callable[[], Item]) -> Item:
    """Run an item; an error becomes its result, so that the items after it run.

    Args:
        name: of the item.
        run: gives its fields, ``ok`` where it can be false.
    """
    try:
        return {"name": name, "ok": True, **run()}
    except Exception as error:
        return {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"}
