"""One dim, no pieces: the cheapest buckets, exactly, for every number of buckets at once.

Choosing t buckets on a line is a path of t links (Pentico 1976 calls it the assortment problem). A
link from bucket i to bucket j costs what the sizes between them cost in j, each the cheaper of j
and eager. Where costs do not fall with size the links have the Monge property, so the best
predecessor never moves left, and divide and conquer finds a layer in O(n log n) (Schieber 1998).
Other tables take every link, O(n^2) a layer, and are exact too: each path is a way to serve the
sizes, and the best way is a path.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from graphcache.planning.demand import Bools, Demand, Floats, Ints


class Layer(NamedTuple):
    """For each last bucket (0: none) the least cost of the sizes up to it, and the bucket before
    it.
    """

    cost: Floats
    before: Ints


class Links(Protocol):
    """Costs of the sizes above one bucket and up to the next, by position; 0 is no bucket."""

    tail: Floats

    def extend(self, cost: Floats) -> Layer:
        """The cheapest way to add one link to each of these paths."""


def best_sets(demand: Demand, most: int) -> list[Ints]:
    """The set of at most t corners with the least `Demand.total`, for t = 0 .. `most`, exactly.

    Args:
        demand: of one dim, its corners ascending.
        most: the largest number of corners. Entries below the number of forced corners are the
            forced ones alone.

    Returns:
        Indices of corners, ascending.
    """
    forced = np.flatnonzero(demand.forced)
    keep = np.flatnonzero(~_dominated(demand) & ~demand.forced)
    links = _links(_beside(demand, forced), keep)
    prices = np.append(0.0, demand.nodes[keep])
    cost = np.full(len(prices), 2 * links.tail[0] + 1)
    cost[0] = 0.0
    sets, ways = [forced] * min(len(forced) + 1, most + 1), []
    while len(sets) <= most:
        layer = at_most(cost, links.extend(cost), prices)
        cost = layer.cost
        ways.append(layer.before)
        chosen = keep[path(ways, int(np.argmin(cost + links.tail)))]
        sets.append(np.union1d(chosen, forced))
    return sets


def _beside(demand: Demand, forced: Ints) -> Demand:
    """The same where calls that no other corner serves go to the cheapest forced one: to the rest
    it is as if eager were cheaper.
    """
    if not len(forced):
        return demand
    return replace(demand, eager=demand.only(forced).table().min(axis=1))


def at_most(shorter: Floats, longer: Layer, prices: Floats | float = 0.0) -> Layer:
    """One link more only where that is cheaper, so that no entry is infinite."""
    cost = longer.cost + prices
    better = cost < shorter
    own = np.arange(len(shorter))
    return Layer(np.where(better, cost, shorter), np.where(better, longer.before, own))


def path(ways: list[Ints], end: int) -> Ints:
    """Follow the buckets back from the last; one that is its own predecessor is a link not
    used.
    """
    chosen = []
    for before in reversed(ways):
        if end and before[end] != end:
            chosen.append(end - 1)
        end = int(before[end])
    return np.array(sorted(chosen), dtype=np.int64)


def _dominated(demand: Demand) -> Bools:
    """Corners that a larger one replaces at no more cost and no higher price."""
    worse = np.zeros(len(demand.costs), dtype=bool)
    costs, nodes = demand.costs.tolist(), demand.nodes.tolist()
    front: list[tuple[float, float]] = []  # of the larger ones: costs rise, prices fall
    for j in range(len(costs) - 1, -1, -1):
        at = bisect.bisect_right(front, (costs[j], math.inf))
        worse[j] = at > 0 and front[at - 1][1] <= nodes[j]
        if not worse[j]:
            while at < len(front) and front[at][1] >= nodes[j]:
                del front[at]
            front.insert(at, (costs[j], nodes[j]))
    return worse


def _links(demand: Demand, keep: Ints) -> Links:
    """The links between these candidates."""
    order = np.argsort(demand.points[:, 0], kind="stable")
    sizes, weights = demand.points[order, 0], demand.weights[order]
    eager = demand.eager[order]
    costs = demand.costs[keep]
    ends = np.append(0, np.searchsorted(sizes, demand.corners[keep, 0], side="right"))
    if np.all(np.diff(costs) >= 0) and np.all(np.diff(eager) >= 0):
        return _Monge(weights, eager, costs, ends)
    return _dense(weights, eager, costs, ends)


def _tail(weights: Floats, eager: Floats, ends: Ints) -> Floats:
    """What the sizes above each bucket cost, eagerly."""
    below = np.concatenate([[0.0], np.cumsum(weights * eager)])
    return np.asarray(below[-1] - below[ends])


class Table:
    """Every link, in a table.

    Args:
        below: (m + 1, m) the cost of the sizes up to each position if served in each candidate.
        tail: (m + 1,) what the sizes above each position cost, eagerly.
    """

    def __init__(self, below: Floats, tail: Floats) -> None:
        self.tail = tail
        links = np.diagonal(below[1:])[None, :] - below
        earlier = np.arange(len(below))[:, None] <= np.arange(below.shape[1])[None, :]
        self._links = np.where(earlier, links, np.inf)

    def extend(self, cost: Floats) -> Layer:
        """O(m^2)."""
        options = cost[:, None] + self._links
        before = np.argmin(options, axis=0)
        least = options[before, np.arange(len(before))]
        return Layer(np.append(cost[0], least), np.append(0, before))


def _dense(weights: Floats, eager: Floats, costs: Floats, ends: Ints) -> Table:
    served = weights[:, None] * np.minimum(costs[None, :], eager[:, None])
    below = np.concatenate([np.zeros((1, len(costs))), np.cumsum(served, axis=0)])
    return Table(below[ends], _tail(weights, eager, ends))


class _Monge:
    """Links by prefix sums: the sizes that are cheaper eagerly come first among those of a bucket,
    since eager costs rise with size.
    """

    def __init__(self, weights: Floats, eager: Floats, costs: Floats, ends: Ints) -> None:
        self.tail = _tail(weights, eager, ends)
        self._ends, self._costs = ends, np.append(0.0, costs)
        self._weight = np.concatenate([[0.0], np.cumsum(weights)])
        self._eager = np.concatenate([[0.0], np.cumsum(weights * eager)])
        self._turn = np.searchsorted(eager, self._costs, side="left")  # first size cheaper in j

    def _between(self, i: Ints, j: Ints) -> Floats:
        first, last = self._ends[i], self._ends[j]
        turn = np.clip(self._turn[j], first, last)
        eagerly = self._eager[turn] - self._eager[first]
        return np.asarray(eagerly + self._costs[j] * (self._weight[last] - self._weight[turn]))

    def extend(self, cost: Floats) -> Layer:
        """All middles of one level of the recursion at once: each has its range of predecessors,
        bounded by those of its neighbours of the level above.
        """
        count = len(cost)
        least, before = np.full(count, cost[0]), np.zeros(count, dtype=np.int64)
        step = 1 << max(count - 2, 1).bit_length()
        done = np.array([0, count], dtype=np.int64)  # with their predecessors known
        known = np.array([0, count - 1], dtype=np.int64)
        while step >= 1:
            middles = np.arange(step, count, 2 * step)
            if len(middles):
                right = np.searchsorted(done, middles)
                low, high = known[right - 1], np.minimum(known[right], middles - 1)
                least[middles], before[middles] = self._best(cost, middles, low, high)
                done = np.insert(done, right, middles)
                known = np.insert(known, right, before[middles])
            step //= 2
        return Layer(least, before)

    def _best(self, cost: Floats, middles: Ints, low: Ints, high: Ints) -> tuple[Floats, Ints]:
        """For each middle the best predecessor of its range, by one flat pass over all ranges."""
        lengths = np.maximum(high - low, 0) + 1
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        owner = np.repeat(np.arange(len(middles)), lengths)
        tried = np.arange(len(owner)) - starts[owner] + low[owner]
        options = cost[tried] + self._between(tried, middles[owner])
        least = np.minimum.reduceat(options, starts)
        first = np.flatnonzero(options == least[owner])
        _, at = np.unique(owner[first], return_index=True)
        return least, tried[first[at]]
