"""What are planned buckets worth on a stream of encoder batches, and what do they cost to find?

python -m benchmarks.planned ENCODER --trace FILE.csv [--yardsticks FOLDER] [--out FILE] Costs are
measured on the device. First: buckets planned on rows 0 to 1,000 serve rows 1,000 to 1,300, beside
the yardstick's 30 powers of two and its graph per exact shape, in turn. Then, cold and over the
whole trace: `buckets="auto"` beside serving 1,000 rows eagerly, planning by hand, capturing, and
serving the rest; and `buckets="auto"` over the trace and other traffic after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.record import parser, write, yardstick
from graphcache import CostModel, GraphCache, Plan, TrafficProfile, plan_buckets
from graphcache.compare import close
from graphcache.planning.profile import read_sizes

NAMES = ("batch", "seq")
DIMS = {name: dict(enumerate(NAMES)) for name in ("ids", "mask")}
LIMITS = {"batch": 32, "seq": 128}
MEASURED = {"batch": [1, 4, 8, 12, 16, 24, 32], "seq": [8, 24, 40, 56, 72, 96, 128]}
PLANNED, SERVED = 1000, 300
COUNTS = ("calls", "captures", "replays", "eager", "replans", "graphs", "padding_overhead")


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("encoder", choices=("minilm", "bert"))
    options.add_argument("--trace", required=True)
    options = options.parse_args()
    streams = yardstick(options.yardsticks, "streams")
    module = streams.encoder(options.encoder)
    rows = list(read_sizes(options.trace, NAMES))
    data = streams.batches(options.trace, 0, len(rows))
    with torch.no_grad():
        for inputs in data[:20]:
            module(*inputs)
    start = time.perf_counter()
    costs = measured(module, data[0])
    measuring = time.perf_counter() - start
    write(
        f"planned_{options.encoder}",
        options,
        {
            "costs": costs.to_json(),
            "measuring_s": round(measuring, 2),
            "planned": planned(streams, module, rows, data, costs),
            "auto": online(module, rows, data, costs),
        },
    )


def measured(module: Callable[..., Any], sample: Any) -> CostModel:
    cache = GraphCache(module, buckets=MEASURED, dynamic_shapes=DIMS)
    return CostModel.measure(cache, MEASURED, sample=sample, progress=False)


def planned(
    streams: Any, module: Callable[..., Any], rows: list[Any], data: list[Any], costs: CostModel
) -> dict[str, Any]:
    """Microseconds a call on the served rows, and what was predicted."""
    later = slice(PLANNED, PLANNED + SERVED)
    plans = {f"planned_{most}": planned_by_hand(rows, costs, most) for most in (16, 8)}
    caches = {way: warmed(module, plan, data[0]) for way, plan in plans.items()}
    ways = {
        "eager": module,
        "hand_pow2": streams.hand_pow2(module),
        "hand_exact": streams.hand_exact(module),
        **caches,
    }
    rounds: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(3):  # in turn, so that a drift of the clock falls on all
        for way, call in ways.items():
            rounds[way].append(streams.measure(call, data[later]))
    found = {
        way: {**sorted(runs, key=lambda run: run["us"])[1], "all_us": [run["us"] for run in runs]}
        for way, runs in rounds.items()
    }
    for way, plan in plans.items():
        predicted = plan.compare(traffic=profile(rows[later]))[0].expected_cost
        with torch.no_grad():
            pairs = [(caches[way](*inputs), module(*inputs)) for inputs in data[later]]
        found[way] |= {
            "buckets": plan.buckets,
            "predicted_us": round(predicted, 1),
            "predicted_over_measured": round(predicted / found[way]["us"], 4),
            "over_hand_exact": round(found[way]["us"] / found["hand_exact"]["us"], 4),
            "over_hand_pow2": round(found[way]["us"] / found["hand_pow2"]["us"], 4),
            "equal_to_eager": all(close(a, b) for a, b in pairs),
            "stats": counted(caches[way]),
        }
    return found


def online(
    module: Callable[..., Any], rows: list[Any], data: list[Any], costs: CostModel
) -> dict[str, Any]:
    """Seconds in all over the whole trace, and what other traffic after it costs in captures."""
    first = seconds(module, data[:PLANNED])
    start = time.perf_counter()
    plan = planned_by_hand(rows, costs, 16)
    planning = time.perf_counter() - start
    start = time.perf_counter()
    cache = warmed(module, plan, data[0])
    capturing = time.perf_counter() - start
    rest = seconds(cache, data[PLANNED:])
    auto = GraphCache(module, "auto", dynamic_shapes=DIMS)
    alone = seconds(auto, data)
    counts = counted(auto)
    spliced = GraphCache(module, "auto", dynamic_shapes=DIMS)
    other = [
        (
            torch.cat([ids, ids], 1)[: max(1, len(ids) // 3)],
            torch.cat([mask, mask], 1)[: max(1, len(ids) // 3)],
        )
        for ids, mask in data
    ]
    both = seconds(spliced, [*data, *other])
    with torch.no_grad():
        equal = all(close(spliced(*inputs), module(*inputs)) for inputs in other[:200])
    by_hand = planning + capturing + rest
    return {
        "by_hand_s": {
            "first_rows_eagerly": round(first, 3),
            "planning": round(planning, 3),
            "capturing": round(capturing, 3),
            "serving_the_rest": round(rest, 3),
        },
        "auto_s": round(alone, 3),
        "auto_over_by_hand": round(alone / (first + by_hand), 4),
        "auto_over_by_hand_without_first_rows": round(alone / by_hand, 4),
        "auto": counts,
        "buckets": str(auto),
        "spliced_s": round(both, 3),
        "spliced": counted(spliced),
        "equal_to_eager": equal,
    }


def planned_by_hand(rows: list[Any], costs: CostModel, most: int) -> Plan:
    seen = profile(rows[:PLANNED])
    return plan_buckets(seen, costs, max_graphs=most, align={"seq": 8}, limits=LIMITS)


def warmed(module: Callable[..., Any], plan: Plan, sample: Any) -> GraphCache:
    cache = GraphCache(module, plan, dynamic_shapes=DIMS)
    cache.warmup(sample=sample, progress=False)
    return cache


def profile(rows: Iterable[Any]) -> TrafficProfile:
    seen = TrafficProfile(NAMES)
    for sizes in rows:
        seen.record(sizes)
    return seen


def seconds(call: Callable[..., Any], data: list[Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        for inputs in data:
            call(*inputs)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def counted(cache: GraphCache) -> dict[str, Any]:
    stats = cache.stats()
    return {name: getattr(stats, name) for name in COUNTS} | {"fallbacks": stats.fallbacks}


if __name__ == "__main__":
    main()
