"""Pictures of what a format of the keys costs the selection."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from indexer.key_fidelity import CaseFidelity

COLOURS = {"fp8": "#8da2c0", "nvfp4": "#31446b", "engine": "#e4572e"}
TITLE: dict[str, Any] = {"fontsize": 11, "fontweight": "bold", "loc": "left"}
NAME_CHARS = 24
ROW_CHARS = 100
"""Characters of names that stand side by side below a picture."""
WORST: dict[str, Any] = {
    "linestyle": "none",
    "marker": "v",
    "markersize": 7,
    "color": "#1a1a1a",
    "markeredgecolor": "white",  # it lies on bars of any colour
    "markeredgewidth": 0.9,
}


def draw_fidelity(shown: CaseFidelity, file_format: str = "png") -> bytes:
    """Draw a case's fidelity: recall by head, recall by row, gap at the last place beside the scores' error.

    Args:
        shown: a case with at least one counted row.
        file_format: ``png`` or ``svg``.
    """
    file = io.BytesIO()
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "svg.hashsalt": "nvfp4-indexer"}):
        figure = Figure(figsize=(12.5, 3.9), dpi=130, layout="constrained")
        by_head, by_row, by_gap = figure.subplots(1, 3)
        _recall_by_head(by_head, shown)
        _recall_by_row(by_row, shown)
        _gaps(by_gap, shown)
        metadata = {"Date": None} if file_format == "svg" else {}
        figure.savefig(file, format=file_format, metadata=metadata)
    return file.getvalue()


def _recall_by_head(axes: Any, shown: CaseFidelity) -> None:
    width = 0.8 / len(shown.formats)
    for index, found in enumerate(shown.formats):
        heads = np.array([head.head for head in found.heads])
        at = heads + (index - (len(shown.formats) - 1) / 2) * width
        means = [head.mean for head in found.heads]
        axes.bar(at, means, width=0.92 * width, color=COLOURS[found.name], label=found.name)
        worst = [head.worst for head in found.heads]
        axes.plot(at, worst, **WORST, label="worst row" if not index else None)
    least = min(head.worst for found in shown.formats for head in found.heads)
    axes.set_ylim(max(0.0, least - 0.05), 1.0 + 0.18 * (1.05 - least))  # room for the legend
    axes.set_yticks([tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= 1])
    axes.set_xticks(sorted({head.head for found in shown.formats for head in found.heads}))
    axes.set_xlabel("index head")
    axes.set_ylabel("recall against bf16 keys (share of blocks)")
    axes.set_title("Recall by head: mean, and worst row", **TITLE)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=4)
    _plain(axes)


def _recall_by_row(axes: Any, shown: CaseFidelity) -> None:
    for found in shown.formats:
        recall = np.sort(found.per_row)
        share = 100 * np.arange(1, recall.size + 1) / recall.size
        axes.step(recall, share, where="post", color=COLOURS[found.name], label=found.name, linewidth=1.8)
    least = min(found.worst for found in shown.formats)
    axes.set_xlim(
        max(0.0, min(least - 0.02, 0.95)), 1.005
    )  # nothing is above 1, also where all rows are at 1
    axes.set_ylim(0, 105)
    axes.set_xlabel("recall of a row (share of blocks)")
    axes.set_ylabel("rows with at most that recall (%)")
    axes.set_title(f"Recall by row: {shown.counted_rows:,} rows with a choice", **TITLE)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    _plain(axes)


def _gaps(axes: Any, shown: CaseFidelity) -> None:
    sets: list[tuple[str, Any, str]] = [("gap at the last place", shown.gaps, "#35b779")]
    sets += [
        (f"error of {found.name} scores", found.errors, COLOURS[found.name])
        for found in shown.formats
        if found.errors.size
    ]
    values = np.concatenate([numbers[numbers > 0] for _, numbers, _ in sets])
    low, high = np.quantile(values, (0.005, 1.0)) if values.size else (0.1, 1.0)
    edges = np.geomspace(low, max(high, low * 1.01), 45)
    for name, numbers, colour in sets:
        weights = np.full(numbers.size, 100 / max(1, numbers.size))
        axes.hist(
            np.clip(numbers, low, None),
            edges,
            weights=weights,
            histtype="step",
            color=colour,
            linewidth=1.8,
            label=f"{name} (median {np.median(numbers):.2g})" if numbers.size else name,
        )
    axes.set_xscale("log")
    axes.set_xlabel("score difference (units of q·k)")
    axes.set_ylabel("share of rows, or of scores (%)")
    axes.set_title("Margins, and errors of scores", **TITLE)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.35)
    axes.set_yticks([tick for tick in axes.get_yticks() if tick <= 100])  # the rest is the legend's room
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    _plain(axes)


def draw_layers(shown: Sequence[CaseFidelity], file_format: str = "png") -> bytes:
    """Recall of several cases side by side, one place each; those without a choice have none."""
    shown = [one for one in shown if one.counted_rows]
    file = io.BytesIO()
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "svg.hashsalt": "nvfp4-indexer"}):
        figure = Figure(figsize=(12.5, 3.6), dpi=130, layout="constrained")
        axes = figure.subplots()
        names = [_name(one) for one in shown]
        for index, name in enumerate(("fp8", "nvfp4")):
            found = [next(f for f in one.formats if f.name == name) for one in shown]
            at = np.arange(len(shown)) + (index - 0.5) * 0.4
            axes.bar(at, [f.mean for f in found], width=0.36, color=COLOURS[name], label=f"{name}, mean")
            axes.plot(at, [f.worst for f in found], **WORST, label=None if index else "worst row")
        axes.set_xticks(range(len(shown)), names, rotation=_rotation(names))
        least = min(found.worst for one in shown for found in one.formats)
        axes.set_ylim(max(0.0, least - 0.08), 1.0)
        axes.set_ylabel("recall against bf16 keys (share of blocks)")
        axes.set_title("Recall by case", **TITLE)
        # Above the plot: bars may fill all of it.
        axes.legend(
            frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2
        )
        _plain(axes)
        figure.savefig(file, format=file_format, metadata={"Date": None} if file_format == "svg" else {})
    return file.getvalue()


def _name(shown: CaseFidelity) -> str:
    if shown.layer is not None:
        return f"layer {shown.layer}"
    name = shown.case.rpartition("/")[2].removesuffix(".safetensors")
    return name if len(name) <= NAME_CHARS else f"{name[:11]}…{name[-12:]}"  # names differ at their ends, too


def _rotation(names: Sequence[str]) -> int:
    """Degrees that names are turned by so that none runs into the next."""
    if sum(map(len, names)) <= ROW_CHARS:
        return 0
    return 20 if len(names) <= 12 else 90


def _plain(axes: Any) -> None:
    axes.grid(axis="y", color="#cfd8dc", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
