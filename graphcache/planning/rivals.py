"""The bucket lists that people use without a planner, to compare a plan with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from graphcache.planning.demand import Floats, Ints
from graphcache.stats import Bucket

_MOST = 4096  # buckets of a grid that are still listed

Levels = Callable[[int, int], list[int]]


def powers_of_two(low: int, high: int) -> list[int]:
    """1, 2, 4, .. up to the first that holds the largest size."""
    return [2**i for i in range((high - 1).bit_length() + 1)]


def steps_of_a_fifth(low: int, high: int) -> list[int]:
    """Each a fifth larger than the one before, from the smallest size."""
    levels = [low]
    while levels[-1] < high:
        levels.append(max(levels[-1] + 1, int(levels[-1] * 1.2)))
    return levels


def decode_list(low: int, high: int) -> list[int]:
    """1, 2, 4 and multiples of 8, as vLLM captures for decoding."""
    return _cut([1, 2, 4, *range(8, high + 8, 8)], high)


def exponential(low: int, high: int) -> list[int]:
    """Geometric points between the ends, as many as doublings, rounded up to a power of two of
    their size, as vLLM warms up on Gaudi.
    """
    count = (high - 1).bit_length() + 1
    points = np.geomspace(low, high, count)
    steps = [max(1, 2 ** max(int(point).bit_length() - 3, 0)) for point in points]
    levels = {int(-(-point // step) * step) for point, step in zip(points, steps, strict=True)}
    return _cut(sorted(levels | {high}), high)


def _cut(levels: Sequence[int], high: int) -> list[int]:
    """With the first that holds the largest size, and none beyond."""
    held = next(level for level in levels if level >= high)
    return [level for level in levels if level <= held]


RULES: dict[str, Levels] = {
    "powers of two": powers_of_two,
    "1.2x steps": steps_of_a_fifth,
    "vLLM's list": decode_list,
    "exponential": exponential,
}


def rival_sets(sizes: Ints, weights: Floats, count: int) -> dict[str, list[Bucket]]:
    """By name, the buckets of each rule for this traffic: in several dims the product of each
    dim's. Sets of more than 4,096 buckets are left out.

    Args:
        sizes: (n, d) sizes seen.
        weights: (n,) their weights.
        count: the number of buckets for quantiles, those of equal shares of the calls.
    """
    ends = [(int(axis.min()), int(axis.max())) for axis in sizes.T]
    rules = {
        name: rule
        for name, rule in RULES.items()
        if rule is not decode_list or all(high <= 8 * _MOST for _, high in ends)
    }
    axes = {name: [rule(*end) for end in ends] for name, rule in rules.items()}
    per_dim = max(1, round(count ** (1 / len(ends))))
    axes[f"quantiles ({per_dim ** len(ends)})"] = [
        _quantiles(axis, weights, per_dim) for axis in sizes.T
    ]
    return {
        name: list(itertools.product(*levels))
        for name, levels in axes.items()
        if np.prod([len(axis) for axis in levels], dtype=np.float64) <= _MOST
    }


def _quantiles(sizes: Ints, weights: Floats, count: int) -> list[int]:
    order = np.argsort(sizes, kind="stable")
    share = np.cumsum(weights[order])
    at = np.searchsorted(share, share[-1] * np.arange(1, count) / count)
    return sorted({*sizes[order[at]].tolist(), int(sizes.max())})
