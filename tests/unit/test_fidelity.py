"""Recall against unquantised scoring: the published figures of real cases, and small ones counted by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from indexer import IndexerConfig, IndexScorer, fidelity
from indexer.case import Case, EngineRecord, read_case
from indexer.fidelity import block_scores, case_fidelity, selection_recall, unquantised_scores, with_sentinels
from indexer.made_cases import Shape, make_case
from indexer.oracle import select
from indexer.replay import as_tensor, load_case
from kernel.backends.registry import CHOOSING_BACKENDS, create
from kernel.errors import InvalidArgumentError
from kernel.nvfp4 import dequantize, quantize_keys
from kernel.page import codes_of, scales_of
from tests.support.cases import CODE, CUT, more_case, paged_case, small_case

FIGURES = {
    "code_8k_l20": (512, 0.9348, 0.733, 0.9701, 0.867),
    "prose_8k_l10": (2048, 0.9654, 0.800, 0.9771, 0.867),
    "ragged_l15": (2020, 0.9558, 0.812, 0.9732, 0.812),
}
"""Counted rows; NVFP4 mean and worst; fp8 mean and worst: measured by whoever made the cases."""


def path_of(name: str) -> Path:
    return CODE if name == CODE.stem else more_case(name)


@pytest.mark.parametrize("name", FIGURES)
def test_published_recall_is_reproduced(name: str) -> None:
    path = path_of(name)
    case, exact = read_case(path), load_file(path.parent / "exact" / path.name)
    rows, mean, worst, fp8_mean, fp8_worst = FIGURES[name]
    exact_scores = torch.from_numpy(exact["scores_exact"])
    ours = load_case(case).score(return_scores=False).block_ids.cpu()
    assert case.expected_block_ids is not None
    theirs, fp8 = torch.from_numpy(case.expected_block_ids), torch.from_numpy(exact["block_ids_fp8"])
    for scores in (exact_scores, unquantised_scores(case)):
        for block_ids, figures in (
            (ours, (mean, worst)),
            (theirs, (mean, worst)),
            (fp8, (fp8_mean, fp8_worst)),
        ):
            recall = selection_recall(case, scores, block_ids)
            assert recall.counted_rows == rows
            assert recall.rows == case.rows
            assert recall.mean == pytest.approx(figures[0], abs=5.01e-5)
            assert recall.worst == pytest.approx(figures[1], abs=5.01e-4)


@pytest.mark.parametrize("name", FIGURES)
def test_unquantised_scores_are_the_published_ones(name: str) -> None:
    path = path_of(name)
    case, exact = read_case(path), load_file(path.parent / "exact" / path.name)["scores_exact"]
    scores = unquantised_scores(case).numpy()
    free = np.abs(exact) < 1e29  # the published ones have the sentinels applied
    assert free.mean() > 0.4
    np.testing.assert_allclose(scores[free], exact[free], rtol=2e-5, atol=2e-4)
    assert (np.isneginf(scores) == np.isneginf(exact)).all()


def test_exact_selection_has_full_recall_in_every_row() -> None:
    case = read_case(CODE)
    exact = load_file(CODE.parent / "exact" / CODE.name)
    recall = selection_recall(
        case, torch.from_numpy(exact["scores_exact"]), torch.from_numpy(exact["block_ids_exact"])
    )
    assert (recall.mean, recall.worst) == (1.0, 1.0)


def one_head(num_keys: int, num_queries: int, **options: Any) -> Case:
    return Case(
        index_q=np.ones((num_queries, 1, 128), dtype=np.float32),
        index_k=np.ones((num_keys, 128), dtype=np.float32),
        cu_seqlens_q=np.array([0, num_queries], dtype=np.int32),
        seq_lens=np.array([num_keys], dtype=np.int32),
        **options,
    )


@pytest.mark.parametrize(
    ("init", "local", "topk", "selected", "recall"),
    [
        (0, 0, 2, [5, 4], 1.0),  # scores rise with the block, 6 blocks
        (0, 0, 2, [5, 3], 0.5),
        (0, 0, 2, [0, 1], 0.0),
        (0, 0, 2, [5, -1], 0.5),
        (0, 1, 2, [5, 4], 1.0),  # 5 is forced: one slot, and 4 is the best free block
        (0, 1, 2, [5, 3], 0.0),
        (1, 1, 3, [0, 5, 4], 1.0),
        (1, 1, 3, [0, 5, 1], 0.0),
        (2, 0, 4, [0, 1, 5, 2], 0.5),
    ],
)
def test_forced_blocks_are_left_out_of_both_sets(
    init: int, local: int, topk: int, selected: list[int], recall: float
) -> None:
    case = one_head(6 * 128, 1, init_blocks=init, local_blocks=local, topk=topk)
    found = selection_recall(
        case, torch.arange(6.0).view(1, 1, 6), torch.tensor([[selected]], dtype=torch.int32)
    )
    assert found.counted_rows == 1
    assert found.mean == recall


@pytest.mark.parametrize(
    ("init", "local", "topk"), [(0, 0, 6), (0, 0, 7), (0, 4, 4), (9, 0, 4), (3, 3, 6), (1, 9, 3)]
)
def test_rows_without_a_choice_are_not_counted(init: int, local: int, topk: int) -> None:
    case = one_head(6 * 128, 2, init_blocks=init, local_blocks=local, topk=topk)
    ids = torch.full((1, 2, topk), -1, dtype=torch.int32)
    recall = selection_recall(case, torch.zeros(1, 2, 6), ids)
    assert (recall.counted_rows, recall.rows) == (0, 2)
    assert (recall.mean, recall.worst) == (1.0, 1.0)


def test_equal_scores_go_to_the_lower_id() -> None:
    case = one_head(6 * 128, 1, local_blocks=0, topk=2)
    for ids, mean in (([0, 1], 1.0), ([0, 5], 0.5)):
        found = selection_recall(case, torch.zeros(1, 1, 6), torch.tensor([[ids]], dtype=torch.int32))
        assert found.mean == mean


def test_scores_mask_every_key_after_the_query() -> None:
    """The last key is the largest; only the last query may see it."""
    case = one_head(131, 3)
    assert case.index_k is not None
    case.index_k[130] = 3
    scores = unquantised_scores(case)
    assert scores[0, :, 0].tolist() == [128.0] * 3
    assert scores[0, :, 1].tolist() == [128.0, 128.0, 384.0]


def test_scores_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = read_case(CUT)
    whole = unquantised_scores(case)
    monkeypatch.setattr("indexer.fidelity._CHUNK_ROWS", 8)
    monkeypatch.setattr("indexer.fidelity._CHUNK_BLOCKS", 2)
    torch.testing.assert_close(unquantised_scores(case), whole, rtol=1e-5, atol=1e-4)


def test_every_key_type_gives_its_own_values() -> None:
    small = small_case()
    assert small.index_k is not None
    keys = small.index_k.astype(np.float32)
    for dtype in (ml_dtypes.bfloat16, np.float32):  # bf16 values are exact in fp32
        torch.testing.assert_close(
            unquantised_scores(small_case(index_k=keys.astype(dtype))),
            unquantised_scores(small),
            rtol=0,
            atol=0,
        )


def test_pages_alone_have_no_fidelity() -> None:
    with pytest.raises(InvalidArgumentError, match="index_k"):
        unquantised_scores(paged_case())


# What formats of the keys cost: the published figures, and small cases counted by hand.


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
    queries = 4 if max_cells == 1 else 12
    case = make_case("ragged", Shape(context=128 * 30, queries=queries, heads=2, topk=6), 3)
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


# Four over six: the same bytes from both backends that have it, smaller errors, more of the selection.


def adversarial_keys() -> torch.Tensor:
    """Random groups, zeros, ties of the two errors, floors, saturation, and every value of bf16 in places."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(200, 128, generator=generator),
        torch.zeros(1, 128),
        torch.full((1, 128), 3.0),
        torch.randn(20, 128, generator=generator) * 2.0**-9,
        torch.randn(20, 128, generator=generator) * 2.0**-12,
        torch.randn(20, 128, generator=generator) * 1000,
        torch.tensor([0.0, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, -0.0, -5, -6, 0.25]).repeat(1, 8),
        torch.finfo(torch.float32).max * torch.ones(1, 128),
    ]
    return torch.cat(rows)


def pages_of(backend: str, choice: str, keys: torch.Tensor) -> torch.Tensor:
    pages = torch.zeros(-(-len(keys) // 128), 9216, dtype=torch.uint8)
    create(backend, scale_choice=choice).insert(keys, pages, torch.arange(len(keys)))  # type: ignore[arg-type]
    return pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_backends_write_the_same_bytes(dtype: torch.dtype) -> None:
    keys = adversarial_keys()
    keys = keys[keys.to(dtype).isfinite().all(dim=1)].to(dtype)
    cpu, reference = (pages_of(backend, "four_over_six", keys) for backend in CHOOSING_BACKENDS)
    assert torch.equal(cpu, reference)
    assert not torch.equal(cpu, pages_of("cpu", "six", keys))


def test_six_stays_the_default() -> None:
    keys = adversarial_keys()
    for first, second in zip(quantize_keys(keys), quantize_keys(keys, "six")):
        assert torch.equal(first, second)
    pages = torch.zeros(3, 9216, dtype=torch.uint8)
    create("cpu").insert(keys, pages, torch.arange(len(keys)))
    assert torch.equal(pages, pages_of("cpu", "six", keys))
    assert IndexerConfig(num_index_heads=1, num_pages=1).scale_choice == "six"


def test_no_groups_largest_error_grows_and_a_scale_is_one_of_two() -> None:
    keys = adversarial_keys()
    errors, scales = {}, {}
    for choice in ("six", "four_over_six"):
        pages = pages_of("reference", choice, keys)
        read = dequantize(codes_of(pages), scales_of(pages)).flatten(0, 1)[: len(keys)]
        errors[choice] = (read.double() - keys.double()).abs().view(-1, 8, 16).amax(-1)
        scales[choice] = scales_of(pages).flatten(0, 1)[: len(keys)]
    assert (errors["four_over_six"] <= errors["six"]).all()
    changed = scales["six"] != scales["four_over_six"]
    assert 0.1 < changed.float().mean() < 0.9
    assert (errors["four_over_six"] < errors["six"])[changed].all()
    # 1.5 times the scale, within E4M3's rounding of either.
    as_float = {name: value.view(torch.float8_e4m3fn).float() for name, value in scales.items()}
    ratio = as_float["four_over_six"][changed] / as_float["six"][changed]
    assert ((ratio > 1.2) & (ratio <= 2.0)).all()


@pytest.mark.parametrize("name", ["code_8k_l20", "prose_8k_l10", "ragged_l15"])
def test_recall_on_real_activations_does_not_fall(name: str) -> None:
    case = read_case(CODE if name == CODE.stem else more_case(name))
    assert case.index_k is not None
    exact, means = unquantised_scores(case), {}
    for choice in ("six", "four_over_six"):
        blocks = int((-(-case.seq_lens.astype(np.int64) // 128)).sum())
        scorer = IndexScorer(
            IndexerConfig(
                num_index_heads=case.num_heads,
                num_pages=blocks,
                local_blocks=case.local_blocks,
                backend="cpu",
                scale_choice=choice,
            )
        )
        sequences = []
        for keys in torch.split(as_tensor(case.index_k), case.seq_lens.tolist()):
            sequences.append(scorer.add_sequence())
            scorer.append_keys(sequences[-1], keys)
        out = scorer.score(as_tensor(case.index_q), sequences, case.query_lens.tolist(), return_scores=False)
        means[choice] = selection_recall(case, exact, out.block_ids).mean
    assert means["four_over_six"] > means["six"]


def test_other_backends_refuse_it_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="scale_choice"):
        IndexerConfig(num_index_heads=1, num_pages=1, scale_choice="five")  # type: ignore[arg-type]
    if "flydsl-sim" in _usable():
        with pytest.raises(InvalidArgumentError, match="amax/6 only"):
            create("flydsl-sim", scale_choice="four_over_six")


def _usable() -> list[str]:
    from kernel.backends.registry import statuses

    return [found.name for found in statuses() if found.usable]
