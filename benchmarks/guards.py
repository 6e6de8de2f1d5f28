"""What do the checks of a call cost? The same cache with its guards on and off, in turn.

python -m benchmarks.guards --trace FILE.csv [--skip N] [--rows N] [--yardsticks FOLDER]
[--out FILE]
Guards are the comparison of the module with what was captured, the modes in the key, and whether
gradients are needed. The tiny nets of the yardstick `hand_loop.py`, and the MiniLM-size encoder on
the stream of `streams.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.record import host_us, parser, spread, write, yardstick
from benchmarks.streams import BATCH, DIMS, SEQ
from graphcache import GraphCache

ROUNDS = 15


@contextlib.contextmanager
def unguarded(cache: GraphCache) -> Iterator[None]:
    """The private switch: constants in the place of what the hit path asks."""
    watch, modes = cache._miss.watch, cache._miss.modes
    off = {(watch, "same"): True, (watch, "needs_grad"): False, (modes, "everything"): ()}
    for (owner, name), answer in off.items():
        setattr(owner, name, functools.partial(_answer, answer))
    try:
        yield
    finally:
        for owner, name in off:
            delattr(owner, name)


def _answer(answer: Any) -> Any:
    return answer


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--trace", required=True)
    options.add_argument("--skip", type=int, default=1000)
    options.add_argument("--rows", type=int, default=300)
    options = options.parse_args()
    with torch.no_grad():
        results = {**_tiny(options), "MiniLM stream": _stream(options)}
    write("guards", options, results)


def _tiny(options: Any) -> dict[str, Any]:
    loops = yardstick(options.yardsticks, "hand_loop")
    results = {}
    for name, (module, _, args, kwargs) in loops.cases().items():
        cache = GraphCache(module, buckets=loops.BUCKETS)
        cache.warmup(sample=args or kwargs, progress=False)
        call = functools.partial(cache, *args, **kwargs)
        on, off = [], []
        for _ in range(ROUNDS):  # in turn, so that a drift of the clock falls on both
            on += host_us(call, rounds=1)
            with unguarded(cache):
                off += host_us(call, rounds=1)
        results[name] = _compared(on, off)
    return results


def _stream(options: Any) -> dict[str, Any]:
    streams = yardstick(options.yardsticks, "streams")
    module = streams.encoder("minilm")
    data = streams.batches(options.trace, options.skip, options.rows)
    cache = GraphCache(module, buckets={"batch": BATCH, "seq": SEQ}, dynamic_shapes=DIMS)
    cache.warmup(sample=data[0], progress=False)
    on, off = [], []
    for _ in range(5):
        on.append(streams.measure(cache, data)["us"])
        with unguarded(cache):
            off.append(streams.measure(cache, data)["us"])
    return _compared(on, off) | {"eager": cache.stats().eager}


def _compared(on: list[float], off: list[float]) -> dict[str, Any]:
    """Of the differences within each round the median counts: both runs met the same clock."""
    differences = [a - b for a, b in zip(on, off, strict=True)]
    added = spread(differences)
    relative = added["median"] / spread(off)["median"]
    return {"on": spread(on), "off": spread(off), "added": added, "relative": round(relative, 4)}


if __name__ == "__main__":
    main()
