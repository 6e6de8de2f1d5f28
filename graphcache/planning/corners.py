"""Two or more dims, no pieces: free-form sets of corners.

Choosing corners is facility location, hard in general. Greedy and agglomerative sets start a local
search by swaps (Resende and Werneck 2003), and a Lagrangian bound tells how far from the best its
result can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from graphcache.planning.demand import Bools, Demand, Floats, Ints

Price = Callable[[Ints], Floats]

_PAIRS = 3_000  # more joins of two points than that make a search slow
_TINY = 1e-12  # of a total: rounding, not a gain
_CLOSE = 1e-3  # of the upper bound: a gap not worth more steps
_MOMENTUM = 0.9  # the slopes alone zigzag
_PATIENCE = 12  # steps without a better bound before they are halved
_SMALL = 1e-3  # of the first step: halved enough


def tight_corners(points: Ints) -> Ints:
    """Candidate corners: boxes that some point touches at each face, by volume.

    Args:
        points: (n, d) sizes, at least one.

    Returns:
        (m, d) corners, distinct, with the top one. In two dims every tight corner. In more dims
        those that two points span, if they are few, else the points; and the boxes of a merging.
    """
    points = np.unique(points, axis=0)
    top = points.max(axis=0)[None, :]
    if points.shape[1] == 2:
        found = _tight_pairs(points)
    elif points.shape[1] == 1:
        found = points
    else:
        found = np.concatenate([_joins(points), *_boxes_met(points)])
    return _by_volume(np.concatenate([found, top]))


def greedy(demand: Demand, most: int) -> list[Ints]:
    """Nested sets, each with the corner more that saves most beyond its own price.

    Returns:
        Indices of corners, ascending; entry t - 1 has at most t, but never fewer than the forced.
    """
    board = _Board.of(demand, most)
    chosen = board.fixed
    sets = [chosen] * min(len(chosen), most)
    while len(sets) < most:
        adding = board.adding(board.table[np.append(chosen, -1)].min(axis=0))
        adding[chosen] = np.inf
        if np.min(adding) < -board.tiny:
            chosen = np.union1d(chosen, np.argmin(adding))
        sets.append(chosen)
    return sets


def agglomerative(points: Ints, weights: Floats, price: Price, most: int) -> list[Ints]:
    """Sets of boxes from merging, each time, the two whose join adds the least cost.

    Args:
        points: (n, d) distinct sizes.
        weights: (n,) each point's share of the calls.
        price: the cost of one replay of each of these corners.
        most: the largest set.

    Returns:
        Arrays of corners; entry t - 1 has at most t of them.
    """
    merging = _Merging(points, weights, price)
    sets = [merging.left()] * max(most - len(points) + 1, 0)
    for left in range(len(points) - 1, 0, -1):
        merging.step()
        if left <= most:
            sets.append(merging.left())
    return sets[::-1]


def search(
    demand: Demand, most: int, starts: Iterable[Ints], seed: int, perturbations: int = 20
) -> Ints:
    """A set of at most `most` corners whose `Demand.total` no swap, addition or drop lowers.

    Args:
        demand: what to plan for.
        most: the largest set; the forced corners are in it even if they are more.
        starts: sets to start from, as indices.
        seed: of the perturbations; the same seed gives the same set.
        perturbations: how often a quarter of the best set is replaced at random and searched from.

    Returns:
        Indices of corners, ascending.
    """
    board = _Board.of(demand, most)
    rng = np.random.default_rng(seed)
    found = [board.settled(start) for start in [*starts] or [board.fixed]]
    best = min(found, key=board.rank)
    for _ in range(perturbations):
        best = min(best, board.settled(board.shaken(best, rng)), key=board.rank)
    return best


def lower_bound(demand: Demand, most: int, upper: float, steps: int = 600) -> float:
    """No set of at most `most` corners that has the forced ones has a lower `Demand.total`.

    The Lagrangian dual of "each point is served once", by subgradients.

    Args:
        demand: what to plan for.
        most: the largest set.
        upper: the total of a set that is known; the better, the faster.
        steps: at most so many.
    """
    dual = _Dual(_Board.of(demand, most))
    multipliers = dual.least
    way = np.zeros_like(multipliers)
    best, scale, since = -np.inf, 1.0, 0
    for _ in range(steps):
        bound, slope = dual.at(multipliers)
        best, since = (bound, 0) if bound > best else (best, since + 1)
        if since == _PATIENCE:
            scale, since = scale / 2, 0
        if best >= upper * (1 - _CLOSE) or scale < _SMALL or not np.any(slope):
            break
        way = slope + _MOMENTUM * way
        multipliers = dual.moved(multipliers, way, scale * (upper - bound))
    return float(best)


def _tight_pairs(points: Ints) -> Ints:
    """A level of x and one of y, each of some point that the other level holds."""
    (xs, at_x), (ys, at_y) = (np.unique(column, return_inverse=True) for column in points.T)
    touched = np.zeros((len(xs), len(ys)), dtype=bool)
    touched[at_x, at_y] = True
    tight = np.logical_or.accumulate(touched, axis=0) & np.logical_or.accumulate(touched, axis=1)
    i, j = np.nonzero(tight)
    return np.stack([xs[i], ys[j]], axis=1)


def _joins(points: Ints) -> Ints:
    """The boxes that two points span, or the points where those are too many."""
    met: set[tuple[int, ...]] = set()
    for i, point in enumerate(points):
        met.update(map(tuple, np.maximum(points[i:], point).tolist()))
        if len(met) > _PAIRS:
            return points
    return np.array(sorted(met), dtype=np.int64)


def _boxes_met(points: Ints) -> Iterator[Ints]:
    merging = _Merging(points, np.ones(len(points)), _volume)
    for _ in range(len(points) - 1):
        yield merging.step()[None, :]


def _volume(corners: Ints) -> Floats:
    return np.asarray(np.prod(corners, axis=1, dtype=np.float64))


def _by_volume(corners: Ints) -> Ints:
    distinct = np.unique(corners, axis=0)
    return distinct[np.argsort(_volume(distinct), kind="stable")]


class _Merging:
    """Boxes, and what joining each two of them would add to the cost."""

    def __init__(self, points: Ints, weights: Floats, price: Price) -> None:
        self._corners, self._weights, self._price = points.copy(), weights.copy(), price
        self._costs = weights * price(points)
        self._alive = np.ones(len(points), dtype=bool)
        self._rises = np.stack([self._rise(i) for i in range(len(points))])
        self._partner = self._rises.argmin(axis=1)
        self._lowest = self._rises.min(axis=1)

    def left(self) -> Ints:
        """The boxes there are."""
        return np.unique(self._corners[self._alive], axis=0)

    def step(self) -> Ints:
        """Merge the best two; the box that they became."""
        kept = int(np.argmin(self._lowest))
        gone = int(self._partner[kept])
        self._corners[kept] = np.maximum(self._corners[kept], self._corners[gone])
        self._weights[kept] += self._weights[gone]
        self._costs[kept] = self._weights[kept] * self._price(self._corners[kept, None])[0]
        self._alive[gone] = False
        self._renew(kept, gone)
        return np.array(self._corners[kept])  # not a view: the box grows

    def _rise(self, i: int) -> Floats:
        joined = self._price(np.maximum(self._corners, self._corners[i]))
        rise = joined * (self._weights + self._weights[i]) - self._costs - self._costs[i]
        rise[~self._alive] = np.inf
        rise[i] = np.inf
        return np.asarray(rise)

    def _renew(self, kept: int, gone: int) -> None:
        """Only rows whose best partner was one of the two look for another."""
        rise = self._rise(kept)
        self._rises[gone], self._rises[:, gone] = np.inf, np.inf
        self._rises[kept], self._rises[:, kept] = rise, rise
        closer = rise < self._lowest
        self._partner[closer], self._lowest[closer] = kept, rise[closer]
        lost = (self._partner == kept) & ~closer | (self._partner == gone)
        lost[[kept, gone]] = True
        rows = np.flatnonzero(lost)
        self._partner[rows] = self._rises[rows].argmin(axis=1)
        self._lowest[rows] = self._rises[rows, self._partner[rows]]


@dataclass(frozen=True, slots=True, eq=False)
class _Board:
    """Weighted costs (m + 1, n) of each point in each corner. The last row is eager, a corner that
    is always there and free: to add it is to add nothing.
    """

    table: Floats
    nodes: Floats
    forced: Bools
    fixed: Ints
    most: int
    tiny: float

    @classmethod
    def of(cls, demand: Demand, most: int) -> _Board:
        eager = demand.weights * demand.eager
        table = np.vstack([(demand.table() * demand.weights[:, None]).T, eager])
        fixed = np.flatnonzero(demand.forced)
        tiny = _TINY * float(np.abs(eager).sum())
        return cls(table, np.append(demand.nodes, 0.0), demand.forced, fixed, most, tiny)

    def adding(self, least: Floats) -> Floats:
        """The change of the total by each corner more, where points now cost `least`."""
        return np.asarray(np.minimum(self.table, least).sum(axis=1) - least.sum() + self.nodes)

    def rank(self, chosen: Ints) -> tuple[float, int]:
        served = self.table[np.append(chosen, -1)].min(axis=0).sum()
        return float(served + self.nodes[chosen].sum()), len(chosen)

    def settled(self, start: Ints) -> Ints:
        """The set that the best moves lead to."""
        chosen = np.union1d(start, self.fixed).astype(np.int64)
        while True:
            moves = self._moves(chosen)
            out, new = np.unravel_index(np.argmin(moves), moves.shape)
            over = len(chosen) > max(self.most, len(self.fixed))
            if moves[out, new] > -self.tiny / 2 and not over:
                return chosen
            kept = np.delete(chosen, out) if out < len(chosen) else chosen
            chosen = np.union1d(kept, new) if new < len(self.forced) else kept

    def shaken(self, chosen: Ints, rng: np.random.Generator) -> Ints:
        """With a quarter of its corners, or two, replaced at random, never the forced ones."""
        free = np.setdiff1d(chosen, self.fixed)
        others = np.setdiff1d(np.arange(len(self.forced)), chosen)
        quarter = max(-(-len(free) // 4), 2)  # the swaps would just undo one
        count = min(quarter, len(free), len(others))
        kept = np.setdiff1d(chosen, rng.permutation(free)[:count])
        return np.union1d(kept, rng.permutation(others)[:count])

    def _moves(self, chosen: Ints) -> Floats:
        """The change of the total by each move that is allowed: a row per corner to drop, the last
        for none; a column per corner to add, the last for none.
        """
        moves = self._changes(chosen)
        if len(chosen) >= self.most:
            moves[-1, :-1] = np.inf
        if len(chosen) > self.most:
            moves[:, :-1], moves[-1] = np.inf, np.inf
        moves[:, chosen] = np.inf
        moves[np.flatnonzero(self.forced[chosen])] = np.inf
        moves[:-1, -1] -= self.tiny  # of equal sets the smaller
        return moves

    def _changes(self, chosen: Ints) -> Floats:
        """A point whose corner goes takes its second best or the new one; all others take the new
        one where it is cheaper.
        """
        held = self.table[np.append(chosen, [-1, -1])]
        best, second = np.partition(held, 1, axis=0)[:2]
        nearest = held.argmin(axis=0)
        order = np.argsort(nearest, kind="stable")
        serving, starts = np.unique(nearest[order], return_index=True)
        saved = np.clip(self.table[:, order], best[order], second[order]) - best[order]
        moved = np.zeros((len(chosen) + 1, len(self.nodes)))
        moved[serving] = np.add.reduceat(saved, starts, axis=1).T  # BLAS stalls on shared cores
        moved[-1] = 0.0
        moved[:-1] -= self.nodes[chosen, None]
        return np.asarray(moved + self.adding(best))


class _Dual:
    """The Lagrangian: each point pays its multiplier, and a corner earns what it can serve for
    less.
    """

    def __init__(self, board: _Board) -> None:
        self._table, self._nodes, self._forced = board.table[:-1], board.nodes[:-1], board.forced
        self._eager = board.table[-1]
        self._free = max(board.most - len(board.fixed), 0)
        self._spare = np.empty_like(self._table)
        self.least = board.table.min(axis=0)

    def at(self, multipliers: Floats) -> tuple[float, Floats]:
        """The bound and its slope."""
        paid = multipliers.sum()
        sums = np.minimum(self._table, multipliers, out=self._spare).sum(axis=1) - paid
        sums = sums + self._nodes
        taken = self._taken(sums)
        times = (self._table[taken] < multipliers).sum(axis=0)
        slope = 1.0 - times
        slope[(slope > 0) & (multipliers >= self._eager)] = 0.0
        return float(paid + sums[taken].sum()), slope

    def moved(self, multipliers: Floats, way: Floats, gap: float) -> Floats:
        """A step that would close the gap if the bound rose evenly."""
        step = gap / max(float(way @ way), _TINY)
        return np.clip(multipliers + step * way, self.least, self._eager)

    def _taken(self, sums: Floats) -> Ints:
        """The forced corners whatever they earn, and the best of the others that earn."""
        earning = np.flatnonzero((sums < 0) & ~self._forced)
        best = earning[np.argsort(sums[earning], kind="stable")[: self._free]]
        return np.concatenate([np.flatnonzero(self._forced), best])
