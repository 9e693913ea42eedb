"""Checks of arguments that are plain values: whole numbers and switches. No torch: case files need none."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral

import numpy as np

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


UNMASKED = "must have no mask", "call .filled() with what belongs in its places"
"""Limit and remedy of an array."""


def check_unmasked(argument: str, value: object) -> None:
    """Refuse a masked array of numpy: what it hides would be read as values."""
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidArgumentError(argument, "a masked array", *UNMASKED)


def has_shape(found: Sequence[int], wanted: Sequence[int | None]) -> bool:
    """Whether all sizes are the wanted ones; None is any."""
    if len(found) != len(wanted):
        return False
    for have, want in zip(found, wanted):  # noqa: SIM110 - a generator takes twice as long, at every call
        if want is not None and want != have:
            return False
    return True


def shape_remedy(found: Sequence[int], wanted: Sequence[int | None]) -> str:
    """What makes a tensor of a wrong shape right: token-major for head-major must not be reshaped, which
    would mix the values up."""
    if has_shape([*found[1::-1], *found[2:]], wanted):
        return "call .swapaxes(0, 1)"
    return "call .reshape() or slice it"
