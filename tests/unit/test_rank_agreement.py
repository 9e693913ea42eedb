"""Ranks that were configured differently are told which argument it is; equal values of two types agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from indexer import IndexerConfig
from indexer.distributed import DistributedIndexScorer
from indexer.distributed.ranks import Agreement
from kernel.errors import RankDisagreementError
from tests.support.thread_ranks import thread_ranks_of

CONFIG = IndexerConfig(4, 8, backend="cpu")


def made(options: Sequence[dict[str, Any]]) -> list[RankDisagreementError | None]:
    """What making a scorer raises on each rank."""

    def make(rank: int, group: Any) -> RankDisagreementError | None:
        fields = {**vars(CONFIG), **options[rank]}
        own = {name: fields.pop(name) for name in ("head_groups", "deadline_seconds") if name in fields}
        try:
            DistributedIndexScorer(IndexerConfig(**fields), group, **own)
        except RankDisagreementError as error:
            return error
        return None

    return thread_ranks_of(len(options), make)


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("num_pages", (8, 9)),
        ("head_groups", (1, 2)),
        ("deadline_seconds", (30, 30.5)),
        ("order", ("score", "block")),
        ("precision", ("exact", "fast")),
        ("backend", ("cpu", "reference")),
        ("init_blocks", (0, 10**9 - 1)),
    ],
)
def test_the_argument_that_differs_is_named(argument: str, values: tuple[object, object]) -> None:
    for error in made([{argument: value} for value in values]):
        assert error is not None
        assert error.ranks == (1,)
        reason = f"({argument} = {values[1]!r}, and {values[0]!r} on rank 0)"
        assert error.reason == f"was configured differently {reason}"
        assert error.remedy == f"pass the same {argument} on every rank"


def test_every_argument_that_differs_is_named_with_a_rank() -> None:
    for error in made([{}, {"num_pages": 9}, {}, {"order": "block"}]):
        assert error is not None
        assert error.ranks == (1, 3)
        assert (
            "rank 1: num_pages = 9, and 8 on rank 0; rank 3: order = 'block', and 'score' on rank 0"
            in str(error)
        )
        assert error.remedy == "pass the same num_pages and order on every rank"


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("head_groups", (np.int64(1), 1)),
        ("num_pages", (np.int32(8), 8)),
        ("deadline_seconds", (30, 30.0)),
        ("deadline_seconds", (np.float64(1.5), 1.5)),
        ("backend", ("auto", "cpu")),
    ],
)
def test_equal_values_agree(argument: str, values: tuple[object, object]) -> None:
    if argument == "backend" and torch.cuda.is_available():
        values = ("cpu", "cpu")  # auto is another one there
    assert made([{argument: value} for value in values]) == [None, None]


def test_values_too_long_for_a_header_still_disagree() -> None:
    def settle(rank: int, group: Any) -> str:
        agreement = Agreement(group, {"name": "x" * 300 + str(rank)}, lambda: 0)
        with pytest.raises(RankDisagreementError) as caught, agreement.settled("construct", changes=True):
            pass
        return str(caught.value)

    message = "rank 1: was configured differently; pass the same arguments on every rank"
    assert thread_ranks_of(2, settle) == [message] * 2
