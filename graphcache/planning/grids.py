"""Grids: levels per axis whose product are the buckets, where a backend or a user wants one.

With the levels of the other axes fixed, those of one axis are a problem on a line, solved exactly
as in `line`. A free-form set of as many corners costs no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graphcache.planning.demand import Bools, Floats, Ints
from graphcache.planning.line import Table, at_most, path

Price = Callable[[Ints], Floats]

_ROUNDS = 10
_TINY = 1e-12  # of a cost: rounding, not a gain


def grid(
    points: Ints,
    weights: Floats,
    eager: Floats,
    price: Price,
    levels: Sequence[Ints],
    most: int,
    forced_top: bool = True,
) -> list[Ints]:
    """The levels per axis of the best grid found with at most `most` cells.

    One axis at a time, exactly, with the levels of the others as they are, until nothing improves;
    for every way to share `most` among the axes.

    Args:
        points: (n, d) sizes.
        weights: (n,) each point's share of the calls.
        eager: (n,) the cost of a call of each point without a graph.
        price: the cost of one replay of each of these corners.
        levels: per axis the levels to choose from, ascending; the last covers every point.
        most: the largest number of cells.
        forced_top: keep the last level of each axis; else points above may be served eagerly.
    """
    lattice = _Lattice(points, weights, eager, price, levels, forced_top)
    found: list[tuple[float, list[Ints]]] = []
    for counts in _shares(most, [len(axis) for axis in levels]):
        starts = ([1] * len(counts), list(counts))
        found += [lattice.alternate(lattice.quantiles(start), counts) for start in starts]
    return min(found, key=lambda one: one[0])[1]


def _shares(most: int, limits: Sequence[int]) -> list[tuple[int, ...]]:
    """Levels per axis with at most `most` cells, of which no axis can have one more."""

    def grows(counts: tuple[int, ...]) -> bool:
        cells = int(np.prod(counts))
        steps = zip(counts, limits, strict=True)
        return any(n < limit and cells // n * (n + 1) <= most for n, limit in steps)

    return [counts for counts in _within(most, limits) if not grows(counts)]


def _within(most: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not limits:
        yield ()
        return
    for n in range(1, min(most, limits[0]) + 1):
        yield from ((n, *rest) for rest in _within(most // n, limits[1:]))


@dataclass(frozen=True, slots=True, eq=False)
class _Lattice:
    """Grids over these levels."""

    points: Ints
    weights: Floats
    eager: Floats
    price: Price
    levels: Sequence[Ints]
    forced_top: bool

    def quantiles(self, counts: Sequence[int]) -> list[Ints]:
        """Levels that part the weight of each axis equally; of one level it is the top."""
        chosen = []
        for axis, n in enumerate(counts):
            order = np.argsort(self.points[:, axis], kind="stable")
            share = np.cumsum(self.weights[order])
            at = np.searchsorted(share, share[-1] * np.arange(1, n) / n)
            ranks = np.searchsorted(self.levels[axis], self.points[order[at], axis])
            chosen.append(self.levels[axis][np.union1d(ranks, len(self.levels[axis]) - 1)])
        return chosen

    def alternate(self, start: list[Ints], counts: Sequence[int]) -> tuple[float, list[Ints]]:
        """Improve one axis after the other; the cost, and the levels."""
        chosen, cost = list(start), np.inf
        for _ in range(_ROUNDS):
            before = cost
            for axis, count in enumerate(counts):
                chosen[axis], cost = self._best_axis(axis, chosen, count)
            if cost >= before * (1 - _TINY):
                break
        return cost, chosen

    def _best_axis(self, axis: int, chosen: list[Ints], count: int) -> tuple[Ints, float]:
        """The exact best levels of one axis. Position 0 is no level, position p the level p - 1."""
        below, tail = self._below(axis, chosen)
        links = Table(below, tail)
        cost, ways = np.append(0.0, np.full(below.shape[1], np.inf)), []
        for _ in range(count):
            cost, before = at_most(cost, links.extend(cost))
            ways.append(before)
        ends = cost + tail
        end = below.shape[1] if self.forced_top else 1 + int(np.argmin(ends[1:]))
        return self.levels[axis][path(ways, end)], float(ends[end])

    def _below(self, axis: int, chosen: list[Ints]) -> tuple[Floats, Floats]:
        """The cost of the points under each level of the axis (rows) if served at each (columns);
        and of those above, eagerly.
        """
        rank = np.searchsorted(self.levels[axis], self.points[:, axis])
        order = np.argsort(rank, kind="stable")
        starts = np.searchsorted(rank[order], np.arange(len(self.levels[axis]) + 1))
        eager = np.append(0.0, np.cumsum((self.weights * self.eager)[order]))
        served = np.cumsum(self._served(axis, chosen)[order], axis=0)
        served = np.vstack([np.zeros(served.shape[1]), served])
        return served[starts], eager[-1] - eager[starts]

    def _served(self, axis: int, chosen: list[Ints]) -> Floats:
        """The weighted cost of each point at each level of the axis, the others as chosen."""
        cells, held = self._cells(axis, chosen)
        distinct, at = np.unique(cells, axis=0, return_inverse=True)
        corners = np.repeat(distinct[:, None, :], len(self.levels[axis]), axis=1)
        corners[:, :, axis] = self.levels[axis]
        prices = self.price(corners.reshape(-1, corners.shape[2])).reshape(corners.shape[:2])
        eager = self.eager[:, None]
        cost = np.where(held[:, None], np.minimum(prices[at.reshape(-1)], eager), eager)
        return np.asarray(cost * self.weights[:, None])

    def _cells(self, axis: int, chosen: list[Ints]) -> tuple[Ints, Bools]:
        """The point's levels on the other axes, and whether it has one on each."""
        cells, held = np.zeros_like(self.points), np.ones(len(self.points), dtype=bool)
        for other, levels in enumerate(chosen):
            if other != axis:
                at = np.searchsorted(levels, self.points[:, other])
                held &= at < len(levels)
                cells[:, other] = levels[np.minimum(at, len(levels) - 1)]
        return cells, held
