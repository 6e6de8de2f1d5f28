"""Does a call stay cheap as graphs, inputs, shapes and submodules grow, and what does a shape cost
that was not seen before?

python -m benchmarks.scaling [--rounds N] [--out FILE]
Host microseconds a call of tiny modules, so that the cost of the cache is what is measured. On a
machine without a GPU the recorder replays, which shows the shape of the curves only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import host_us, parser, spread, write
from graphcache import GraphCache
from graphcache.compare import close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRAPHS = (1, 4, 16, 64, 256)
INPUTS = (1, 2, 4, 8, 16, 32)
SHAPES = (4, 100, 1_000, 10_000)
LAYERS = (1, 8, 32, 128)
HOT = 4


class Sum(nn.Module):
    """Of any number of inputs by keyword, each a layer of its own."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(inputs))

    def forward(self, **inputs: Tensor) -> Tensor:
        pairs = zip(self.layers, inputs.values(), strict=True)
        return torch.stack([layer(x) for layer, x in pairs]).sum(0)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--calls", type=int, default=1000, help="of a round")
    options.add_argument("--most", type=int, default=SHAPES[-1], help="leave out larger steps")
    options = options.parse_args(arguments)
    with torch.no_grad():
        results = {
            "device": DEVICE,
            "graphs": {n: graphs(n, options) for n in GRAPHS if n <= options.most},
            "inputs": {n: inputs(n, options) for n in INPUTS if n <= options.most},
            "shapes": {n: shapes(n, options) for n in SHAPES if n <= options.most},
            "layers": {n: layers(n, options) for n in LAYERS if n <= options.most},
            "unseen": unseen(min(4_000, options.most), options),
        }
    write("scaling", options, results)


def rows(n: int) -> Tensor:
    return torch.randn(n, 16, device=DEVICE)


def tiny(depth: int = 1) -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth))).to(DEVICE).eval()


def timed(calls: Sequence[Callable[[], Any]], options: Any) -> dict[str, Any]:
    """Of these calls in turn."""
    turn = itertools.cycle(calls)
    return spread(host_us(lambda: next(turn)(), options.calls, options.rounds))


def graphs(count: int, options: Any) -> dict[str, Any]:
    """Hot shapes of at most 4 buckets while so many graphs are alive."""
    module = tiny()
    cache = GraphCache(module, buckets=[4 * n for n in range(1, count + 1)], max_graphs=count)
    cache.warmup(sample=rows(1), progress=False)
    hot = [rows(4 * n - 1) for n in range(1, min(HOT, count) + 1)]
    assert cache.stats().graphs == count
    assert all(close(cache(x), module(x)) for x in hot)
    return timed([lambda x=x: cache(x) for x in hot], options)


def inputs(count: int, options: Any) -> dict[str, Any]:
    """One call with so many tensors by keyword, beside eager."""
    module = Sum(count).to(DEVICE).eval()
    named = {f"x{i}": rows(13) for i in range(count)}
    dims = {name: {0: "batch"} for name in named}
    cache = GraphCache(module, buckets=[16], dynamic_shapes=dims)
    assert close(cache(**named), module(**named))
    return {
        "graphcache": timed([lambda: cache(**named)], options),
        "eager": timed([lambda: module(**named)], options),
    }


def shapes(count: int, options: Any) -> dict[str, Any]:
    """Four hot shapes after so many distinct ones were seen."""
    module = tiny()
    cache = GraphCache(module, buckets=[count // 4 + HOT, count + HOT])
    cache.warmup(sample=rows(1), progress=False)
    for n in range(1, count + 1):
        cache(rows(n))
    hot = [rows(n) for n in range(1, HOT + 1)]
    assert all(close(cache(x), module(x)) for x in hot)
    small = GraphCache(module, buckets=[count // 4 + HOT])
    small.warmup(sample=rows(1), progress=False)
    return {
        "after": timed([lambda x=x: cache(x) for x in hot], options),
        "only them": timed([lambda x=x: small(x) for x in hot], options),
    }


def layers(count: int, options: Any) -> dict[str, Any]:
    """What a call costs beside its bare replay, for so many submodules."""
    module = tiny(count)
    cache = GraphCache(module, buckets=[16])
    x = rows(13)
    assert close(cache(x), module(x))
    (entry,) = cache._miss.store.graphs.entries()
    return {
        "graphcache": timed([lambda: cache(x)], options),
        "replay": timed([entry.graph.replay], options),
    }


def unseen(count: int, options: Any) -> dict[str, Any]:
    """A call whose shape has no plan yet, beside one whose shape has: the same sizes twice."""
    module = tiny()
    cache = GraphCache(module, buckets=[count // 2, count])
    cache.warmup(sample=rows(1), progress=False)
    data = [rows(n) for n in range(1, count + 1, max(1, count // 500))]
    for x in (data[0], data[1], data[-1], data[-2]):
        cache(x)
    first, again = [], []
    for _ in range(options.rounds):
        cache._server.drop_plans()
        first.append(once(cache, data))
        again.append(once(cache, data))
    result = {"first": spread(first), "again": spread(again)}
    ratio = result["first"]["median"] / result["again"]["median"]
    return {**result, "ratio": round(ratio, 3)}


def once(cache: GraphCache, data: Sequence[Tensor]) -> float:
    """Host microseconds a call, one pass."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for x in data:
        cache(x)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(data) * 1e6


if __name__ == "__main__":
    main()
