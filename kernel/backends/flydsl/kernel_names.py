"""Symbols of the kernels, by what tells them apart; top-k's are in ``Variant.name``. Needs no FlyDSL."""

from __future__ import annotations

from kernel.backends.flydsl.key_type import KeyType


def score_prefill(heads: int) -> str:
    """Of the prefill scorer for ``heads`` index heads."""
    return f"score_prefill_h{heads}"


def score_decode(heads: int, layout: str = "registers") -> str:
    """Of the decode scorer for ``heads`` index heads and a layout of pages on their way."""
    return f"score_decode_h{heads}" + ("" if layout == "registers" else f"_{layout}")


def insert(key_type: KeyType) -> str:
    """Of the insert kernel for keys of a type."""
    return f"insert_{key_type.value}"
