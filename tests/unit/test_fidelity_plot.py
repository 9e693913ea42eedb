"""The picture of several cases: each is told apart, and nothing lies on a bar."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from matplotlib.figure import Figure

from client.plots import draw_fidelity, draw_layers
from indexer.fidelity import CaseFidelity, case_fidelity
from indexer.made_cases import Shape, make_case


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
