"""A rank that ends, hangs, refuses or disagrees is an error on all ranks in time, and nothing has changed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from indexer import IndexerConfig
from indexer.distributed.ranks import RankGroup
from kernel.errors import (
    InvalidArgumentError,
    OutOfPagesError,
    RankDisagreementError,
    RankLostError,
    UnknownSequenceError,
)
from tests.distributed.test_same_bytes import values
from tests.support import process_group
from tests.support.process_group import Answer, PerRank, Rank, RankPool, Step, rank_state

DEADLINE_SECONDS = 2.0
SLACK_SECONDS = 10.0
"""What a busy machine may add."""
CONFIG = IndexerConfig(4, 8, topk_blocks=3, local_blocks=0, backend="cpu")


def attempt(rank: Rank, name: str, method: str, arguments: tuple[Any, ...]) -> tuple[Exception | None, float]:
    """What a call raises, and the seconds it takes."""
    scorer = rank.scorers[name]
    there = [value.to(scorer.device) if isinstance(value, torch.Tensor) else value for value in arguments]
    began = time.monotonic()
    try:
        getattr(scorer, method)(*there)
    except Exception as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


def attempt_to_make(
    rank: Rank, config: IndexerConfig, ranks: int, options: dict[str, Any]
) -> Exception | None:
    """What making a scorer raises."""
    try:
        process_group.make(rank, "made", config, ranks, **options)
    except Exception as error:
        return error
    return None


def end_in(rank: Rank, name: str, victim: int, moment: str, how: int = signal.SIGKILL) -> None:
    """Let a rank kill or stop itself at a moment of its next call."""
    if rank.index != victim:
        return
    scorer = rank.scorers[name]

    def end(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), how)

    if moment == "scoring":
        scorer._share.pieces = end  # type: ignore[method-assign, assignment]
    elif moment == "inserting":
        scorer._backend.insert = end  # type: ignore[method-assign]
    else:  # its header is sent, its candidates are not
        gather = scorer._ranks.gather

        def after_one(payload: torch.Tensor, gathered: torch.Tensor) -> None:
            gather(payload, gathered)
            scorer._ranks.gather = end  # type: ignore[method-assign]

        scorer._ranks.gather = after_one  # type: ignore[method-assign]


def hasten(rank: Rank, name: str) -> None:
    """Shorten the deadline, once all ranks have started on a busy machine."""
    rank.scorers[name]._ranks._deadline = timedelta(seconds=DEADLINE_SECONDS)


def break_insert(rank: Rank, name: str, victim: int) -> None:
    """Let a rank's device fail half way through its next insert."""
    scorer = rank.scorers[name]
    if rank.index != victim:
        return
    insert = scorer._backend.insert

    def fail(keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        scorer._backend.insert = insert  # type: ignore[method-assign]
        insert(keys[:1], pages, slots[:1])
        raise RuntimeError("the device failed")

    scorer._backend.insert = fail  # type: ignore[method-assign]


@pytest.fixture
def trio() -> Iterator[RankPool]:
    """Three ranks with a scorer that holds a sequence of nine blocks, to be broken."""
    with RankPool(3) as pool:
        pool.run(process_group.make, "s", CONFIG, 3, 1, 60.0, ranks=range(3))
        fill(pool, range(3))
        pool.run(hasten, "s", ranks=range(3))
        yield pool


def fill(pool: RankPool, ranks: range, name: str = "s") -> None:
    """A sequence of nine blocks, the last of them partial."""
    pool.run(attempt, name, "add_sequence", (), ranks=ranks)
    keys = torch.from_numpy(values(0, 1100, 128))
    assert not any(error for error, _ in pool.run(attempt, name, "append_keys", (0, keys), ranks=ranks))


def query(tokens: int = 20) -> torch.Tensor:
    return torch.from_numpy(values(1, tokens, 4, 128))


@pytest.mark.parametrize("moment", ["scoring", "exchanging", "inserting"])
def test_a_rank_killed_within_a_call(trio: RankPool, moment: str) -> None:
    survivors = [0, 1]
    before = trio.run(rank_state, "s", ranks=survivors)
    trio.run(end_in, "s", 2, moment, ranks=range(3))
    method, arguments = "score", (query(), [0])
    if moment == "inserting":
        method, arguments = "append_keys", (0, torch.from_numpy(values(2, 400, 128)))  # type: ignore[assignment]
    trio.start(attempt, "s", method, arguments, ranks=range(3))
    outcomes = trio.finish(range(3))
    assert outcomes[2] is None
    for error, seconds in outcomes[:2]:
        assert isinstance(error, RankLostError)
        assert error.ranks == (2,)
        assert str(error).startswith("rank 2: its connection ended")
        assert seconds < DEADLINE_SECONDS + SLACK_SECONDS
    assert trio.run(rank_state, "s", ranks=survivors) == before
    for error, seconds in trio.run(attempt, "s", "add_sequence", (), ranks=survivors):
        assert isinstance(error, RankLostError)
        assert error.ranks == (2,)
        assert seconds < DEADLINE_SECONDS


def test_a_rank_that_hangs_is_named_when_the_deadline_is_over(trio: RankPool) -> None:
    trio.stop(1)
    outcomes = trio.run(attempt, "s", "score", (query(), [0]), ranks=[0, 2])
    for error, seconds in outcomes:
        assert isinstance(error, RankLostError)
        assert str(error).startswith("rank 1: no answer within 2 s")
        assert DEADLINE_SECONDS <= seconds < DEADLINE_SECONDS + SLACK_SECONDS


def test_a_rank_that_never_makes_its_scorer() -> None:
    with RankPool(2) as pool:
        options = {"head_groups": 1, "deadline_seconds": 1.0}
        (error,) = pool.run(attempt_to_make, CONFIG, 2, options, ranks=[0])
        assert isinstance(error, RankLostError)
        assert error.ranks == (1,)


@pytest.fixture(scope="module")
def pages_of_three(pool: RankPool) -> str:
    """A scorer on three ranks of eight pages that tests leave as it is: a sequence of nine blocks."""
    pool.run(process_group.make, "failures", CONFIG, 3, 1, 60.0, ranks=range(3))
    fill(pool, range(3), "failures")
    return "failures"


DISAGREEMENTS: dict[str, tuple[str, PerRank]] = {
    "sequences": ("score", PerRank([(query(2), [0], [2]), (query(2), [0, 0], [1, 1]), (query(2), [0], [2])])),
    "lengths": ("score", PerRank([(query(2), [0, 0], [1, 1])] * 2 + [(query(2), [0, 0], [2, 0])])),
    "keys": ("append_keys", PerRank([(0, query(2)[:, 0])] * 2 + [(0, query(3)[:, 0])])),
    "sequence freed": ("free_sequence", PerRank([(0,), (7,), (0,)])),
    "not finite": ("append_keys", PerRank([(0, query(2)[:, 0])] * 2 + [(0, query(2)[:, 0] * np.inf)])),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree(pool: RankPool, pages_of_three: str, name: str) -> None:
    method, arguments = DISAGREEMENTS[name]
    odd = 1 if name in ("sequences", "sequence freed") else 2
    before = pool.run(rank_state, pages_of_three, ranks=range(3))
    outcomes = pool.run(attempt, pages_of_three, method, arguments, ranks=range(3))
    for rank, (error, _) in enumerate(outcomes):
        if rank == odd and name in ("sequence freed", "not finite"):
            assert isinstance(error, InvalidArgumentError), "a rank that refuses says why itself"
            continue
        assert isinstance(error, RankDisagreementError)
        assert error.ranks == (odd,)
    assert pool.run(rank_state, pages_of_three, ranks=range(3)) == before
    answers = pool.run(attempt, pages_of_three, "score", (query(), [0]), ranks=range(3))
    assert [error for error, _ in answers] == [None] * 3, "the next call that all make alike succeeds"


def test_a_device_that_fails_on_one_rank_leaves_all_as_they_were(pool: RankPool, pages_of_three: str) -> None:
    before = pool.run(rank_state, pages_of_three, ranks=range(3))
    pool.run(break_insert, pages_of_three, 1, ranks=range(3))
    keys = torch.from_numpy(values(3, 500, 128))
    outcomes = pool.run(attempt, pages_of_three, "append_keys", (0, keys), ranks=range(3))
    assert str(outcomes[1][0]) == "the device failed"
    for error, _ in (outcomes[0], outcomes[2]):
        assert isinstance(error, RankDisagreementError)
        assert str(error).startswith("rank 1: refused the call (RuntimeError: the device failed)")
    assert pool.run(rank_state, pages_of_three, ranks=range(3)) == before


def test_out_of_pages_is_the_same_refusal_on_every_rank(pool: RankPool, pages_of_three: str) -> None:
    """24 pages hold 24 blocks and 9 are used: 16 more are one too many, and only one rank sees that."""
    before = pool.run(rank_state, pages_of_three, ranks=range(3))
    keys = torch.zeros(52 + 128 * 16, 128)
    for error, _ in pool.run(attempt, pages_of_three, "append_keys", (0, keys), ranks=range(3)):
        assert isinstance(error, OutOfPagesError)
        assert (error.missing, error.free, error.num_pages) == (1, 5, 8)
    assert pool.run(rank_state, pages_of_three, ranks=range(3)) == before


def test_all_refuse_alike(pool: RankPool, pages_of_three: str) -> None:
    for error, _ in pool.run(attempt, pages_of_three, "score", (query(), [5]), ranks=range(3)):
        assert isinstance(error, UnknownSequenceError)


@pytest.mark.parametrize(
    ("change", "ranks"),
    [({"topk_blocks": 4}, (2,)), ({"num_pages": 9}, (2,)), ({"backend": "reference"}, (2,))],
)
def test_configurations_that_differ(pool: RankPool, change: dict[str, Any], ranks: tuple[int, ...]) -> None:
    other = IndexerConfig(**{**vars(CONFIG), **change})
    configs = PerRank([CONFIG, CONFIG, other])
    for error in pool.run(attempt_to_make, configs, 3, {"head_groups": 1}, ranks=range(3)):
        assert isinstance(error, RankDisagreementError)
        assert error.ranks == (2,)
        (argument, value), before = next(iter(change.items())), vars(CONFIG)
        assert f"configured differently ({argument} = {value!r}, and {before[argument]!r} on rank 0)" in str(
            error
        )
        assert error.remedy == f"pass the same {argument} on every rank"


def test_ranks_that_cannot_be_divided(pool: RankPool) -> None:
    for groups, words in ((2, "must divide the number of ranks, 3"), (3, "must divide num_index_heads, 4")):
        for error in pool.run(attempt_to_make, CONFIG, 3, {"head_groups": groups}, ranks=range(3)):
            assert isinstance(error, InvalidArgumentError)
            assert str(error).startswith(f"head_groups = {groups}: {words}")


def test_without_a_process_group() -> None:
    with pytest.raises(InvalidArgumentError, match="torchrun"):
        RankGroup(None, 1.0)


def attempt_groups(rank: Rank) -> list[str]:
    """What groups and deadlines that cannot be used are refused with."""
    refusals = []
    for deadline in (0, -1.0, float("nan"), float("inf"), "soon"):
        with pytest.raises(InvalidArgumentError) as refusal:
            RankGroup(None, deadline)  # type: ignore[arg-type]
        refusals.append(refusal.value.argument)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
        with pytest.raises(InvalidArgumentError, match="must have Gloo") as refusal:
            RankGroup(None, 1.0)
    return [*refusals, refusal.value.argument]


def test_groups_and_deadlines_that_cannot_be_used(pool: RankPool) -> None:
    assert pool.run(attempt_groups, ranks=[0]) == [["deadline_seconds"] * 5 + ["group"]]


def test_growing_sequences_stay_balanced_over_ranks(pool: RankPool) -> None:
    """Short ones begin on the rank with the most room, long ones go round: no rank is two blocks ahead."""
    config = IndexerConfig(1, 64, backend="cpu")
    pool.run(process_group.make, "balance", config, 4, 1, ranks=range(4))
    script: list[Step] = []
    for place, tokens in enumerate((1, 130, 1, 700, 1, 1, 2000, 129)):
        script += [Step("add_sequence"), Step("append_keys", (place,), values(place, tokens, 128))]
    pool.run(process_group.play, "balance", script[:-1], ranks=range(4))
    pool.run(attempt, "balance", "add_sequence", (), ranks=range(4))
    for tokens in (1, 200, 1300):
        keys = torch.from_numpy(values(tokens, tokens, 128))
        seqs = pool.run(attempt_fill, "balance", keys, ranks=range(4))
        assert max(seqs) - min(seqs) <= 1


def attempt_fill(rank: Rank, name: str, keys: torch.Tensor) -> int:
    """Append to a new sequence; the pages that this rank has free then."""
    scorer = rank.scorers[name]
    scorer.append_keys(scorer.add_sequence(), keys)
    return scorer._cache.allocator.num_free


def test_an_answer_is_what_it_was_after_all_this(pool: RankPool, pages_of_three: str) -> None:
    script = [Step("add_sequence"), Step("append_keys", (0,), values(0, 300, 128))]
    outcomes = pool.run(process_group.play, pages_of_three, script, ranks=range(3))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert not any(isinstance(outcome, Answer) for outcome in outcomes[0])
