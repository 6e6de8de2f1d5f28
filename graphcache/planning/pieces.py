"""Planning when a call may be served in pieces along one dim.

With n rows still to serve, the next piece is a chosen corner: the last if it has n rows or more
(it is padded), else followed, for an overhead, by the pieces for the rows that are left. The cost
of the cheapest pieces is a table over n. Choosing the corners is choosing coins: the table of a
set is neither submodular nor Monge in it, so sets are found by search, each move scored exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from graphcache.planning.demand import Bools, Floats, Ints

IN_FLIGHT = 64 * 2**20  # bytes of tables that one batched pass may hold
SHAKES, FEW_SHAKES = 8, 2
SAME = 1e-12  # relative: totals this close differ by rounding


@dataclass(frozen=True, slots=True, eq=False)
class SplitDemand:
    """Points with weights and candidate corners, where calls may be split along one dim.

    Args:
        rows: (n,) the points' sizes of the split dim in units, at least 1.
        rest: (n,) the index of each point's combination of the other dims, of R.
        weights: (n,) each point's share of the calls.
        eager: (n,) the cost of a call of each point without a graph, finite.
        corner_rows: (m,) the candidates' sizes of the split dim in units, at least 1.
        corner_holds: (m, R) is the candidate large enough for the combination of other dims?
        costs: (m,) the cost of one replay.
        nodes: (m,) the price of having the corner, per call; may be 0.
        forced: (m,) corners that every plan must have.
        overhead: the cost of each piece after the first.
    """

    rows: Ints
    rest: Ints
    weights: Floats
    eager: Floats
    corner_rows: Ints
    corner_holds: Bools
    costs: Floats
    nodes: Floats
    forced: Bools
    overhead: float

    def covers(self, chosen: Ints) -> Floats:
        """(R, N + 1): the cost of the cheapest pieces for each count of rows; inf if none."""
        if not len(chosen):
            nothing = np.full((self.corner_holds.shape[1], self.units() + 1), np.inf)
            nothing[:, 0] = 0.0
            return nothing
        return _tables(self, chosen[:-1], chosen[-1:])[:, 0].T

    def serving(self, chosen: Ints) -> float:
        """The mean cost of a call under these corners (their indices), without their prices."""
        pieces = self.covers(chosen)[self.rest, self.rows]
        return float(self.weights @ np.minimum(pieces, self.eager))

    def total(self, chosen: Ints) -> float:
        """`serving` and the prices of the corners: what a plan minimises."""
        return self.serving(chosen) + float(self.nodes[chosen].sum())

    def units(self) -> int:
        """The most rows of a point, in units."""
        return int(self.rows.max(initial=0))

    def prices(self) -> Floats:
        """(m, R): the cost of one replay, inf where the corner does not hold the combination."""
        return np.where(self.corner_holds, self.costs[:, None], np.inf)


def row_units(rows: Ints, align: int, most_units: int = 256) -> int:
    """The smallest multiple of `align` of which the largest needs at most `most_units`."""
    return align * max(1, -(-int(rows.max(initial=0)) // (align * most_units)))


def search(demand: SplitDemand, most: int, starts: Iterable[Ints], seed: int = 0) -> Ints:
    """The indices of the best set found of at most `most` corners with all the forced, sorted.

    A greedy set and each start are improved by swaps, additions and drops; then the best is
    shaken and improved again a few times. The same arguments give the same set.
    """
    climb = _Climb(demand, most)
    plans = [climb.grown(climb.scored(demand.forced.nonzero()[0]), most)]
    plans += [climb.scored(climb.admitted(start)) for start in starts]
    best = min((climb.improved(plan) for plan in plans), key=_by_total)
    rng = np.random.default_rng(seed)
    for _ in range(max(FEW_SHAKES, SHAKES * 8 // max(most, 8))):  # a climb of many takes long
        shaken = climb.improved(climb.scored(climb.shaken(best, rng)))
        best = min(best, shaken, key=_by_total)
    return np.sort(best.chosen)


def curve(demand: SplitDemand, most: int) -> list[float]:
    """The serving cost of the best set found of at most 1, 2, .. `most` corners.

    Each grows out of the one before and is improved by swaps; prices are left out. The forced
    are in every set.
    """
    free = replace(demand, nodes=np.zeros_like(demand.nodes))
    plan = _Climb(free, most).scored(free.forced.nonzero()[0])
    served = []
    for count in range(1, most + 1):
        climb = _Climb(free, count)
        plan = climb.improved(climb.grown(plan, count))
        served.append(plan.total)
    return served


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    total: float
    chosen: Ints


def _by_total(plan: _Plan) -> tuple[float, int]:
    return plan.total, len(plan.chosen)


@dataclass(frozen=True, slots=True, eq=False)
class _Climb:
    """Moves from a set of at most `most` corners to a cheaper one."""

    demand: SplitDemand
    most: int

    def scored(self, chosen: Ints) -> _Plan:
        return _Plan(self.demand.total(chosen), chosen)

    def admitted(self, start: Ints) -> Ints:
        """The forced corners, and as many of the start's as there is room for."""
        forced = self.demand.forced.nonzero()[0]
        free = np.setdiff1d(start, forced)
        return np.concatenate([forced, free[: max(0, self.most - len(forced))]])

    def grown(self, plan: _Plan, most: int) -> _Plan:
        """Greedily, while the total falls and there is room."""
        while len(plan.chosen) < most:
            larger = self.best_with(plan.chosen)
            if not self.cheaper(larger, plan):
                break
            plan = larger
        return plan

    def improved(self, plan: _Plan) -> _Plan:
        """Until no swap, addition or drop of one corner is cheaper."""
        while True:
            before = plan
            for corner in before.chosen[~self.demand.forced[before.chosen]]:
                plan = self.exchanged(plan, corner)
            plan = self.grown(plan, self.most)
            if not self.cheaper(plan, before) and len(plan.chosen) >= len(before.chosen):
                return plan

    def exchanged(self, plan: _Plan, corner: int) -> _Plan:
        """With another corner, or none, in the place of this one; none if that is as good."""
        moved = self.best_with(plan.chosen[plan.chosen != corner])
        fewer = len(moved.chosen) < len(plan.chosen)
        if self.cheaper(moved, plan) or (fewer and not self.cheaper(plan, moved)):
            return moved
        return plan

    def best_with(self, fixed: Ints) -> _Plan:
        """The best set of these and at most one more corner; these alone if that is as good."""
        totals = _totals(self.demand, fixed)
        added = _Plan(float(totals.min()), np.append(fixed, totals.argmin()))
        if not len(fixed):
            return added
        alone = _Plan(float(totals[fixed[0]]), fixed)
        return added if self.cheaper(added, alone) else alone

    def shaken(self, plan: _Plan, rng: np.random.Generator) -> Ints:
        """About half of the free corners, and random ones in all the room that is left."""
        free = plan.chosen[~self.demand.forced[plan.chosen]]
        kept = rng.permutation(free)[: len(free) // 2]
        room = self.most - (len(plan.chosen) - len(free)) - len(kept)
        others = np.setdiff1d(np.arange(len(self.demand.costs)), plan.chosen)
        return self.admitted(np.concatenate([kept, rng.permutation(others)[: max(0, room)]]))

    def cheaper(self, plan: _Plan, other: _Plan) -> bool:
        return plan.total < other.total - SAME * abs(other.total)


def _totals(demand: SplitDemand, fixed: Ints) -> Floats:
    """(m,): the total of the fixed corners with each candidate; the fixed alone if it is one."""
    candidates = np.arange(len(demand.costs))
    per_candidate = 8 * (demand.corner_holds.shape[1] * (demand.units() + 1) + len(demand.rows))
    parts = np.split(candidates, candidates[:: max(1, IN_FLIGHT // per_candidate)][1:])
    served = np.concatenate([_served(demand, fixed, trial) for trial in parts])
    nodes = np.where(np.isin(candidates, fixed), 0.0, demand.nodes)
    return np.asarray(served + nodes + demand.nodes[fixed].sum())


def _served(demand: SplitDemand, fixed: Ints, trial: Ints) -> Floats:
    pieces = _tables(demand, fixed, trial)[demand.rows, :, demand.rest]
    np.minimum(pieces, demand.eager[:, None], out=pieces)
    return np.asarray(demand.weights @ pieces)


def _tables(demand: SplitDemand, fixed: Ints, trial: Ints) -> Floats:
    """(N + 1, t, R): the tables of the fixed corners with each of the trial ones."""
    prices, counts = demand.prices(), np.arange(demand.units() + 1)[:, None]
    steps, step_prices = _merged(demand.corner_rows[fixed], prices[fixed])
    left = np.maximum(counts - steps, 0)
    trial_left = np.maximum(counts - demand.corner_rows[trial], 0)
    more, trial_more = demand.overhead * (left > 0), demand.overhead * (trial_left > 0)
    lanes = np.arange(len(trial))
    table = np.zeros((len(counts), len(trial), prices.shape[1]))
    for n in range(1, len(table)):
        table[n] = table[trial_left[n], lanes]
        table[n] += prices[trial] + trial_more[n, :, None]
        if len(steps):
            then = table[left[n]]
            then += (step_prices + more[n, :, None])[:, None]
            np.minimum(table[n], then.min(axis=0), out=table[n])
    return table


def _merged(rows: Ints, prices: Floats) -> tuple[Ints, Floats]:
    """Distinct sizes, and the least price of a corner of each size for each combination."""
    steps, which = np.unique(rows, return_inverse=True)
    least = np.full((len(steps), prices.shape[1]), np.inf)
    np.minimum.at(least, which, prices)
    return steps, least
