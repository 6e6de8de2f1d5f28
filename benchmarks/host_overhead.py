"""What does one call cost the host, beside the plain hand-written loop?

python -m benchmarks.host_overhead [--yardsticks FOLDER] [--out FILE]
Tiny nets of the yardstick `hand_loop.py`: eager, its hand loop, and GraphCache with every default
check on.
"""

from __future__ import annotations

import functools

import torch

from benchmarks.record import host_us, parser, spread, write, yardstick
from graphcache import GraphCache


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    loops = yardstick(options.yardsticks, "hand_loop")
    results = {}
    with torch.no_grad():
        for name, (module, loop, args, kwargs) in loops.cases().items():
            cache = GraphCache(module, buckets=loops.BUCKETS)
            cache.warmup(sample=args or kwargs, progress=False)
            expected, got = module(*args, **kwargs), cache(*args, **kwargs)
            torch.testing.assert_close(got, expected)
            ways = {"eager": module, "hand_loop": loop, "graphcache": cache}
            calls = {w: functools.partial(call, *args, **kwargs) for w, call in ways.items()}
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(15):  # in turn, so that a drift of the clock falls on all
                for way, call in calls.items():
                    times[way] += host_us(call, rounds=1)
            results[name] = {way: spread(samples) for way, samples in times.items()}
            ratio = results[name]["graphcache"]["median"] / results[name]["hand_loop"]["median"]
            results[name]["ratio"] = round(ratio, 3)
            results[name]["fallbacks"] = cache.stats().fallbacks
    write("host_overhead", options, results)


if __name__ == "__main__":
    main()
