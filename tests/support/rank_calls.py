"""What ranks are asked to do, and what comes back: scripts of calls, on one scorer or on every rank's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from indexer import IndexerConfig, IndexScorer
from indexer.distributed import DistributedIndexScorer
from tests.support.rank_pool import Rank
from tests.support.scorer_state import ScorerState, assert_consistent, state_of


class Step(NamedTuple):
    """One call of a script. Sequences are named by their places among all that the script made."""

    method: str
    sequences: tuple[int, ...] = ()
    tensor: NDArray[np.generic] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Answer(NamedTuple):
    """The bytes of a result, as numpy arrays."""

    block_ids: NDArray[np.int32]
    scores: NDArray[np.float32] | None
    num_blocks: NDArray[np.int32]


class Refusal(NamedTuple):
    """A named error."""

    kind: str
    text: str


def make(
    rank: Rank, name: str, config: IndexerConfig, ranks: int, head_groups: int, deadline_seconds: float = 60.0
) -> tuple[int, int]:
    """Make a scorer on the first ranks, each on a GPU of its own if on any; context ranks and free pages."""
    if config.device == "cuda":
        config = replace(config, device=f"cuda:{rank.index}")
    scorer = DistributedIndexScorer(
        config, rank.groups[ranks], head_groups=head_groups, deadline_seconds=deadline_seconds
    )
    rank.scorers[name] = scorer
    return scorer.context_ranks, scorer.num_free_pages


def play(rank: Rank, name: str, script: Sequence[Step]) -> list[Any]:
    """Play a script on a rank's scorer."""
    return played(rank.scorers[name], script)


def rank_state(rank: Rank, name: str) -> ScorerState:
    """A rank's own state, after a look whether it is consistent."""
    scorer = rank.scorers[name]
    assert_consistent(scorer)
    return state_of(scorer)


def played(scorer: IndexScorer, script: Sequence[Step]) -> list[Any]:
    """What each call of a script gives; all sequences are dropped at the end."""
    made: list[int] = []
    live: set[int] = set()
    outcomes: list[Any] = []
    for step in script:
        ids = [made[place] for place in step.sequences]
        try:
            outcome = _call(scorer, step, ids)
        except (ValueError, RuntimeError) as error:
            outcomes.append(Refusal(type(error).__name__, str(error)))
            continue
        if step.method in ("add_sequence", "fork_sequence"):
            made.append(outcome)
            live.add(outcome)
        if step.method == "free_sequence":
            live.remove(ids[0])
        outcomes.append(outcome)
    outcomes.append([scorer.sequence_length(seq) for seq in scorer.sequences])
    for seq in sorted(live):
        scorer.free_sequence(seq)
    return outcomes


def _call(scorer: IndexScorer, step: Step, ids: list[int]) -> Any:
    tensor = None if step.tensor is None else torch.from_numpy(step.tensor).to(scorer.device)
    options = copy.copy(step.options)
    if step.method == "score":
        result = scorer.score(tensor, ids, **options)  # type: ignore[arg-type]
        return Answer(
            result.block_ids.cpu().numpy(),
            None if result.scores is None else result.scores.cpu().numpy(),
            result.num_blocks.cpu().numpy(),
        )
    arguments: list[Any] = [*ids, *([] if tensor is None else [tensor])]
    return getattr(scorer, step.method)(*arguments, **options)


def assert_same_outcomes(actual: Sequence[Any], expected: Sequence[Any], who: str) -> None:
    """Fail unless two plays of a script gave the same ids, errors, and bytes of results."""
    assert len(actual) == len(expected)
    for place, (got, want) in enumerate(zip(actual, expected)):
        where = f"{who}, step {place}"
        if not isinstance(want, Answer):
            assert got == want, where
            continue
        assert isinstance(got, Answer), f"{where}: {got}"
        for name, mine, other in zip(Answer._fields, got, want):
            if mine is None or other is None:
                assert mine is other, f"{where}: {name}"
                continue
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype), f"{where}: {name}"
            assert mine.tobytes() == other.tobytes(), f"{where}: {name}"
