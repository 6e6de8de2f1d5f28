"""Pictures of results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARKERS = "os^vD<>ph*"


def draw_padding(results: Mapping[str, Any], path: str | Path) -> None:
    """Padding overhead on later rows against the number of graphs, a panel for each trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.6 * columns, 3.0 * rows), squeeze=False, layout="constrained"
    )
    marks: dict[str, str] = {}
    for axis, (trace, found) in zip(axes.flat, results.items(), strict=False):
        ours = [found["held_out"][name] for name in found["held_out"] if name.startswith("planned")]
        axis.plot(*_points(ours), "-o", color="tab:red", label="planned")
        for name, score in found["held_out"].items():
            if not name.startswith("planned"):
                short = name.split(" (")[0]
                mark = marks.setdefault(short, MARKERS[len(marks) % len(MARKERS)])
                axis.plot(*_points([score]), mark, color="0.3", label=short)
        axis.set(title=trace, xlabel="graphs", ylabel="padding, later rows", xscale="log")
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axis in list(axes.flat)[len(results) :]:
        axis.set_visible(False)
    shown: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _points(scores: list[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    return [s["graphs"] for s in scores], [s["padding_overhead"] for s in scores]
