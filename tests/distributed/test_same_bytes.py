"""Every rank gives the bytes that one scorer gives: ids, scores, lengths and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - case files hold bfloat16
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from indexer import IndexerConfig, IndexScorer
from indexer.case import Case, read_case
from indexer.distributed import DistributedIndexScorer
from kernel.backends import registry
from tests.distributed.conftest import CONFIG, DIVISIONS, Worlds
from tests.support.cases import CODE, CUT, more_case
from tests.support.process_group import RankPool, Step, ThreadRanks, assert_same_outcomes, played
from tests.support.scorer_state import assert_consistent

HEADS = 4
NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(1800)]
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"return_scores": False},
    {"topk": 64, "order": "block", "return_scores": False},
    {"init_blocks": 2, "local_blocks": 3, "topk": 6, "return_scores": False},
    {"init_blocks": 3, "local_blocks": 2, "topk": 4},
)


def values(seed: int, *shape: int) -> NDArray[np.float32]:
    """Values whose products do not all fit fp32: a different order of summation shows."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def script_of(case: Case) -> list[Step]:
    """A case as calls: each request's keys appended in uneven parts, then scored with every option."""
    assert case.index_k is not None
    keys = np.asarray(case.index_k).astype(np.float32)
    script, start = [], 0
    lens = case.seq_lens.tolist()
    for place, tokens in enumerate(lens):
        script.append(Step("add_sequence"))
        own = keys[start : start + tokens]
        for first in range(0, tokens, 1000):
            script.append(Step("append_keys", (place,), own[first : first + 1000]))
        start += tokens
    queries = np.asarray(case.index_q).astype(np.float32)
    query_lens = np.diff(case.cu_seqlens_q).tolist()
    for options in OPTIONS:
        forced = {"init_blocks": case.init_blocks, "local_blocks": case.local_blocks, "topk": case.topk}
        merged = {**forced, **options, "query_lens": query_lens}
        script.append(Step("score", tuple(range(len(lens))), queries, merged))
    return script


@pytest.mark.parametrize(
    "path",
    [
        CUT,
        *(pytest.param(path, marks=NIGHTLY) for path in (CODE, "prose_8k_l10", "ragged_l15")),
    ],
    ids=lambda path: Path(path).stem,
)
def test_cases_of_real_activations(pool: RankPool, path: Path | str) -> None:
    case = read_case(more_case(path) if isinstance(path, str) else path)
    Worlds(pool, IndexerConfig(case.num_heads, 160, backend="cpu")).check(script_of(case))


@st.composite
def scripts(draw: Any, most_tokens: int = 1500, most_queries: int = 160) -> list[Step]:
    """Sequences that grow in any steps, forks that part, and ragged calls in between."""
    script: list[Step] = []
    lengths: list[int] = []
    for _ in range(draw(st.integers(1, 5), label="sequences")):
        if lengths and draw(st.booleans(), label="fork"):
            parent = draw(st.integers(0, len(lengths) - 1))
            script.append(Step("fork_sequence", (parent,)))
            lengths.append(lengths[parent])
        else:
            script.append(Step("add_sequence"))
            lengths.append(0)
        for tokens in draw(st.lists(st.integers(0, most_tokens // 3), max_size=3), label="appended"):
            script.append(Step("append_keys", (len(lengths) - 1,), values(len(script), tokens, 128)))
            lengths[-1] += tokens
        script.append(_score(draw, lengths, most_queries))
    return script


def _score(draw: Any, lengths: list[int], most_queries: int) -> Step:
    places = draw(st.lists(st.integers(0, len(lengths) - 1), max_size=4), label="scored")
    query_lens = [draw(st.integers(0, min(lengths[place], most_queries))) for place in places]
    options = {
        "query_lens": query_lens,
        "topk": draw(st.sampled_from([1, 3, 16, 64])),
        "init_blocks": draw(st.integers(0, 3)),
        "local_blocks": draw(st.integers(0, 3)),
        "order": draw(st.sampled_from(["score", "block"])),
        "return_scores": draw(st.booleans()),
    }
    total_q = sum(query_lens)
    return Step("score", tuple(places), values(total_q, total_q, HEADS, 128), options)


@settings(max_examples=3)
@given(scripts())
def test_ragged_batches(worlds: Worlds, script: list[Step]) -> None:
    worlds.check(script)


class Threads:
    """The one scorer, and scorers whose ranks are threads on every division, with small chunks and pieces."""

    def __init__(self) -> None:
        self.single = IndexScorer(CONFIG)
        self.divided = [
            (f"{ranks} ranks, {groups} head groups", ThreadRanks(CONFIG, ranks, groups))
            for ranks, groups in (*DIVISIONS, (2, 2), (5, 1), (8, 2))
        ]

    def check(self, script: list[Step]) -> None:
        """As :meth:`Worlds.check`; afterwards no rank holds anything."""
        expected = played(self.single, script)
        for name, ranks in self.divided:
            for outcome in ranks.run(lambda scorer: played(scorer, script)):
                assert_same_outcomes(outcome, expected, name)
            for scorer in ranks.scorers:
                assert_consistent(scorer)
                assert not scorer.pages.any(), "everything was dropped"


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    """Chunks of 100 tokens, pieces of some hundred cells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("indexer.distributed.share.CHUNK_TOKENS", 100)
        patch.setattr("indexer.distributed.share.PIECE_CELLS", 3000)
        yield Threads()


@settings(max_examples=4)
@given(scripts())
def test_ragged_batches_on_threads(threads: Threads, script: list[Step]) -> None:
    threads.check(script)


@pytest.mark.nightly
@settings(max_examples=50)
@given(scripts())
def test_many_ragged_batches_on_threads(threads: Threads, script: list[Step]) -> None:
    threads.check(script)


def test_forced_blocks_where_rows_see_fewer_of_them(threads: Threads) -> None:
    """Every token of the sequence is a query: the first rows see fewer blocks than are forced."""
    script = [Step("add_sequence"), Step("append_keys", (0,), values(0, 400, 128))]
    queries = values(1, 400, HEADS, 128)
    forced = ((3, 0), (0, 3), (2, 2), (2, 2), (9, 0), (0, 9), (9, 9), (9, 9))
    for place, (init_blocks, local_blocks) in enumerate(forced):
        options = {"init_blocks": init_blocks, "local_blocks": local_blocks, "topk": 3}
        script.append(Step("score", (0,), queries, {**options, "return_scores": place % 2 == 0}))
    threads.check(script)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(max_examples=20)
@given(scripts(most_tokens=4000, most_queries=1100))
def test_many_ragged_batches(worlds: Worlds, script: list[Step]) -> None:
    worlds.check(script)


def test_every_place_of_the_last_token_in_its_block(worlds: Worlds) -> None:
    """A sequence grows by one token over a block's edge, so that its partial block changes ranks."""
    script = [Step("add_sequence"), Step("append_keys", (0,), values(0, 637, 128))]
    for tokens in range(5):
        script.append(Step("append_keys", (0,), values(tokens, 1, 128)))
        options = {"return_scores": tokens % 2 == 0}
        script.append(Step("score", (0,), values(tokens, 200 if tokens == 3 else 17, HEADS, 128), options))
    worlds.check(script)


def test_ties_go_to_the_lower_block_wherever_it_lies(worlds: Worlds) -> None:
    block = values(0, 128, 128)
    keys = np.concatenate([block] * 13)
    script = [Step("add_sequence"), Step("append_keys", (0,), keys)]
    for topk in (1, 5, 20):
        options = {"topk": topk, "return_scores": False}
        script.append(Step("score", (0,), values(1, 3, HEADS, 128), options))
    worlds.check(script)


def test_nothing_to_score(worlds: Worlds) -> None:
    empty = values(0, 0, HEADS, 128)
    script = [
        Step("score", (), empty, {"query_lens": []}),
        Step("score", (), empty, {"query_lens": [], "return_scores": False}),
        Step("add_sequence"),
        Step("score", (0,), empty),
        Step("append_keys", (0,), values(0, 0, 128)),
        Step("append_keys", (0,), values(0, 3, 128)),
        Step("score", (0,), empty, {"return_scores": False}),
        Step("score", (0, 0), empty, {"query_lens": [0, 0]}),
        Step("free_sequence", (0,)),
    ]
    worlds.check(script)


def test_new_sequences_of_one_append_are_spread_over_the_ranks() -> None:
    """Six sequences of one key each take two pages of each of three ranks."""

    def pages_used(scorer: DistributedIndexScorer) -> int:
        sequences = [scorer.add_sequence() for _ in range(6)]
        scorer.append_keys(sequences, torch.from_numpy(values(0, 6, 128)))
        return CONFIG.num_pages - scorer._cache.allocator.num_free

    assert ThreadRanks(CONFIG, 3, 1).run(pages_used) == [2, 2, 2]


def test_a_chunk_that_many_blocks_of_others_lie_in(worlds: Worlds) -> None:
    """More queries than one chunk has, all of the sequence among them: the first blocks are partly unseen."""
    script = [Step("add_sequence"), Step("append_keys", (0,), values(0, 1300, 128))]
    for queries in (1300, 1025):
        options = {"return_scores": queries % 2 == 0}
        script.append(Step("score", (0,), values(queries, queries, HEADS, 128), options))
    worlds.check(script)


@pytest.mark.parametrize("heads", [1, 2])
def test_other_numbers_of_heads(pool: RankPool, heads: int) -> None:
    divisions = ((3, 1), (4, heads))
    config = IndexerConfig(heads, 64, topk_blocks=3, local_blocks=1, backend="cpu")
    script = [Step("add_sequence"), Step("append_keys", (0,), values(0, 1300, 128))]
    script += [
        Step("score", (0,), values(1, 140, heads, 128), {"return_scores": scores}) for scores in (True, False)
    ]
    Worlds(pool, config, divisions).check(script)


def test_the_oracle_as_backend(pool: RankPool) -> None:
    config = IndexerConfig(4, 32, topk_blocks=3, local_blocks=0, backend="reference")
    script = [Step("add_sequence"), Step("append_keys", (0,), values(0, 900, 128))]
    script += [
        Step("score", (0,), values(1, queries, 4, 128), {"return_scores": queries == 20})
        for queries in (1, 20, 140)
    ]
    Worlds(pool, config, ((3, 1), (4, 2))).check(script)


@pytest.mark.nightly
def test_the_gfx950_kernel_on_the_simulated_device(pool: RankPool) -> None:
    found = registry.status("flydsl-sim")
    if not found.usable:
        pytest.skip(found.reason)
    config = IndexerConfig(4, 8, topk_blocks=2, local_blocks=0, backend="flydsl-sim")
    script = [Step("add_sequence"), Step("append_keys", (0,), values(0, 700, 128))]
    for queries in (20, 3):
        options = {"return_scores": queries == 20}
        script.append(Step("score", (0,), values(queries, queries, HEADS, 128), options))
    Worlds(pool, config, ((2, 1),)).check(script)


def test_refusals_have_the_words_of_one_scorer(worlds: Worlds) -> None:
    bad = values(0, 4, 128)
    bad[2, 7] = np.nan
    script = [
        Step("add_sequence"),
        Step("append_keys", (0,), values(0, 300, 128)),
        Step("append_keys", (0,), bad),
        Step("append_keys", (0,), values(0, 4, 64)),
        Step("append_keys", (0,), values(0, 4, 128).astype(np.float64)),
        Step("score", (0,), values(0, 301, HEADS, 128)),
        Step("score", (0,), values(0, 3, HEADS, 128), {"topk": 65}),
        Step("score", (0, 0), values(0, 3, HEADS, 128)),
        Step("score", (0,), values(0, 3, 2, 128)),
        Step("free_sequence", (0,)),
        Step("free_sequence", (0,)),
        Step("append_keys", (0,), values(0, 1, 128)),
        Step("fork_sequence", (0,)),
    ]
    worlds.check(script)
