"""Pictures of a profile: the roofline, and how evenly the gfx950 plan loads its workgroups."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from indexer.plan_balance import PlanBalance
from indexer.wire import Profile

TITLE: dict[str, Any] = {"fontsize": 11, "fontweight": "bold", "loc": "left"}
COLOURS = {"cold": "#31446b", "warm": "#e4572e"}


def draw_profile(shown: Sequence[Profile], balance: PlanBalance | None, file_format: str = "png") -> bytes:
    """Draw profiles of one case, cold and warm, on the device's roofline, and the plan's balance.

    Args:
        shown: one or two profiles.
        balance: of the gfx950 plan; None leaves it out.
        file_format: ``png`` or ``svg``.
    """
    file = io.BytesIO()
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "svg.hashsalt": "nvfp4-indexer"}):
        figure = Figure(figsize=(12.5 if balance else 7.5, 4.1), dpi=130, layout="constrained")
        axes = figure.subplots(1, 2 if balance else 1, squeeze=False)[0]
        _roofline(axes[0], shown)
        if balance is not None:
            _balance(axes[1], balance)
        figure.savefig(file, format=file_format, metadata={"Date": None} if file_format == "svg" else {})
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
        axes.plot([intensity] * 2, [speed, reachable], ":", color=COLOURS[one.cache], linewidth=1.2)
        label = f"{one.cache}: {speed:.3g} TFLOP/s, {100 * speed / reachable:.0f} % of the roof"
        axes.plot(intensity, speed, "o", color=COLOURS[one.cache], markersize=8, label=label)
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
