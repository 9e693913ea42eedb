"""A fault that an engine may have, as something that can be computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from indexer.explain.evidence import Evidence
from indexer.explain.page_keys import PageKeys
from indexer.explain.prediction import Prediction, by_steps
from indexer.explain.replica import Steps


@dataclass(frozen=True)
class Hypothesis:
    """One fault.

    Attributes:
        name: the fault in a few words.
        family: the kind of fault.
        says: what goes wrong and where to look, one sentence.
        predict: what an engine with this fault would give for a sample's rows.
        fitted: 0 if nothing is fitted to the engine's result. What was fitted explains more than it should:
            of two that explain as much, the one with less is taken.
        leaves_open: whether the fault is that cells hold what the file does not tell; else a row of only
            such cells is not explained.
    """

    name: str
    family: str
    says: str
    predict: Callable[[Evidence], Prediction]
    fitted: int = 0
    leaves_open: bool = False


def by_keys(keys: PageKeys) -> Callable[[Evidence], Prediction]:
    """A prediction from pages that are read as other keys."""
    return by_steps(lambda _: Steps(keys=keys))
