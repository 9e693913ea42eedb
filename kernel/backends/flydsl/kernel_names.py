"""Symbols of the kernels, by what tells them apart; top-k's are in ``Variant.name``. Needs no FlyDSL."""

from __future__ import annotations

from kernel.backends.flydsl.decode_layout import DEFAULT, LAYOUTS, Layout
from kernel.backends.flydsl.key_type import KeyType
from kernel.backends.flydsl.topk_variants import VARIANTS
from kernel.contract import SUPPORTED_HEADS


def score_prefill(heads: int) -> str:
    """Of the prefill scorer for ``heads`` index heads."""
    return f"score_prefill_h{heads}"


def score_decode(heads: int, layout: Layout = DEFAULT) -> str:
    """Of the decode scorer for ``heads`` index heads and a layout of pages on their way."""
    return f"score_decode_h{heads}" + ("" if layout == DEFAULT else f"_{layout}")


def insert(key_type: KeyType) -> str:
    """Of the insert kernel for keys of a type."""
    return f"insert_{key_type.value}"


def every() -> tuple[str, ...]:
    """Of every kernel."""
    return (
        *map(score_prefill, SUPPORTED_HEADS),
        *(score_decode(heads, layout) for layout in LAYOUTS for heads in SUPPORTED_HEADS),
        *(variant.name for variant in VARIANTS),
        *map(insert, KeyType),
    )
