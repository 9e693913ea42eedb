"""Checks of arguments that are plain values: whole numbers and switches. No torch: case files need none."""

from __future__ import annotations

import operator
from numbers import Integral

from kernel.errors import InvalidArgumentError


def as_int(value: object) -> int | None:
    """An integer of Python's or numpy's as an int; None for anything else, bools too."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return operator.index(value)
    return None


def check_int(argument: str, value: object) -> int:
    """Refuse what is not a whole number; gives it as an int."""
    number = as_int(value)
    if number is None:
        raise InvalidArgumentError(argument, repr(value), "must be an int", "pass a whole number")
    return number


def check_bool(argument: str, value: object) -> None:
    """Refuse what is neither True nor False: a string would count as True."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(argument, repr(value), "must be a bool", "pass True or False")
