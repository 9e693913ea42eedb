"""Checks of arguments that are plain values: whole numbers and switches. No torch: case files need none."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral

from kernel.errors import InvalidArgumentError


def as_int(value: object) -> int | None:
    """An integer of Python's or numpy's as an int; None for anything else, bools too."""
    if type(value) is int:  # an abstract class takes twenty times as long to ask
        return value
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


def has_shape(found: Sequence[int], wanted: Sequence[int | None]) -> bool:
    """Whether all sizes are the wanted ones; None is any."""
    return len(found) == len(wanted) and all(
        want in (None, have) for want, have in zip(wanted, found, strict=True)
    )


def shape_remedy(found: Sequence[int], wanted: Sequence[int | None]) -> str:
    """What makes a tensor of a wrong shape right: token-major for head-major must not be reshaped, which
    would mix the values up."""
    if has_shape([*found[1::-1], *found[2:]], wanted):
        return "call .swapaxes(0, 1)"
    return "call .reshape() or slice it"
