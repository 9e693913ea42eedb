"""What formats of the keys cost: the published figures, and small cases counted by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from indexer import fidelity
from indexer.case import Case, EngineRecord, read_case
from indexer.fidelity import block_scores, case_fidelity, with_sentinels
from indexer.made_cases import Shape, make_case
from indexer.oracle import select
from kernel.errors import InvalidArgumentError
from tests.support.raw_case import paged_case
from tests.support.real_cases import CODE
from tests.unit.test_fidelity import FIGURES, path_of


@pytest.mark.parametrize("name", FIGURES)
def test_the_published_figures_are_reproduced(name: str) -> None:
    found = case_fidelity(read_case(path_of(name)), name, "cpu")
    rows, mean, worst, fp8_mean, fp8_worst = FIGURES[name]
    fp8, nvfp4 = found.formats
    assert found.counted_rows == rows == len(nvfp4.per_row) == len(found.gaps)
    assert (fp8.name, nvfp4.name) == ("fp8", "nvfp4")
    assert nvfp4.mean == pytest.approx(mean, abs=5.01e-5)
    assert nvfp4.worst == pytest.approx(worst, abs=5.01e-4)
    assert fp8.mean == pytest.approx(fp8_mean, abs=5.01e-5)
    assert fp8.worst == pytest.approx(fp8_worst, abs=5.01e-4)
    # The gap at the last place is a fraction of the error: why recall is not 1.
    assert nvfp4.score_error is not None
    assert 0.2 < found.gap_quantiles[2] / nvfp4.score_error < 0.5
    weighted = sum(head.rows * head.mean for head in nvfp4.heads) / rows
    assert weighted == pytest.approx(nvfp4.mean)
    assert min(head.worst for head in nvfp4.heads) == nvfp4.worst == found.worst_rows[0].recall


def test_an_engines_ids_are_compared_too() -> None:
    """The selection from unquantised keys, as an engine with a bf16 cache has it: nothing is lost."""
    case = read_case(CODE)
    ids = load_file(CODE.parent / "exact" / CODE.name)["block_ids_exact"]
    record = EngineRecord(block_ids=ids, layer=20)
    found = case_fidelity(dataclasses.replace(case, engine=record), "code", "cpu")
    engine = found.formats[2]
    assert (found.layer, engine.name, engine.mean, engine.worst) == (20, "engine", 1.0, 1.0)
    assert engine.lost_mass == pytest.approx(0.0, abs=1e-9)
    assert engine.score_error is None


def needle_case() -> Case:
    return make_case("needle", Shape(context=128 * 6, queries=2, heads=2, topk=2), 1)


def test_mass_is_that_of_a_softmax_over_all_keys() -> None:
    case = needle_case()
    assert case.index_k is not None
    found = case_fidelity(case, "needle", "cpu")
    keys, queries = case.index_k.astype(np.float64), case.index_q.astype(np.float64)
    kept = []
    for head in range(2):
        for token in range(2):
            position = 128 * 6 - 2 + token
            logits = keys[: position + 1] @ queries[token, head] / np.sqrt(128)
            weights = np.exp(logits - logits.max())
            blocks = np.add.reduceat(weights / weights.sum(), np.arange(0, 128 * 6, 128))
            best = np.array([(keys[b * 128 : b * 128 + 128] @ queries[token, head]).max() for b in range(5)])
            kept.append(blocks[best.argmax()] + blocks[5])
    assert found.kept_mass == pytest.approx(np.mean(kept), rel=1e-4)
    assert found.formats[1].mean == 1.0
    assert found.formats[1].lost_mass == pytest.approx(0.0, abs=1e-6)


def test_worst_rows_name_the_blocks_that_were_missed() -> None:
    case = make_case("low-contrast", Shape(context=128 * 40, queries=8, heads=2), 0)
    found = case_fidelity(case, "low", "cpu")
    assert found.formats[1].mean < 0.99
    recalls = [row.recall for row in found.worst_rows]
    assert recalls == sorted(recalls)
    first = found.worst_rows[0]
    assert len(first.missed) == round((1 - first.recall) * 15)
    assert first.position == 128 * 40 - 8 + first.token
    assert first.gap >= 0


def test_a_case_without_a_choice_has_nothing_to_lose() -> None:
    found = case_fidelity(make_case("m3", Shape(context=300, queries=3, heads=1), 0), "short", "cpu")
    assert (found.counted_rows, found.gap_quantiles, found.worst_rows) == (0, (), ())
    assert found.formats[1].mean == 1.0


def test_sentinels_are_the_contracts() -> None:
    case = dataclasses.replace(needle_case(), init_blocks=1, local_blocks=6)
    scores = with_sentinels(case, torch.zeros(2, 2, 6))
    assert (scores == 1e29).all(), "a block that is both counts as local"
    case = dataclasses.replace(case, local_blocks=1)
    assert with_sentinels(case, torch.zeros(2, 2, 6))[0, 0].tolist() == pytest.approx(
        [1e30, 0, 0, 0, 0, 1e29]
    )
    assert select(scores.numpy(), case).shape == (2, 2, 2)


def test_a_sum_over_a_block_can_take_the_largests_place() -> None:
    case = needle_case()
    assert case.index_k is not None
    queries, keys = torch.ones(2, 2, 128), torch.ones(128 * 6, 128)
    count = block_scores(case, queries, keys, lambda products: torch.isfinite(products).sum(dim=3).float())
    assert count[0, 0].tolist() == [128, 128, 128, 128, 128, 127]


def test_pages_alone_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="index_k"):
        case_fidelity(paged_case(), "pages", "cpu")


@pytest.mark.parametrize("max_cells", [1, 3000])
def test_a_large_call_is_compared_in_parts(max_cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token at a time, or some of a request: the figures are those of the whole call."""
    case = make_case("ragged", Shape(context=128 * 30, queries=12, heads=2, topk=6), 3)
    ids = np.random.default_rng(0).integers(-1, 30, (2, case.total_q, 6), dtype=np.int32)
    case = dataclasses.replace(case, engine=EngineRecord(block_ids=ids, layer=3))
    whole = case_fidelity(case, "whole", "cpu")
    calls = []
    measure = fidelity.measure_rows

    def counted(part: Case, backend: str) -> fidelity.RowFidelity:
        calls.append(part.rows * part.num_score_blocks)
        return measure(part, backend)

    monkeypatch.setattr(fidelity, "MAX_CELLS", max_cells)
    monkeypatch.setattr(fidelity, "measure_rows", counted)
    found = case_fidelity(case, "parts", "cpu")
    assert len(calls) > 6
    assert max(calls) <= max(max_cells, 2 * 30)
    assert (found.layer, found.rows, found.counted_rows) == (3, whole.rows, whole.counted_rows)
    assert found.gap_quantiles == pytest.approx(whole.gap_quantiles, rel=1e-4)
    assert found.kept_mass == pytest.approx(whole.kept_mass, rel=1e-6)
    for ours, theirs in zip(found.formats, whole.formats):
        np.testing.assert_array_equal(ours.per_row, theirs.per_row)
        assert ours.heads == theirs.heads
        assert (ours.mean, ours.worst) == (theirs.mean, theirs.worst)
        assert ours.lost_mass == pytest.approx(theirs.lost_mass, abs=1e-6)
        if theirs.score_error is not None:
            assert ours.score_error == pytest.approx(theirs.score_error, rel=1e-4)
    places = [(row.request, row.head, row.token, row.position, row.missed) for row in found.worst_rows]
    assert places == [
        (row.request, row.head, row.token, row.position, row.missed) for row in whole.worst_rows
    ]
    assert len({row.request for row in found.worst_rows}) > 1


def test_ids_of_no_block_and_ids_twice_are_no_blocks_of_an_engine() -> None:
    case = read_case(CODE)
    ids = load_file(CODE.parent / "exact" / CODE.name)["block_ids_exact"].copy()
    ids[:, :, 8:] = np.array([1 << 30, -(1 << 31), 64, -1, *ids[0, 0, :4]], dtype=np.int32)
    engine = case_fidelity(dataclasses.replace(case, engine=EngineRecord(block_ids=ids)), "x", "cpu").formats[
        2
    ]
    assert engine.mean < 0.8
    twice = ids.copy()
    twice[:, :, 8:] = ids[:, :, :8]
    once = ids.copy()
    once[:, :, 8:] = -1
    lost = [
        case_fidelity(dataclasses.replace(case, engine=EngineRecord(block_ids=some)), "x", "cpu")
        .formats[2]
        .lost_mass
        for some in (twice, once)
    ]
    assert lost[0] == lost[1] > 0
