"""What do planned buckets pad, beside the lists that people use, on real size traces?

python -m benchmarks.padding_overhead [--traces FOLDER] [--rows N] [--out FILE] [--plot FILE.png]
For each trace: buckets planned on its first 1,000 rows (a tenth of a short one), up to the declared
largest sizes, scored on the rest; and planned and scored on the whole. By padding alone: a bucket
costs its elements. Then the times of the two planners at their largest. Without traces, made-up
ones.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.plots import draw_padding
from benchmarks.record import ROOT, parser, spread, write
from graphcache import plan_buckets
from graphcache.planning import corners
from graphcache.planning.demand import Demand
from graphcache.planning.line import best_sets
from graphcache.planning.profile import read_sizes
from graphcache.planreport import counted, later

COUNTS = (8, 16, 32)
TIMES = 3


class Trace(NamedTuple):
    """Sizes in order, and what a user would declare about them."""

    name: str
    dims: tuple[str, ...]
    rows: list[tuple[int, ...]]
    align: Mapping[str, int]
    limits: Mapping[str, int] | None


#: By file: dims, alignment and the largest sizes that the source allows.
KNOWN: dict[str, tuple[tuple[str, ...], dict[str, int], dict[str, int] | None]] = {
    "azure_llm_conv": (("context",), {"context": 8}, {"context": 16_384}),
    "azure_llm_code": (("context",), {"context": 8}, {"context": 8_192}),
    "mooncake_conversation": (("input",), {"input": 64}, {"input": 131_072}),
    "librispeech_frames": (("frames",), {"frames": 8}, {"frames": 3_000}),
    "banking77_tokens": (("tokens",), {}, {"tokens": 128}),
    "azure_conv_decode30ms": (("batch",), {}, {"batch": 64}),
    "azure_conv_window1s": (("batch", "seq"), {"seq": 256}, {"batch": 32, "seq": 16_384}),
    "azure_code_window1s": (("batch", "seq"), {"seq": 256}, {"batch": 32, "seq": 8_192}),
    "embedding_service": (("batch", "seq"), {"seq": 8}, {"batch": 32, "seq": 128}),
    "taco_images": (("height", "width"), {"height": 128, "width": 128}, None),
}


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--traces", default=str(ROOT.parent / "shared" / "traces"))
    options.add_argument("--rows", type=int, help="read at most so many rows of each")
    options.add_argument("--plot", help="draw padding against graphs here")
    options = options.parse_args(argv)
    folder = Path(options.traces)
    found = list(recorded(folder, options.rows) if folder.is_dir() else made_up(options.rows))
    options.made_up, plot = not folder.is_dir(), options.plot
    del options.traces, options.plot  # paths are nobody's business
    results: dict[str, Any] = {trace.name: compared(trace) for trace in found}
    print(table(results))
    if plot:
        draw_padding(results, plot)
    write("padding_overhead", options, {"traces": results, "seconds": timed()})


def recorded(folder: Path, rows: int | None) -> Iterator[Trace]:
    """The traces of a folder, by name; of unknown ones every column but the time is a dim."""
    for path in sorted(folder.rglob("*.csv"), key=lambda path: path.stem):
        with open(path, newline="") as file:
            columns = next(csv.reader(file))
        every = tuple(name for name in columns if name != "timestamp_s")
        dims, align, limits = KNOWN.get(path.stem, (every, {}, None))
        yield Trace(path.stem, dims, list(read_sizes(path, dims))[:rows], align, limits)


def made_up(rows: int | None) -> Iterator[Trace]:
    """Two traces from a generator with a fixed seed: skewed lengths, and batches with lengths."""
    rng, count = np.random.default_rng(0), rows or 4_000
    lengths = np.clip(rng.lognormal(4, 0.8, count), 1, 2_000).astype(int)
    batches = np.clip(rng.poisson(6, count), 1, 32)
    longest = np.minimum(8 + lengths // 4 + 2 * batches, 256)
    yield Trace("made_up_lengths", ("seq",), [(int(n),) for n in lengths], {"seq": 8}, None)
    pairs = [(int(b), int(s)) for b, s in zip(batches, longest, strict=True)]
    yield Trace("made_up_batches", ("batch", "seq"), pairs, {"seq": 8}, {"batch": 32, "seq": 256})


def compared(trace: Trace) -> dict[str, Any]:
    """The scores of plans and of common lists, on later rows and on the whole trace."""
    known = min(1_000, len(trace.rows) // 2) if len(trace.rows) >= 5_000 else len(trace.rows) // 10
    first, rest = (counted(part, trace.dims) for part in (trace.rows[:known], trace.rows[known:]))
    whole = counted(trace.rows, trace.dims)
    found: dict[str, Any] = {"rows": len(trace.rows), "planned_on": known, "held_out": {}}
    found["hindsight"] = {}
    for most in COUNTS:
        options = {"max_graphs": most, "align": trace.align}
        seconds, early = repeated(plan_buckets, first, limits=trace.limits, **options)
        held_out = later(early, rest)
        found["held_out"] |= scored(held_out, f"planned {most}", most == COUNTS[0])
        found["held_out"][f"planned {most}"]["planning_s"] = seconds
        seconds, best = repeated(plan_buckets, whole, prior=None, **options)
        found["hindsight"] |= scored(best.compare(), f"planned {most}", most == COUNTS[0])
        found["hindsight"][f"planned {most}"] |= {"planning_s": seconds, "gap": best.gap}
    return found


def repeated(plan: Callable[..., Any], *args: Any, **options: Any) -> tuple[dict[str, Any], Any]:
    """The spread of the seconds of several runs, and the result."""
    samples, made = [], None
    for _ in range(TIMES):
        start = time.perf_counter()
        made = plan(*args, **options)
        samples.append(time.perf_counter() - start)
    return spread(samples), made


def scored(comparison: Any, name: str, rivals: bool) -> dict[str, Any]:
    """The plan's score under this name, and once the rivals'."""
    return {
        name if score.name == "planned" else score.name: {
            "graphs": score.graphs,
            "padding_overhead": round(score.padding_overhead, 5),
            "expected_cost": round(score.expected_cost, 3),
            "eager": round(score.eager, 5),
        }
        for score in comparison
        if rivals or score.name == "planned"
    }


def timed() -> dict[str, Any]:
    """Seconds of the largest problems that the planners are made for."""
    rng = np.random.default_rng(0)
    sizes = np.arange(1, 4_097)[:, None]
    weights = rng.random(4_096)
    line = Demand(
        sizes, weights / weights.sum(), 400.0 + 1.2 * sizes[:, 0], sizes,
        np.maximum(300.0, sizes[:, 0] * 1.0), np.full(4_096, 0.5), np.zeros(4_096, dtype=bool),
    )  # fmt: skip
    found = {"one dim, 4,096 sizes, 32 graphs": repeated(best_sets, line, 32)[0]}
    points = np.unique(
        np.stack([rng.poisson(40, 680) + 1, rng.lognormal(4, 0.7, 680).astype(int) + 1], 1),
        axis=0,
    )[:600]
    candidates = corners.tight_corners(points)[-1_300:]
    cost = np.prod(candidates, axis=1, dtype=np.float64)
    even, none = np.full(len(points), 1 / len(points)), np.zeros(len(candidates))
    plane = Demand(
        points, even, np.full(len(points), 100 * cost.max()), candidates, cost, none, none > 0
    )

    def searched() -> Any:
        start = corners.greedy(plane, 16)[-1]
        return corners.search(plane, 16, [start], 0, perturbations=5)

    size = f"two dims, {len(points)} points, {len(candidates)} corners, 16 graphs"
    found[size], best = repeated(searched)
    bound = repeated(corners.lower_bound, plane, 16, plane.total(best))[0]
    return found | {f"{size}, bound": bound}


def table(results: Mapping[str, Any]) -> str:
    """Padding overheads, later rows / whole trace, with the number of graphs."""
    lines = []
    for trace, found in results.items():
        lines.append(f"{trace}: {found['rows']:,} rows, planned on {found['planned_on']:,}")
        for name, late in found["held_out"].items():
            best = found["hindsight"].get(name)
            seconds = late.get("planning_s", {}).get("median")
            took = f"  planned in {seconds:.3f} s" if seconds is not None else ""
            whole = f"{best['padding_overhead']:8.1%}" if best else "       -"
            lines.append(
                f"  {name:<16}{late['graphs']:>6} graphs {late['padding_overhead']:8.1%} held out, "
                f"{late['eager']:6.1%} eager {whole} in hindsight{took}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
