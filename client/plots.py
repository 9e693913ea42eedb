"""Draws fidelity, profiles and score maps with matplotlib, as PNG or SVG; no file here changes how."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from indexer.case import Case
from indexer.fidelity import CaseFidelity
from indexer.profile import PlanBalance
from indexer.wire import Profile
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS

MAX_QUERIES = 128
"""Most query tokens that a score map shows apart."""
MAX_BLOCKS = 256
"""Most blocks that a score map shows apart."""
FORMAT_COLOURS = {"fp8": "#8da2c0", "nvfp4": "#31446b"}
CACHE_COLOURS = {"cold": "#31446b", "warm": "#e4572e"}
FORCED_COLOUR = "#e4572e"
FUTURE_COLOUR = "#eceff1"
EDGE_COLOUR = "#1a1a1a"
TITLE: dict[str, Any] = {"fontsize": 11, "fontweight": "bold", "loc": "left"}
HEADLINE: dict[str, Any] = {"fontsize": 13, "fontweight": "bold"}
NAME_CHARS = 24
"""Most characters of a case's name below a bar."""
ROW_CHARS = 100
"""Most characters of names side by side below a picture."""
WORST: dict[str, Any] = {
    "linestyle": "none",
    "marker": "v",
    "markersize": 7,
    "color": "#1a1a1a",
    "markeredgecolor": "white",  # it lies on bars of any colour
    "markeredgewidth": 0.9,
}


def draw_fidelity(shown: CaseFidelity, file_format: str = "png") -> bytes:
    """Draws a case's fidelity: recall by head, recall by row, gap at the last place beside the scores' error.

    Args:
        shown: a case with at least one counted row.
        file_format: ``png`` or ``svg``.
    """
    with _figure((12.5, 3.9), file_format) as (figure, file):
        by_head, by_row, by_gap = figure.subplots(1, 3)
        _recall_by_head(by_head, shown)
        _recall_by_row(by_row, shown)
        _gaps(by_gap, shown)
    return file.getvalue()


@contextlib.contextmanager
def _figure(size: tuple[float, float], file_format: str = "png") -> Iterator[tuple[Figure, io.BytesIO]]:
    """Yields a figure of ``size`` inches, and the file to which it is written at the end of the body."""
    file = io.BytesIO()
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "svg.hashsalt": "nvfp4-indexer"}):
        layout = ConstrainedLayoutEngine()
        figure = Figure(figsize=size, dpi=130, layout=layout)
        yield figure, file
        layout.execute(figure)
        figure.set_layout_engine(None)  # savefig would draw twice, the first time for the layout alone
        figure.savefig(file, format=file_format, metadata={"Date": None} if file_format == "svg" else {})


def _recall_by_head(axes: Any, shown: CaseFidelity) -> None:
    width = 0.8 / len(shown.formats)
    for index, found in enumerate(shown.formats):
        heads = np.array([head.head for head in found.heads])
        at = heads + (index - (len(shown.formats) - 1) / 2) * width
        means = [head.mean for head in found.heads]
        axes.bar(at, means, width=0.92 * width, color=FORMAT_COLOURS[found.name], label=found.name)
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
        axes.step(
            recall, share, where="post", color=FORMAT_COLOURS[found.name], label=found.name, linewidth=1.8
        )
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
        (f"error of {found.name} scores", found.errors, FORMAT_COLOURS[found.name])
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
    """Draws the recall of several cases side by side; cases without a choice are left out."""
    shown = [one for one in shown if one.counted_rows]
    with _figure((12.5, 3.6), file_format) as (figure, file):
        axes = figure.subplots()
        names = [_name(one) for one in shown]
        for index, name in enumerate(("fp8", "nvfp4")):
            found = [next(f for f in one.formats if f.name == name) for one in shown]
            at = np.arange(len(shown)) + (index - 0.5) * 0.4
            axes.bar(
                at, [f.mean for f in found], width=0.36, color=FORMAT_COLOURS[name], label=f"{name}, mean"
            )
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


# ---- Profile: the roofline, and how evenly the gfx950 plan loads its workgroups ----


def draw_profile(shown: Sequence[Profile], balance: PlanBalance | None, file_format: str = "png") -> bytes:
    """Draws profiles of one case, cold and warm, on the device's roofline, and the plan's balance.

    Args:
        shown: one or two profiles.
        balance: of the gfx950 plan; None leaves it out.
        file_format: ``png`` or ``svg``.
    """
    with _figure((12.5 if balance else 7.5, 4.1), file_format) as (figure, file):
        axes = figure.subplots(1, 2 if balance else 1, squeeze=False)[0]
        _roofline(axes[0], shown)
        if balance is not None:
            _balance(axes[1], balance)
    return file.getvalue()


def _roofline(axes: Any, shown: Sequence[Profile]) -> None:
    floor = shown[0].floor
    ridge = floor.tflops / floor.tbps
    points = [(one.flop / one.bytes, one.tflops) for one in shown if one.bytes and one.tflops]
    at = [x for x, _ in points] or [ridge]
    low, high = min(*at, ridge) / 8, max(*at, ridge) * 8
    x = np.geomspace(low, high, 200)
    roof = np.minimum(floor.tbps * x, floor.tflops)
    axes.plot(x, roof, color="#1a1a1a", linewidth=1.8)
    axes.fill_between(x, roof, roof * 1e6, color="#eceff1", linewidth=0)
    for one, (intensity, speed) in zip(shown, points):
        reachable = min(floor.tbps * intensity, floor.tflops)
        axes.plot([intensity] * 2, [speed, reachable], ":", color=CACHE_COLOURS[one.cache], linewidth=1.2)
        label = f"{one.cache}: {speed:.3g} TFLOP/s, {100 * speed / reachable:.0f} % of the roof"
        axes.plot(intensity, speed, "o", color=CACHE_COLOURS[one.cache], markersize=8, label=label)
    axes.annotate(
        f"copy: {floor.tbps:.3g} TB/s",
        (ridge / 3, floor.tbps * ridge / 3),
        xytext=(8, -8),
        textcoords="offset points",
        ha="left",
        fontsize=8.5,
    )
    axes.annotate(
        f"matrix product: {floor.tflops:.3g} TFLOP/s",
        (high, floor.tflops),
        xytext=(-4, 5),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    least = min([speed for _, speed in points] or [floor.tflops])
    axes.set_ylim(min(least, floor.tbps * low) / 2, floor.tflops * 5)
    axes.set_xlim(low, high)
    axes.set_xlabel("work over bytes moved (FLOP/byte)")
    axes.set_ylabel("scoring and selecting (TFLOP/s)")
    axes.set_title(f"Roofline: {shown[0].backend} on {shown[0].device}, roofs measured there", **TITLE)
    if points:
        axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    axes.grid(which="major", color="#cfd8dc", linewidth=0.6)
    axes.set_axisbelow(True)


def _balance(axes: Any, balance: PlanBalance) -> None:
    loads = np.array(balance.slot_blocks)
    axes.fill_between(np.arange(loads.size), loads, step="mid", color="#31446b", linewidth=0)
    axes.axhline(loads.mean(), color="#e4572e", linewidth=1.4, label=f"mean: {loads.mean():.1f} blocks")
    axes.set_xlim(0, loads.size - 1)
    axes.set_ylim(0, loads.max() * 1.25)
    axes.set_xlabel(f"workgroup slot, longest first ({balance.slots} on {balance.compute_units} CUs)")
    axes.set_ylabel("predicted time (blocks of 128 keys)")
    axes.set_title(
        f"gfx950 plan: {balance.items:,} workgroups, slots {100 * balance.busy_share:.0f} % busy", **TITLE
    )
    axes.legend(frameon=False, fontsize=8.5, loc="upper right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# ---- Score map: one head's scores with the selection drawn in ----


@dataclass(frozen=True)
class ScoreMap:
    """The cells ``[queries, blocks]`` of a picture: one request and head, a row for each query token.

    Attributes:
        request: the request.
        head: the head.
        positions: ``[queries]``, of the drawn query tokens.
        queries: query tokens of the request, drawn or not.
        first_block: the first drawn block.
        scores: ``[queries, blocks]``.
        selected: ``[queries, blocks]``.
        picked: ``[blocks]``, how many of the request's query tokens, drawn or not, select a block.
        picked_forced: ``[blocks]``, how many of them select it because it is forced.
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
        """Cells past the row's causal blocks."""
        return np.isneginf(self.scores)


def score_map(
    case: Case, scores: NDArray[np.float32], block_ids: NDArray[np.int32], head: int = 0
) -> ScoreMap:
    """Returns the part of a case that a picture shows: evenly spaced queries of the request with most cells.

    Of more than :data:`MAX_BLOCKS` blocks the last ones are shown.
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
    """Draws a score map as PNG.

    Args:
        shown: the cells to draw.
        name: for the title, shortened in the middle if it is too long.
    """
    with _figure((12.5, 8.2)) as (figure, file):
        share_axes, map_axes = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": (1, 5.2), "hspace": 0.02}
        )
        what = f", head {shown.head}: block scores, each row's best {shown.topk} blocks"
        figure.suptitle(_title(figure, name, what), **HEADLINE, x=0.01, ha="left", parse_math=False)
        _draw_map(figure, map_axes, shown)
        _draw_share(share_axes, shown)
    return file.getvalue()


def _title(figure: Figure, name: str, what: str) -> str:
    """Returns a title of one line that the font has glyphs for and that fits the figure."""
    font = font_manager.FontProperties(size=HEADLINE["fontsize"], weight=HEADLINE["fontweight"])
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
    axes.tick_params(axis="x", labelbottom=False)
    _plain(axes)


def _edges(selected: NDArray[np.bool_], first_block: int) -> list[list[tuple[float, float]]]:
    """Line segments between selected cells and others, in the map's coordinates."""
    padded = np.pad(selected, 1)
    upright = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1])
    level = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1])
    left = first_block - 0.5
    segments = [[(left + x, y - 0.5), (left + x, y + 0.5)] for y, x in upright.tolist()]
    segments += [[(left + x, y - 0.5), (left + x + 1, y - 0.5)] for y, x in level.tolist()]
    return segments
