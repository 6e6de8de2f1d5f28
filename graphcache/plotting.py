"""A picture of a plan: the sizes with the buckets over them, and what fewer or more graphs cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphcache.errors import GraphCacheError
from graphcache.planning.demand import Floats
from graphcache.planning.plan import Plan
from graphcache.planreport import unit, with_prior

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDE = 20  # times the smallest: from here on an axis is logarithmic
_SIZES, _BUCKETS, _OTHERS = "#4c78a8", "#d1495b", "#555555"
_MARKS = "osD^vPX"
_UNITS = {"us": "microseconds", "elements": "padded elements"}


def plot(plan: Plan, path: str | Path) -> None:
    """Draw a plan into a file: its buckets over the sizes, and its curve with the rivals.

    Args:
        plan: of which the first two dims are drawn.
        path: its ending gives the form, .png or another that matplotlib writes.

    Raises:
        GraphCacheError: no matplotlib, or a file that cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GraphCacheError(
            f"a plot needs matplotlib ({error}); pip install 'torch-graphcache[plot]'."
        ) from error
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    sizes, costs = figure.subplots(1, 2)
    (_line if len(plan.dims) == 1 else _boxes)(sizes, plan)
    _curve(costs, plan)
    figure.suptitle(
        f"{len(plan.corners)} buckets for {plan.traffic.total:,.0f} calls: "
        f"{plan.padding_overhead:.1%} padding"
    )
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise GraphCacheError(
            f"cannot draw into {path}: {error}; pass a path that can be written, ending in .png."
        ) from error


def _line(axes: Axes, plan: Plan) -> None:
    """A histogram of the sizes, and a line at each bucket."""
    sizes, counts = _seen(plan)
    edges = _edges(sizes[:, 0].min(), max(size for (size,) in plan.corners))
    axes.hist(sizes[:, 0], edges.tolist(), weights=counts, color=_SIZES, alpha=0.7, label="calls")
    for i, (size,) in enumerate(plan.bucket_set.corners):
        axes.axvline(size, color=_BUCKETS, linewidth=1, alpha=0.9, label=None if i else "buckets")
    axes.set(xlabel=f"{plan.dims[0]} (size)", ylabel="calls", title="Sizes and buckets")
    _scale(axes, "x", edges)
    axes.margins(x=0.01)
    axes.legend()


def _edges(low: float, high: float, bins: int = 60) -> Floats:
    """Of the bins: as wide as whole sizes at least, so that none is empty by rounding."""
    if high > _WIDE * low:
        edges = np.geomspace(low, high + 1, bins + 1)
        return np.unique(np.ceil(edges))
    step = max(1.0, np.ceil((high + 1 - low) / bins))
    return np.arange(low, high + 1 + step, step)


def _boxes(axes: Axes, plan: Plan) -> None:
    """The sizes as dots of an area that follows their count, and the buckets as corners."""
    from matplotlib.collections import LineCollection

    sizes, counts = _seen(plan)
    area = 4 + 120 * counts / counts.max()
    axes.scatter(
        sizes[:, 0], sizes[:, 1], s=area, color=_SIZES, alpha=0.45, linewidths=0, label="calls"
    )
    corners = np.unique(np.array(plan.corners)[:, :2], axis=0).astype(float)
    low = np.minimum(sizes[:, :2].min(axis=0), corners.min(axis=0)) * 0.9
    outlines = [[(low[0], y), (x, y), (x, low[1])] for x, y in corners]
    axes.add_collection(LineCollection(outlines, colors=_BUCKETS, linewidths=0.8, alpha=0.45))
    axes.scatter(
        corners[:, 0], corners[:, 1], marker="s", s=22, color=_BUCKETS, label="buckets", zorder=3
    )
    first, second = plan.dims[:2]
    axes.set(xlabel=f"{first} (size)", ylabel=f"{second} (size)", title="Sizes and buckets")
    for axis, name in enumerate("xy"):
        _scale(axes, name, np.append(corners[:, axis], sizes[:, axis]))
    axes.set(xlim=(low[0], None), ylim=(low[1], 1.2 * corners[:, 1].max()))  # room for the legend
    axes.legend(loc="upper left", ncols=2)


def _curve(axes: Axes, plan: Plan) -> None:
    """What the best buckets cost by their number, and where the rivals are."""
    counts = np.arange(1, len(plan.curve) + 1)
    axes.plot(counts, plan.curve, color=_BUCKETS, marker=".", label="planned, by graphs")
    planned, *rivals = with_prior(plan)
    axes.plot(
        planned.graphs, planned.expected_cost, "*", color=_BUCKETS, markersize=16,
        label=f"this plan: {planned.graphs}", zorder=4,
    )  # fmt: skip
    for one, mark in zip(rivals, _MARKS, strict=False):
        axes.plot(one.graphs, one.expected_cost, mark, color=_OTHERS, label=one.name)
    axes.set(
        xlabel="graphs (buckets)",
        ylabel=f"mean cost of a call, the prior included ({_UNITS[unit(plan)]})",
        title="Cost by the number of graphs",
    )
    _scale(axes, "x", np.array([1, _WIDE + 1]))
    if max(plan.curve) > _WIDE * min(plan.curve):
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend()


def _seen(plan: Plan) -> tuple[Floats, Floats]:
    counts = plan.traffic.counts
    return np.array(list(counts), dtype=np.float64), np.array(list(counts.values()), dtype=float)


def _scale(axes: Axes, name: str, values: Floats) -> None:
    """Logarithmic where the range is wide, with plain numbers at the ticks."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if values.max() > _WIDE * values.min():
        axis = axes.xaxis if name == "x" else axes.yaxis
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        axis.set_major_locator(
            LogLocator(subs=(1,) if values.max() > 1000 * values.min() else (1, 2, 5))
        )
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_formatter(NullFormatter())
