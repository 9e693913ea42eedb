"""What the picture shows: which cells, which of them selected, and where the outlines run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.score_map import MAX_BLOCKS, MAX_QUERIES, _edges, draw_score_map, score_map
from indexer.case import Case, read_case
from tests.support.real_cases import CODE, CUT


def shown_cells(case: Case, head: int = 0) -> Any:
    assert case.expected_scores is not None
    assert case.expected_block_ids is not None
    return score_map(case, case.expected_scores, case.expected_block_ids, head)


def test_long_request_is_sampled_from_first_to_last_query() -> None:
    case = read_case(CODE)
    cells = shown_cells(case, head=1)
    assert cells.scores.shape == (MAX_QUERIES, 64)
    assert (cells.positions[0], cells.positions[-1]) == (8192 - 256, 8191)
    assert (np.diff(cells.positions) > 0).all()
    assert case.expected_block_ids is not None
    for position, selected in zip(cells.positions, cells.selected):
        ids = case.expected_block_ids[1, position - (8192 - 256)]
        assert np.flatnonzero(selected).tolist() == sorted(ids.tolist())
    assert (cells.forced.sum(axis=1) == 1).all()
    assert (cells.future.sum(axis=1) == 63 - cells.positions // 128).all()


def test_request_with_most_cells_is_shown() -> None:
    cells = shown_cells(read_case(CUT))
    assert cells.request == 0
    assert cells.positions.tolist() == list(range(513, 520))
    assert not cells.forced.any()


def test_long_context_is_shown_by_its_last_blocks() -> None:
    blocks = MAX_BLOCKS + 44
    case = Case(
        index_q=np.ones((1, 1, 128), dtype=np.float32),
        index_k=np.ones((blocks * 128, 128), dtype=np.float32),
        cu_seqlens_q=np.array([0, 1], dtype=np.int32),
        seq_lens=np.array([blocks * 128], dtype=np.int32),
        topk=2,
    )
    scores = np.arange(blocks, dtype=np.float32).reshape(1, 1, blocks)
    cells = score_map(case, scores, np.array([[[blocks - 1, 3]]], dtype=np.int32))
    assert cells.first_block == 44
    assert cells.scores[0].tolist() == scores[0, 0, 44:].tolist()
    assert np.flatnonzero(cells.selected).tolist() == [MAX_BLOCKS - 1]


def test_outline_runs_between_selected_and_other_cells() -> None:
    lone = np.zeros((3, 4), dtype=bool)
    lone[1, 2] = True
    around = {
        ((11.5, 0.5), (12.5, 0.5)),
        ((11.5, 1.5), (12.5, 1.5)),
        ((11.5, 0.5), (11.5, 1.5)),
        ((12.5, 0.5), (12.5, 1.5)),
    }
    assert {tuple(segment) for segment in _edges(lone, first_block=10)} == around
    assert len(_edges(np.ones((3, 4), dtype=bool), 0)) == 2 * (3 + 4)
    assert _edges(np.zeros((3, 4), dtype=bool), 0) == []


def test_picture_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        draw_score_map(shown_cells(read_case(CUT)), "title", tmp_path / "folder")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
