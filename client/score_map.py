"""A picture of one head's score map with the selection drawn in."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from indexer.case import Case
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS

MAX_QUERIES = 128
"""Query tokens that one picture can show apart."""
MAX_BLOCKS = 256
"""Blocks that one picture can show apart."""
FORCED_COLOUR = "#e4572e"
FUTURE_COLOUR = "#eceff1"
EDGE_COLOUR = "#1a1a1a"
TITLE: dict[str, Any] = {"fontsize": 13, "fontweight": "bold"}


@dataclass(frozen=True)
class ScoreMap:
    """What is drawn: cells ``[queries, blocks]`` of one request and head, one row a query token.

    Attributes:
        request: the request.
        head: the head.
        positions: ``[queries]``, of the query tokens that are drawn.
        queries: query tokens of the request, drawn or not.
        first_block: the first block that is drawn.
        scores: ``[queries, blocks]``.
        selected: ``[queries, blocks]``.
        picked: ``[blocks]``, how many of the request's query tokens pick a block, drawn or not.
        picked_forced: ``[blocks]``, how many of them pick it because they must.
        topk: blocks a row selects.
    """

    request: int
    head: int
    positions: NDArray[np.int64]
    queries: int
    first_block: int
    scores: NDArray[np.float32]
    selected: NDArray[np.bool_]
    picked: NDArray[np.int64]
    picked_forced: NDArray[np.int64]
    topk: int

    @property
    def forced(self) -> NDArray[np.bool_]:
        """Cells with a sentinel."""
        return self.scores >= LOCAL_SCORE

    @property
    def future(self) -> NDArray[np.bool_]:
        """Cells that no query token may see."""
        return np.isneginf(self.scores)


def score_map(
    case: Case, scores: NDArray[np.float32], block_ids: NDArray[np.int32], head: int = 0
) -> ScoreMap:
    """The part of a case that a picture shows: the request with most cells, evenly spaced query tokens.

    Of a context beyond :data:`MAX_BLOCKS` blocks the last ones are shown.
    """
    lengths = case.query_lens
    request = int(np.argmax(lengths * case.seq_lens))
    first, count = int(case.cu_seqlens_q[request]), int(lengths[request])
    rows = np.unique(np.linspace(0, count - 1, min(count, MAX_QUERIES)).round().astype(np.int64))
    positions = int(case.seq_lens[request]) - count + rows
    blocks = int(positions[-1]) // BLOCK_TOKENS + 1
    shown = np.arange(max(0, blocks - MAX_BLOCKS), blocks)
    all_ids = block_ids[head, first : first + count]
    ids = all_ids[rows]
    forced = np.take_along_axis(scores[head, first : first + count], all_ids.clip(0), axis=1) >= LOCAL_SCORE
    return ScoreMap(
        request=request,
        head=head,
        positions=positions,
        queries=count,
        first_block=int(shown[0]),
        scores=scores[head, first + rows][:, shown],
        selected=(ids[:, :, None] == shown).any(axis=1),
        picked=_count(all_ids, shown),
        picked_forced=_count(all_ids[forced], shown),
        topk=case.topk,
    )


def _count(ids: NDArray[np.int32], shown: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each shown block is among ids."""
    found = ids[ids >= shown[0]] - shown[0]
    return np.bincount(found, minlength=shown.size).astype(np.int64)


def draw_score_map(shown: ScoreMap, name: str) -> bytes:
    """Draw a score map.

    Args:
        shown: what is drawn.
        name: what the title calls it; shortened in the middle if it is long.

    Returns:
        A PNG file.
    """
    file = io.BytesIO()
    with matplotlib.rc_context(matplotlib.rcParamsDefault):  # whatever a matplotlibrc here says
        figure = Figure(figsize=(12.5, 8.2), dpi=130, layout="constrained")
        share_axes, map_axes = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": (1, 5.2), "hspace": 0.02}
        )
        what = f", head {shown.head}: block scores, each row's best {shown.topk} blocks"
        figure.suptitle(_title(figure, name, what), **TITLE, x=0.01, ha="left", parse_math=False)
        _draw_map(figure, map_axes, shown)
        _draw_share(share_axes, shown)
        figure.savefig(file, format="png")
    return file.getvalue()


def _title(figure: Figure, name: str, what: str) -> str:
    """A name and what is shown of it, as one line that the font can write and the figure holds."""
    font = font_manager.FontProperties(size=TITLE["fontsize"], weight=TITLE["fontweight"])
    glyphs = font_manager.get_font(font_manager.findfont(font)).get_charmap()
    name = "".join(char if ord(char) in glyphs else "?" for char in name)
    canvas: Any = FigureCanvasAgg(figure)
    renderer = canvas.get_renderer()
    kept, title = len(name), name + what
    while kept and renderer.get_text_width_height_descent(title, font, False)[0] > 0.98 * figure.bbox.width:
        kept -= 1
        title = name[: (kept + 1) // 2] + "..." + name[len(name) - kept // 2 :] + what
    return title


def _draw_map(figure: Figure, axes: Any, shown: ScoreMap) -> None:
    queries, blocks = shown.scores.shape
    extent = (shown.first_block - 0.5, shown.first_block + blocks - 0.5, queries - 0.5, -0.5)
    ordinary = np.where(shown.forced | shown.future, np.nan, shown.scores)
    # Attention sinks score far above all other blocks: the scale leaves them off its end.
    any_ordinary = np.isfinite(ordinary).any()
    low, high = np.nanpercentile(ordinary, (1, 97)) if any_ordinary else (0.0, 1.0)
    mesh = axes.imshow(
        ordinary,
        cmap="viridis",
        norm=Normalize(low, max(high, low + 1e-6)),
        extent=extent,
        aspect="auto",
        interpolation="nearest",
    )
    layers = (
        (shown.forced, FORCED_COLOUR, 1),
        (~shown.selected, "#ffffff", 0.62),
        (shown.future, FUTURE_COLOUR, 1),
    )
    for cells, colour, alpha in layers:
        axes.imshow(
            np.where(cells, 1.0, np.nan),
            cmap=ListedColormap([colour]),
            alpha=alpha,
            extent=extent,
            aspect="auto",
            interpolation="nearest",
        )
    edges = _edges(shown.selected, shown.first_block)
    axes.add_collection(LineCollection(edges, colors=EDGE_COLOUR, linewidths=0.7, capstyle="projecting"))
    axes.set_xlim(extent[0], extent[1])
    axes.set_ylim(extent[2], extent[3])
    ticks = np.unique(np.linspace(0, queries - 1, min(queries, 9)).round().astype(int))
    axes.set_yticks(ticks, [f"{shown.positions[tick]:,}" for tick in ticks])
    sampled = "" if queries == shown.queries else f"; {queries} of {shown.queries:,} queries, evenly spaced"
    axes.set_ylabel(f"query position (tokens from the start{sampled})")
    left_out = f"; {shown.first_block:,} earlier blocks left out" if shown.first_block else ""
    axes.set_xlabel(f"block id ({BLOCK_TOKENS} keys each{left_out})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if any_ordinary:
        bar = figure.colorbar(mesh, ax=axes, pad=0.012, fraction=0.035, extend="both")
        bar.set_label("score: largest q·k of the block's keys (no unit)")
    selected_colour = "#35b779" if any_ordinary else FORCED_COLOUR
    handles = [
        Patch(facecolor=selected_colour, edgecolor=EDGE_COLOUR, label="selected: full colour, outlined"),
        Patch(facecolor="#b9c3d2" if any_ordinary else "#f5bfb1", label="not selected: pale"),
    ]
    if shown.forced.any():
        handles.append(Patch(facecolor=FORCED_COLOUR, label="forced init or local block: comes first"))
    if shown.future.any():
        handles.append(Patch(facecolor=FUTURE_COLOUR, edgecolor="#90a4ae", label="not causal: invisible"))
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, -0.085),
        ncols=len(handles),
        frameon=False,
        fontsize=9.5,
        borderaxespad=0,
    )


def _draw_share(axes: Any, shown: ScoreMap) -> None:
    share = 100 * shown.picked / shown.queries
    forced = 100 * shown.picked_forced / shown.queries
    blocks = shown.first_block + np.arange(share.size)
    axes.bar(blocks, share, width=0.86, color="#31446b")
    axes.bar(blocks, forced, width=0.86, color=FORCED_COLOUR)
    axes.set_ylim(0, 105)
    axes.set_yticks((0, 50, 100))
    axes.set_ylabel(f"of all {shown.queries:,} rows\npick it (%)")
    axes.grid(axis="y", color="#cfd8dc", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelbottom=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _edges(selected: NDArray[np.bool_], first_block: int) -> list[list[tuple[float, float]]]:
    """Line segments between selected cells and others, in the map's coordinates."""
    padded = np.pad(selected, 1)
    upright = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1])
    level = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1])
    left = first_block - 0.5
    segments = [[(left + x, y - 0.5), (left + x, y + 0.5)] for y, x in upright.tolist()]
    segments += [[(left + x, y - 0.5), (left + x + 1, y - 0.5)] for y, x in level.tolist()]
    return segments
