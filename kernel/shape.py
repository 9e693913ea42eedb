"""Shapes of tensors and arrays, and what makes a wrong one right."""

from __future__ import annotations

from collections.abc import Sequence


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
