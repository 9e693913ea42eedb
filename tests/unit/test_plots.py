"""The picture of several cases: each is told apart, and nothing lies on a bar."""

from __future__ import annotations

import dataclasses
import functools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from client.plots import (
    MAX_BLOCKS,
    MAX_QUERIES,
    _draw_map,
    _edges,
    _title,
    draw_fidelity,
    draw_layers,
    draw_score_map,
    score_map,
)
from indexer.case import Case, read_case
from indexer.fidelity import CaseFidelity, case_fidelity
from indexer.made_cases import Shape, make_case
from kernel.batch import LOCAL_SCORE
from tests.support.cases import CODE, CUT


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of what is drawn."""
    drawn: list[Any] = []
    save = Figure.savefig

    def kept(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        drawn.extend(figure.axes)

    monkeypatch.setattr(Figure, "savefig", kept)
    return drawn


@functools.cache
def some_case() -> CaseFidelity:
    return case_fidelity(make_case("m3", Shape(context=3000, queries=2, heads=1, topk=4), 0), "x", "cpu")


@pytest.mark.parametrize("count", [2, 6, 12, 57])
def test_names_do_not_run_into_each_other(axes: list[Any], count: int) -> None:
    case = some_case()
    cases = [
        dataclasses.replace(case, case=f"/folder/a_capture_of_one_long_call_{i:04d}.safetensors")
        for i in range(count)
    ]
    draw_layers(cases)
    labels = axes[0].get_xticklabels()
    assert len({label.get_text() for label in labels}) == count
    if labels[0].get_rotation() != 20:  # slanted names overlap as boxes and not as letters
        boxes = [label.get_window_extent() for label in labels]
        assert not any(left.overlaps(right) for left, right in pairwise(boxes))
    plot, legend = axes[0].get_window_extent(), axes[0].get_legend().get_window_extent()
    assert legend.y0 >= plot.y1 - 1, "the legend lies above the bars"


def test_a_picture_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    draw = Figure.draw

    def counted(figure: Figure, *arguments: Any) -> None:
        drawn.append(figure)
        draw(figure, *arguments)

    monkeypatch.setattr(Figure, "draw", counted)
    draw_layers([some_case()] * 2)
    assert len(drawn) == 1


def test_a_case_without_a_choice_has_no_bar(axes: list[Any]) -> None:
    short = case_fidelity(make_case("m3", Shape(context=300, queries=3, heads=1), 0), "short", "cpu")
    draw_layers([some_case(), short])
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["x"]


def test_no_axis_has_a_share_above_the_whole(axes: list[Any]) -> None:
    draw_fidelity(some_case())
    by_head, by_row, by_gap = axes
    assert max(by_head.get_yticks()) == 1
    assert by_row.get_xlim()[1] < 1.01
    assert max(by_gap.get_yticks()) <= 100


# What the picture shows: which cells, which of them selected, and where the outlines run.


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


def test_a_single_block_has_a_whole_number() -> None:
    case = Case(
        index_q=np.ones((1, 1, 128), dtype=np.float32),
        index_k=np.ones((1, 128), dtype=np.float32),
        cu_seqlens_q=np.array([0, 1], dtype=np.int32),
        seq_lens=np.array([1], dtype=np.int32),
    )
    scores, ids = np.full((1, 1, 1), LOCAL_SCORE, np.float32), np.array([[[0]]], dtype=np.int32)
    figure = Figure()
    axes = figure.subplots()
    _draw_map(figure, axes, score_map(case, scores, ids))
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [0]


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


def test_share_counts_every_query_not_only_those_drawn() -> None:
    case = read_case(CODE)
    cells = shown_cells(case, head=1)
    assert case.expected_block_ids is not None
    ids = case.expected_block_ids[1]
    assert cells.queries == len(ids) > len(cells.positions)
    assert cells.picked.tolist() == [int((ids == block).sum()) for block in range(64)]
    # one local block is forced: 62 for the first half of the queries, 63 for the second
    assert np.flatnonzero(cells.picked_forced).tolist() == [62, 63]
    assert cells.picked_forced.sum() == 256


def forced_map(local_blocks: int, keys: int) -> Any:
    case = Case(
        index_q=np.ones((2, 1, 128), dtype=np.float32),
        index_k=np.ones((keys, 128), dtype=np.float32),
        cu_seqlens_q=np.array([0, 2], dtype=np.int32),
        seq_lens=np.array([keys], dtype=np.int32),
        topk=2,
        local_blocks=local_blocks,
    )
    blocks = -(-keys // 128)
    scores = np.zeros((1, 2, blocks), np.float32)
    scores[:, :, -local_blocks:] = LOCAL_SCORE
    ids = np.tile(np.array([blocks - local_blocks, blocks - local_blocks + 1], np.int32), (1, 2, 1))
    return score_map(case, scores, ids)


def drawn(cells: Any) -> tuple[int, list[str]]:
    """How many axes there are, a colour bar being one, and what the legend says."""
    figure = Figure()
    axes: Any = figure.subplots()
    _draw_map(figure, axes, cells)
    return len(figure.axes), [text.get_text() for text in axes.get_legend().get_texts()]


def test_map_of_forced_blocks_alone_has_no_scale_of_scores() -> None:
    axes, legend = drawn(forced_map(local_blocks=4, keys=512))
    assert axes == 1
    assert not any("always" in text for text in legend)  # two of the four are not selected
    axes, _ = drawn(forced_map(local_blocks=3, keys=512))
    assert axes == 2


def test_title_keeps_its_end_and_holds_what_the_font_has() -> None:
    figure = Figure(figsize=(12.5, 8.2), dpi=130)
    what = ", head 0: block scores"
    assert _title(figure, "short $5$", what) == "short $5$" + what
    assert _title(figure, "a\u6f22b\udcff", what) == "a?b?" + what
    long = _title(figure, "begin" + "W" * 250 + "end", what)
    assert long.startswith("beginW")
    assert "..." in long
    assert long.endswith("Wend" + what)
    assert 60 < len(long) < 100


def test_picture_is_a_png_whatever_the_name() -> None:
    for name in ("$\\frac 5$\u6f22", "n" * 250):
        assert draw_score_map(shown_cells(read_case(CUT)), name).startswith(b"\x89PNG")
