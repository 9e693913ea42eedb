"""Recall against unquantised scoring: the published figures of real cases, and small ones counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from indexer.case import Case, read_case
from indexer.fidelity import selection_recall, unquantised_scores
from indexer.replay import load_case
from kernel.errors import InvalidArgumentError
from tests.support.raw_case import paged_case, small_case
from tests.support.real_cases import CODE, CUT, more_case

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
