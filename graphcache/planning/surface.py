"""A cost as a function of sizes: a table of some sizes, interpolated.

Linear in each dim, which never overshoots its neighbours; below the smallest size the smallest is
taken, above the largest the last slope goes on, if it rises. A table that lacks combinations of its
sizes is interpolated by elements, and does not fall with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from graphcache.errors import GraphCacheError
from graphcache.planning.demand import Floats, Ints, is_amount

Sizes = tuple[int, ...]


def surface(kind: str, table: Mapping[Sizes, float], dims: Sequence[str]) -> _Grid | _Scattered:
    """What interpolates a table, once it is checked."""
    for sizes, value in table.items():
        whole = all(isinstance(n, int) and n >= 1 for n in sizes)
        number = is_amount(value)
        if len(sizes) != len(dims) or not (whole and number):
            raise GraphCacheError(
                f"the {kind} cost of {sizes} is {value!r}; give a number of at least 0 for "
                f"one size of each dim: {', '.join(dims)}."
            )
    if not table:
        raise GraphCacheError(f"the {kind} table is empty; give at least one size.")
    levels = [np.array(sorted(set(axis))) for axis in zip(*table, strict=True)]
    whole = math.prod(map(len, levels)) == len(table)
    return _Grid(levels, table) if whole else _Scattered(table)


class _Scattered:
    """Interpolation of a few sizes by their elements."""

    def __init__(self, table: Mapping[Sizes, float]) -> None:
        by_elements: dict[int, float] = {}
        for sizes, value in table.items():
            elements = math.prod(sizes)
            by_elements[elements] = max(value, by_elements.get(elements, 0.0))
        self._elements = np.array(sorted(by_elements))
        values = np.array([by_elements[n] for n in self._elements.tolist()], dtype=np.float64)
        self._values = np.maximum.accumulate(values)

    def __call__(self, sizes: Ints) -> Floats:
        values = np.broadcast_to(self._values, (len(sizes), len(self._values)))
        return _between(values, self._elements, np.prod(sizes, axis=1))


class _Grid:
    """Multilinear interpolation of a table of every combination."""

    def __init__(self, levels: list[Ints], table: Mapping[Sizes, float]) -> None:
        self._levels = levels
        whole = itertools.product(*(axis.tolist() for axis in levels))
        shape = [len(axis) for axis in levels]
        self._values = np.array([float(table[sizes]) for sizes in whole]).reshape(shape)

    def __call__(self, sizes: Ints) -> Floats:
        values = np.broadcast_to(self._values, (len(sizes), *self._values.shape))
        for axis, levels in enumerate(self._levels):
            values = _between(values, levels, sizes[:, axis])
        return np.asarray(np.maximum(values, 0.0))


def _between(values: Floats, levels: Ints, wanted: Ints) -> Floats:
    """Interpolate the first axis after the calls': (n, levels, ...) to (n, ...)."""
    if len(levels) == 1:
        return values[:, 0]
    upper = np.clip(np.searchsorted(levels, wanted), 1, len(levels) - 1)
    lower, own = upper - 1, np.arange(len(wanted))
    share = (wanted - levels[lower]) / (levels[upper] - levels[lower])
    share = np.maximum(share, 0.0).reshape(-1, *[1] * (values.ndim - 2))
    low, high = values[own, lower], values[own, upper]
    inside = (1 - share) * low + share * high  # exact at both ends
    above = high + (share - 1) * np.maximum(high - low, 0.0)
    return np.asarray(np.where(share > 1, above, inside))
