"""What a scorer's results carry, which operation makes them, and what happens when there is no room."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from indexer import InvalidArgumentError
from indexer.pipeline import MAX_DECODE_QUERIES
from kernel.backends.cpu import CpuBackend
from kernel.batch import ScoreBatch
from tests.support.compare import assert_same_bits
from tests.support.filled_scorer import QUERY_LENS, all_queries, exact, filled, new_scorer


def test_a_result_names_its_stages_and_cannot_be_changed() -> None:
    scorer = new_scorer()
    seq = filled(scorer)[0]
    q = all_queries(4)[:3]
    with_scores, without = scorer.score(q, [seq]), scorer.score(q, [seq], return_scores=False)
    assert list(with_scores.timings) == ["check", "quantize_query", "score", "topk"]
    assert list(without.timings) == ["check", "quantize_query", "select"]
    assert all(0 < seconds < 60 for seconds in dict(with_scores.timings).values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        with_scores.backend = "other"  # type: ignore[misc]


def test_results_do_not_change_with_the_next_call() -> None:
    scorer = new_scorer()
    seq = filled(scorer)[0]
    first = scorer.score(all_queries(4)[:3], [seq])
    assert first.scores is not None
    ids, scores = first.block_ids.clone(), first.scores.clone()
    scorer.score(-all_queries(4)[:3], [seq])
    assert_same_bits(first.block_ids, ids)
    assert_same_bits(first.scores, scores)


def test_threads_take_turns() -> None:
    scorer = new_scorer(num_pages=400)
    made: list[tuple[int, int]] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(5):
            seq = scorer.add_sequence()
            for _ in range(5):
                scorer.append_keys(seq, exact(generator, 70, 128))
            scorer.free_sequence(scorer.fork_sequence(seq))
            made.append((seq, seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 20
    assert scorer.num_free_pages == 400 - 20 * 3
    tables = [page for seq, _ in made for page in scorer.block_table(seq).tolist()]
    assert len(set(tables)) == len(tables)


@pytest.mark.parametrize("known_beforehand", [True, False])
def test_scores_that_do_not_fit_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, known_beforehand: bool
) -> None:
    scorer = new_scorer()
    seq = filled(scorer)[0]
    q = all_queries(4)[:3]
    ids = scorer.score(q, [seq]).block_ids

    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    if known_beforehand:
        monkeypatch.setattr("indexer.pipeline.memory_bytes", lambda _: 4 * 4 * 3 * 6 - 1)
    else:
        monkeypatch.setattr("indexer.pipeline.torch.empty", no_memory)
    message = (
        r"return_scores = True: scores \[4, 3, 6\] take 288 bytes, which cpu does not have; pass return_sc"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        scorer.score(q, [seq])
    monkeypatch.undo()
    monkeypatch.setattr("indexer.pipeline.memory_bytes", lambda _: 4 * 4 * 3 * 6)
    assert_same_bits(scorer.score(q, [seq]).block_ids, ids)
    assert_same_bits(scorer.score(q, [seq], return_scores=False).block_ids, ids)


def test_long_requests_take_prefill_and_short_ones_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = new_scorer()
    seqs = filled(scorer)
    lengths: dict[str, list[int]] = {}

    def spy(name: str) -> None:
        real = getattr(CpuBackend, name)

        def call(self: CpuBackend, batch: ScoreBatch, *rest: object) -> object:
            lengths[name] = [request.query_len for request in batch.requests]
            return real(self, batch, *rest)

        monkeypatch.setattr(CpuBackend, name, call)

    for name in ("score_prefill", "score_decode", "select"):
        spy(name)
    scorer.score(all_queries(4), seqs, QUERY_LENS)
    assert MAX_DECODE_QUERIES == 16
    assert lengths == {"score_decode": [3, 1, 16], "score_prefill": [40, 129, 17]}
    lengths.clear()
    scorer.score(all_queries(4), seqs, QUERY_LENS, return_scores=False)
    assert lengths == {"select": QUERY_LENS}


def test_results_are_compared_by_identity() -> None:
    """Tensors have no equality that is true or false."""
    scorer = new_scorer()
    first, second = (scorer.score(all_queries(4)[:0], []) for _ in range(2))
    assert first == first
    assert first != second
    assert len({first, second}) == 2


@pytest.mark.parametrize("return_scores", [True, False])
def test_numpy_out_of_memory_is_the_error_that_torch_s_is(
    monkeypatch: pytest.MonkeyPatch, return_scores: bool
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("injected")

    scorer = new_scorer("reference")
    seqs = filled(scorer)
    monkeypatch.setattr("kernel.backends.reference.backend.score_batch", fail)
    with pytest.raises(InvalidArgumentError, match=r"^q.shape\[0\] = 206: the call needs more memory"):
        scorer.score(all_queries(4), seqs, QUERY_LENS, return_scores=return_scores)
