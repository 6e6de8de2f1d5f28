"""What does a call cost on a stream of encoder batches of real sizes, beside hand-made
powers-of-two graphs?

python -m benchmarks.streams ENCODER --trace FILE.csv [--skip N] [--rows N] [--yardsticks FOLDER]
[--out FILE] Ways of the yardstick `streams.py`, and GraphCache with the same 30 buckets and every
default check on, in one process.
"""

from __future__ import annotations

import time

import torch

from benchmarks.record import parser, write, yardstick
from graphcache import GraphCache
from graphcache.compare import close

BATCH, SEQ = (1, 2, 4, 8, 16, 32), (8, 16, 32, 64, 128)
DIMS = {"ids": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("encoder", choices=("minilm", "bert"))
    options.add_argument("--trace", required=True)
    options.add_argument("--skip", type=int, default=1000)
    options.add_argument("--rows", type=int, default=300)
    options = options.parse_args()
    streams = yardstick(options.yardsticks, "streams")
    module = streams.encoder(options.encoder)
    data = streams.batches(options.trace, options.skip, options.rows)
    cache = GraphCache(module, buckets={"batch": BATCH, "seq": SEQ}, dynamic_shapes=DIMS)
    start = time.perf_counter()
    cache.warmup(sample=data[0], progress=False)
    build = {"graphcache": time.perf_counter() - start}
    start = time.perf_counter()
    hand = streams.hand_pow2(module)
    build["hand_pow2"] = time.perf_counter() - start
    ways = {"eager": module, "hand_pow2": hand, "graphcache": cache}
    rounds = {way: [] for way in ways}
    for _ in range(3):  # in turn, so that a drift of the clock falls on all
        for way, call in ways.items():
            rounds[way].append(streams.measure(call, data))
    results = {
        way: {**sorted(found, key=lambda r: r["us"])[1], "all_us": [r["us"] for r in found]}
        for way, found in rounds.items()
    }
    with torch.no_grad():
        pairs = [(cache(*inputs), module(*inputs)) for inputs in data]
    stats = cache.stats()
    results["ratio"] = round(results["graphcache"]["us"] / results["hand_pow2"]["us"], 4)
    results["build_s"] = {way: round(seconds, 2) for way, seconds in build.items()}
    results["equal_to_eager"] = all(close(a, b) for a, b in pairs)
    results["largest_error"] = max(float((a - b).abs().max()) for a, b in pairs)
    results["stats"] = {
        k: getattr(stats, k)
        for k in (
            "calls",
            "captures",
            "replays",
            "eager",
            "graphs",
            "graph_bytes",
            "padding_overhead",
            "fallbacks",
        )
    }
    write(f"streams_{options.encoder}", options, results)


if __name__ == "__main__":
    main()
