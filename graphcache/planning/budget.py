"""Graphs within a memory budget: a price per byte, found by bisection, then swaps at the edge.

With a price the planners find only sets on the hull of cost against bytes; between two of those a
swap or one graph more may still fit (the budgeted problem is a knapsack).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from graphcache.errors import GraphCacheError
from graphcache.planning.demand import Demand, Floats, Ints
from graphcache.planning.problem import Problem

_STEPS = 12
_TRIED = 64  # corners that a swap at the edge considers

Total = Callable[[Ints], float]


def within_budget(
    problem: Problem,
    demand: Demand,
    best: Callable[[Demand], Ints],
    unbounded: Ints,
    most: int,
    total: Total | None = None,
) -> Ints:
    """The best set found that keeps to the problem's memory budget, as indices.

    Args:
        problem: where the budget and the bytes are.
        demand: what to plan for.
        best: plans a demand of other node prices.
        unbounded: the best set without a budget.
        most: the largest number of corners.
        total: the cost of a set; None: `demand.total`.

    Raises:
        GraphCacheError: a budget without known bytes, or too small for what must be included, or
            for all calls where eager's cost is not known.
    """
    budget = problem.options.memory_budget
    if budget is None:
        return unbounded
    if problem.cost is None or not problem.cost.knows("nbytes"):
        raise GraphCacheError(
            "`memory_budget` needs the graphs' bytes; pass a `cost` with a table 'nbytes'."
        )
    nbytes = problem.cost.of("nbytes", demand.corners)
    if float(nbytes[demand.forced].sum()) > budget:
        raise GraphCacheError(
            f"the buckets that must be there take {nbytes[demand.forced].sum():,.0f} bytes, "
            f"`memory_budget` is {budget:,.0f}; raise it."
        )
    if float(nbytes[unbounded].sum()) <= budget:
        return unbounded
    chosen = _priced(demand, best, nbytes, budget)
    chosen = _at_the_edge(demand, chosen, nbytes, budget, most, total or demand.total)
    held = demand.holds()
    lost = held[:, unbounded].any(axis=1) & ~held[:, chosen].any(axis=1)
    if not problem.eager_known and lost.any():
        raise GraphCacheError(
            f"`memory_budget` of {budget:,.0f} bytes has no room for graphs that hold every call; "
            "raise it, or pass the costs of eager calls."
        )
    return chosen


def _priced(demand: Demand, best: Callable[[Demand], Ints], nbytes: Floats, budget: float) -> Ints:
    """At the lowest price per byte at which the set fits; the forced alone if there is none."""
    low, high = 0.0, float(demand.serving(np.flatnonzero(demand.forced))) / max(nbytes.min(), 1.0)
    fitting = np.flatnonzero(demand.forced)
    for _ in range(_STEPS):
        price = (low + high) / 2
        chosen = best(replace(demand, nodes=demand.nodes + price * nbytes))
        if float(nbytes[chosen].sum()) <= budget:
            fitting, high = chosen, price
        else:
            low = price
    return fitting


def _at_the_edge(
    demand: Demand, chosen: Ints, nbytes: Floats, budget: float, most: int, total: Total
) -> Ints:
    """Additions and swaps that fit, while they pay."""
    tried = np.unique(np.linspace(0, len(nbytes) - 1, _TRIED).round().astype(int))
    cost = total(chosen)
    while True:
        moves = [chosen, *(np.setdiff1d(chosen, i) for i in chosen if not demand.forced[i])]
        sets = [
            np.union1d(kept, new)
            for kept in moves
            for new in tried
            if len(kept) < most and nbytes[kept].sum() + nbytes[new] <= budget
        ]
        found = min(sets, key=total, default=chosen)
        if total(found) >= cost * (1 - 1e-12):
            return chosen
        chosen, cost = found, total(found)
