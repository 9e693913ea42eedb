"""The campaign of each kernel, by the kernel's name, and its whole set of mutants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from kernel.backends.flydsl import geometry
from kernel.backends.flydsl.geometry import LAYOUTS, VARIANTS, KeyType, Layout, Variant
from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import Kernel, RunReport
from tests.gfx950 import compiled
from tests.mutation import (
    decode_launches,
    prefill_launches,
    row_launches,
)
from tests.mutation.campaign import Campaign, Executed, whole_set
from tests.mutation.launch import Launch, WrongWorkError
from tests.mutation.mutants import Mutant
from tests.mutation.prefill_launches import PrefillLaunch


@dataclass(frozen=True)
class _Target:
    """``of_others``: see ``whole_set``."""

    campaign: Callable[[], Campaign[Any]]
    seed: int
    of_others: int | None


@cache
def prefill(heads: int) -> Campaign[PrefillLaunch]:
    """Of the prefill scorer for ``heads`` index heads."""
    return Campaign(
        compiled.kernel(geometry.prefill_name(heads)),
        prefill_launches.launches(heads),
        lambda launch, report, _: prefill_launches.check_work(launch, report),
        prefill_launches.REVIEWED,
        prefill_launches.sweep(heads),
    )


@cache
def _decode(heads: int, layout: Layout) -> Campaign[Any]:
    return Campaign(
        compiled.kernel(geometry.decode_name(heads, layout)),
        decode_launches.launches(heads),
        lambda launch, report, _: decode_launches.check_work(launch, report),
        decode_launches.reviewed_of(heads),
    )


@cache
def _topk(variant: Variant) -> Campaign[Any]:
    launches = list(row_launches.topk_launches(variant))
    return _of_rows(compiled.kernel(variant.name), launches)


@cache
def _insert(key_type: KeyType) -> Campaign[Any]:
    launches = list(row_launches.insert_launches(key_type))
    return _of_rows(compiled.kernel(geometry.insert_name(key_type)), launches)


def _of_rows(kernel: Kernel, launches: list[Launch]) -> Campaign[Any]:
    return Campaign(kernel, launches, _check_same_work, row_launches.REVIEWED)


def _check_same_work(launch: Launch, report: RunReport, executed: Executed) -> None:
    """A bound too low is exact, and slower: each instruction must be issued as often as by the kernel, whose
    comparisons are checked against what the rows are due (``tests/gfx950/test_topk.py``)."""
    if not np.array_equal(report.executed, executed):
        first = report.kernel.instructions[int(np.argmax(report.executed != executed))]
        raise WrongWorkError(f"{launch.name}: line {first.line} runs more or less often")


_TARGETS = {
    **{geometry.prefill_name(h): _Target(partial(prefill, h), h, 12) for h in SUPPORTED_HEADS},
    **{
        geometry.decode_name(h, layout): _Target(partial(_decode, h, layout), h, 12)
        for layout in LAYOUTS
        for h in SUPPORTED_HEADS
    },
    **{variant.name: _Target(partial(_topk, variant), variant.best, 24) for variant in VARIANTS},
    **{geometry.insert_name(one): _Target(partial(_insert, one), 0, None) for one in KeyType},
}
NAMES = tuple(_TARGETS)
"""Every kernel."""


def campaign(name: str) -> Campaign[Any]:
    """That of a kernel."""
    return _TARGETS[name].campaign()


@cache
def mutants_of(name: str) -> list[Mutant]:
    """Its whole set."""
    target = _TARGETS[name]
    return whole_set(target.campaign(), target.seed, target.of_others)
