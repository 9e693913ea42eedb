"""Ranks on GPUs of their own, over NCCL: the bytes of one scorer, and errors in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from indexer import IndexerConfig
from indexer.case import read_case
from indexer.distributed.share import SharePiece
from kernel.backends import registry
from kernel.errors import InvalidArgumentError, OutOfPagesError, RankDisagreementError, RankLostError
from tests.distributed.conftest import Worlds
from tests.distributed.test_agreement import check_bytes_of_every_call
from tests.distributed.test_failures import (
    DEADLINE_SECONDS,
    SLACK_SECONDS,
    attempt,
    attempt_to_make,
    break_insert,
    end_in,
    fill,
    hasten,
    query,
)
from tests.distributed.test_same_bytes import HEADS, OPTIONS, script_of, scripts, values
from tests.support import process_group
from tests.support.cases import CODE, CUT
from tests.support.process_group import PerRank, Rank, RankPool, Step, rank_state

BACKEND = "cpu:gloo,cuda:nccl"
CONFIG = IndexerConfig(4, 512, topk_blocks=4, local_blocks=0, backend="triton", device="cuda")
SMALL = replace(CONFIG, num_pages=8, topk_blocks=3)
DIVISIONS = ((2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (8, 1), (8, 2))
"""(ranks, head groups); those that there are GPUs for."""


def gpus() -> int:
    """GPUs of this machine, or a skip if there are not two that the backend runs on."""
    status = registry.status("triton")
    if not status.usable:
        pytest.skip(f"backend triton: {status.reason}")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL needs a GPU for each of two ranks, and torch sees {torch.cuda.device_count()}")
    return torch.cuda.device_count()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A rank on each of at most eight GPUs."""
    with RankPool(min(gpus(), 8), BACKEND) as ranks:
        yield ranks


@pytest.fixture(scope="module", params=["exact", "fast"])
def worlds(request: pytest.FixtureRequest, pool: RankPool) -> Worlds:
    """Scorers of four heads on every division, and one on a GPU of this process."""
    config = replace(CONFIG, precision=request.param)
    return Worlds(pool, config, divisions(pool))


def divisions(pool: RankPool) -> tuple[tuple[int, int], ...]:
    """Those that the pool has ranks for."""
    return tuple(division for division in DIVISIONS if division[0] <= len(pool.processes))


@pytest.mark.parametrize("path", [CUT, CODE], ids=lambda path: Path(path).stem)
def test_cases_of_real_activations(worlds: Worlds, path: Path) -> None:
    worlds.check(script_of(read_case(path)))


@settings(max_examples=3)
@given(scripts(most_tokens=9000, most_queries=400))
def test_ragged_batches(worlds: Worlds, script: list[Step]) -> None:
    worlds.check(script)


def test_contexts_far_beyond_k_blocks_on_permuted_pages(worlds: Worlds) -> None:
    """Sequences that grow in turn and are freed in between, so that pages lie in no order; a fork that
    parts; prefill of more than a chunk, decode of one and of several queries, both in one call."""
    script = [Step("add_sequence") for _ in range(4)]
    for part in range(6):
        script += [Step("append_keys", (place,), values(part, 1500 + 77 * place, 128)) for place in range(4)]
    script.append(Step("free_sequence", (1,)))
    script += [Step("fork_sequence", (0,)), Step("append_keys", (4,), values(40, 3000, 128))]
    script += [
        Step("append_keys", (0,), values(41, 20_000, 128)),
        Step("append_keys", (2,), values(42, 1, 128)),
    ]
    for places, query_lens in (
        ((0,), [1500]),
        ((0, 2, 3, 4), [1, 1, 1, 1]),
        ((4, 0, 2), [4, 3, 16]),
        ((3, 0, 4, 2, 0), [200, 1, 1100, 0, 5]),
    ):
        queries = values(sum(query_lens), sum(query_lens), HEADS, 128)
        script += [
            Step("score", places, queries, {**options, "query_lens": query_lens}) for options in OPTIONS
        ]
    worlds.check(script)


def test_forced_blocks_where_rows_see_fewer_of_them(worlds: Worlds) -> None:
    script = [Step("add_sequence"), Step("append_keys", (0,), values(0, 470, 128))]
    queries = values(1, 470, HEADS, 128)
    for init_blocks, local_blocks in ((3, 0), (0, 3), (2, 2), (9, 9)):
        for return_scores in (True, False):
            options = {"init_blocks": init_blocks, "local_blocks": local_blocks, "topk": 3}
            script.append(Step("score", (0,), queries, {**options, "return_scores": return_scores}))
    worlds.check(script)


def test_ties_go_to_the_lower_block_wherever_it_lies(worlds: Worlds) -> None:
    script = [Step("add_sequence"), Step("append_keys", (0,), np.concatenate([values(0, 128, 128)] * 13))]
    script += [
        Step("score", (0,), values(1, 3, HEADS, 128), {"topk": topk, "return_scores": False})
        for topk in (1, 5, 20)
    ]
    worlds.check(script)


def test_refusals_have_the_words_of_one_scorer(worlds: Worlds) -> None:
    bad = values(0, 4, 128)
    bad[2, 7] = np.nan
    script = [
        Step("add_sequence"),
        Step("append_keys", (0,), values(0, 300, 128)),
        Step("append_keys", (0,), bad),
        Step("score", (0,), values(0, 301, HEADS, 128)),
        Step("score", (0,), values(0, 3, HEADS, 128), {"topk": 65}),
        Step("score", (0,), values(0, 0, HEADS, 128)),
        Step("free_sequence", (0,)),
        Step("fork_sequence", (0,)),
    ]
    worlds.check(script)


def test_bytes_of_every_call(pool: RankPool) -> None:
    """Counted where they are handed to NCCL and to Gloo."""
    for ranks, groups in divisions(pool):
        check_bytes_of_every_call(pool, replace(CONFIG, num_pages=16), ranks, groups)


@pytest.fixture
def pair() -> Iterator[RankPool]:
    """Two ranks with a scorer that holds a sequence of nine blocks, to be broken."""
    gpus()
    with RankPool(2, BACKEND) as pool:
        pool.run(process_group.make, "s", SMALL, 2, 1, 60.0, ranks=range(2))
        fill(pool, range(2))
        # The first call compiles the kernels, each rank in its own time.
        assert [error for error, _ in pool.run(attempt, "s", "score", (query(), [0]), ranks=range(2))] == [
            None
        ] * 2
        pool.run(hasten, "s", ranks=range(2))
        yield pool


@pytest.mark.timeout(200)
@pytest.mark.parametrize("moment", ["scoring", "exchanging", "inserting"])
def test_a_rank_killed_within_a_call(pair: RankPool, moment: str) -> None:
    """Also between its header and its candidates, when the others already wait for it on their GPUs: what
    they queue there afterwards still runs."""
    before = pair.run(rank_state, "s", ranks=[0])
    pair.run(end_in, "s", 1, moment, ranks=range(2))
    method, arguments = "score", (query(), [0])
    if moment == "inserting":
        method, arguments = "append_keys", (0, torch.from_numpy(values(2, 400, 128)))  # type: ignore[assignment]
    pair.start(attempt, "s", method, arguments, ranks=range(2))
    (error, seconds), lost = pair.finish(range(2))
    assert lost is None
    assert isinstance(error, RankLostError)
    assert str(error).startswith("rank 1: its connection ended")
    assert error.ranks == (1,)
    assert seconds < DEADLINE_SECONDS + SLACK_SECONDS
    assert pair.run(rank_state, "s", ranks=[0]) == before
    for error, seconds in pair.run(attempt, "s", "add_sequence", (), ranks=[0]):
        assert isinstance(error, RankLostError)
        assert error.ranks == (1,)
        assert seconds < DEADLINE_SECONDS


def make_with_timeout(rank: Rank, name: str, seconds: float) -> None:
    """Make a scorer on a group whose messages NCCL's own watchdog gives up after a while, and the process."""
    group = dist.new_group([0, 1], backend=BACKEND, timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    rank.groups[2] = group
    process_group.make(rank, name, SMALL, 2, 1)


@pytest.mark.timeout(200)
def test_a_process_outlives_the_rank_that_it_lost(pair: RankPool) -> None:
    """A sidecar has to answer that it is not ready, long after the message that was never answered."""
    pair.run(make_with_timeout, "short", 2 * DEADLINE_SECONDS, ranks=range(2))
    fill(pair, range(2), "short")
    pair.run(hasten, "short", ranks=range(2))
    pair.run(end_in, "short", 1, "exchanging", ranks=range(2))
    pair.start(attempt, "short", "score", (query(), [0]), ranks=range(2))
    (error, _), lost = pair.finish(range(2))
    assert lost is None
    assert isinstance(error, RankLostError)
    time.sleep(3 * DEADLINE_SECONDS)
    assert pair.run(rank_state, "short", ranks=[0]) != [None]
    assert pair.processes[0].is_alive()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("moment", ["before", "exchanging"])
def test_a_rank_that_hangs_is_named_when_the_deadline_is_over(pair: RankPool, moment: str) -> None:
    before = pair.run(rank_state, "s", ranks=[0])
    if moment == "before":
        pair.stop(1)
        ((error, seconds),) = pair.run(attempt, "s", "score", (query(), [0]), ranks=[0])
    else:
        pair.run(end_in, "s", 1, moment, signal.SIGSTOP, ranks=range(2))
        pair.start(attempt, "s", "score", (query(), [0]), ranks=range(2))
        ((error, seconds),) = pair.finish([0])
    assert isinstance(error, RankLostError)
    assert str(error).startswith("rank 1: no answer within 5 s")
    assert DEADLINE_SECONDS <= seconds < 2 * DEADLINE_SECONDS + SLACK_SECONDS
    assert pair.run(rank_state, "s", ranks=[0]) == before


def keep_busy(rank: Rank, name: str, deadline: float, clocks: int) -> None:
    """Let every call end with work that keeps this rank's GPU for a while."""
    scorer = rank.scorers[name]
    scorer._ranks._deadline = timedelta(seconds=deadline)
    pieces = scorer._share.pieces

    def slow(*arguments: Any) -> Iterator[SharePiece]:
        yield from pieces(*arguments)
        with torch.cuda.device(scorer.device):
            torch.cuda._sleep(clocks)  # type: ignore[no-untyped-call]

    scorer._share.pieces = slow  # type: ignore[method-assign, assignment]


@pytest.mark.timeout(200)
def test_a_deadline_begins_when_the_own_part_is_done(pair: RankPool) -> None:
    """Both GPUs score for longer than the deadline, which only bounds how far ranks are apart."""
    pair.run(keep_busy, "s", 1.0, 6_000_000_000, ranks=range(2))
    for error, seconds in pair.run(attempt, "s", "score", (query(), [0]), ranks=range(2)):
        assert error is None
        assert seconds > 1.0


def test_a_rank_that_never_makes_its_scorer() -> None:
    gpus()
    with RankPool(2, BACKEND) as pool:
        options = {"head_groups": 1, "deadline_seconds": 1.0}
        (error,) = pool.run(attempt_to_make, SMALL, 2, options, ranks=[0])
        assert isinstance(error, RankLostError)
        assert error.ranks == (1,)


@pytest.mark.timeout(200)
def test_two_ranks_on_one_gpu() -> None:
    """NCCL refuses that, when the scorers are made and not at their first call."""
    gpus()
    with RankPool(2, BACKEND) as pool:
        options = {"head_groups": 1, "deadline_seconds": 5.0}
        config = replace(SMALL, device="cuda:0")
        for error in pool.run(attempt_to_make, config, 2, options, ranks=range(2)):
            assert isinstance(error, RankLostError)
            assert "NCCL failed" in str(error)
            assert "give each rank a GPU of its own" in str(error)


DISAGREEMENTS: dict[str, tuple[str, Callable[[], PerRank]]] = {
    "lengths": ("score", lambda: PerRank([(query(2), [0, 0], [1, 1]), (query(2), [0, 0], [2, 0])])),
    "keys": ("append_keys", lambda: PerRank([(0, query(2)[:, 0]), (0, query(3)[:, 0])])),
    "not finite": ("append_keys", lambda: PerRank([(0, query(2)[:, 0]), (0, query(2)[:, 0] * np.inf)])),
}


@pytest.fixture(scope="module")
def pages_of_two(pool: RankPool) -> str:
    """A scorer on two ranks that tests leave as it is: a sequence of nine blocks."""
    pool.run(process_group.make, "failures", SMALL, 2, 1, 60.0, ranks=range(2))
    fill(pool, range(2), "failures")
    return "failures"


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree(pool: RankPool, pages_of_two: str, name: str) -> None:
    method, arguments = DISAGREEMENTS[name]
    before = pool.run(rank_state, pages_of_two, ranks=range(2))
    outcomes = pool.run(attempt, pages_of_two, method, arguments(), ranks=range(2))
    for rank, (error, _) in enumerate(outcomes):
        if rank == 1 and name == "not finite":
            assert isinstance(error, InvalidArgumentError), "a rank that refuses says why itself"
            continue
        assert isinstance(error, RankDisagreementError)
        assert error.ranks == (1,)
    assert pool.run(rank_state, pages_of_two, ranks=range(2)) == before
    answers = pool.run(attempt, pages_of_two, "score", (query(), [0]), ranks=range(2))
    assert [error for error, _ in answers] == [None] * 2, "the next call that both make alike succeeds"


def test_a_device_that_fails_on_one_rank_leaves_both_as_they_were(pool: RankPool, pages_of_two: str) -> None:
    before = pool.run(rank_state, pages_of_two, ranks=range(2))
    pool.run(break_insert, pages_of_two, 1, ranks=range(2))
    keys = torch.from_numpy(values(3, 500, 128))
    outcomes = pool.run(attempt, pages_of_two, "append_keys", (0, keys), ranks=range(2))
    assert str(outcomes[1][0]) == "the device failed"
    assert isinstance(outcomes[0][0], RankDisagreementError)
    assert pool.run(rank_state, pages_of_two, ranks=range(2)) == before


def test_out_of_pages_is_the_same_refusal_on_every_rank(pool: RankPool, pages_of_two: str) -> None:
    """16 pages hold 16 blocks and 9 are used."""
    before = pool.run(rank_state, pages_of_two, ranks=range(2))
    keys = torch.zeros(52 + 128 * 8, 128)
    for error, _ in pool.run(attempt, pages_of_two, "append_keys", (0, keys), ranks=range(2)):
        assert isinstance(error, OutOfPagesError)
        assert error.num_pages == 8
    assert pool.run(rank_state, pages_of_two, ranks=range(2)) == before


def test_configurations_that_differ(pool: RankPool) -> None:
    for other in (replace(SMALL, topk_blocks=4), replace(SMALL, precision="fast")):
        configs = PerRank([SMALL, other])
        for error in pool.run(attempt_to_make, configs, 2, {"head_groups": 1}, ranks=range(2)):
            assert isinstance(error, RankDisagreementError)
            assert error.ranks == (1,)
            assert "configured differently" in str(error)
