"""Graphs within a memory budget: against enumeration, and against dropping buckets one by one."""

import itertools
import math
from random import Random

import pytest

from graphcache import GraphCacheError, plan_buckets
from graphcache.planning import budget as budgets
from graphcache.planning.cost import CostModel


def random_case(seed):
    """Counts, costs with bytes of each bucket, and a budget for some of the graphs."""
    rng = Random(seed)
    counts = {rng.randint(1, 40): rng.randint(1, 9) for _ in range(9)}
    table = {n: 5.0 + n for n in range(1, 41)}
    eager = {n: 30.0 + 1.5 * n for n in range(1, 41)}
    nbytes = {n: rng.uniform(1, 10) if seed % 2 else 2.0 + n / 4 for n in range(1, 41)}
    cost = CostModel.from_table(table, eager=eager, nbytes=nbytes)
    return counts, cost, sum(nbytes[n] for n in counts) * rng.uniform(0.2, 0.7)


def served(counts, cost, chosen):
    """The mean cost of a call under these buckets."""

    def of(size):
        held = (cost.tables["replay"][(n,)] for n in chosen if n >= size)
        return min([cost.tables["eager"][(size,)], *held])

    return sum(n * of(size) for size, n in counts.items()) / sum(counts.values())


def taken(cost, chosen):
    """The bytes of these graphs."""
    return sum(cost.tables["nbytes"][(n,)] for n in chosen)


def greedily_dropped(counts, cost, budget):
    """A graph for each size, without the one whose loss costs least, until they fit."""
    chosen = sorted(counts)
    while taken(cost, chosen) > budget:
        drops = [[m for m in chosen if m != n] for n in chosen]
        chosen = min(drops, key=lambda kept: served(counts, cost, kept))
    return served(counts, cost, chosen)


def test_a_plan_fits_and_is_near_the_best_that_does():
    """Within 4 % of every set that fits, and no worse than dropping one by one."""
    for seed in [*range(16), 26]:
        counts, cost, budget = random_case(seed)
        plan = plan_buckets(counts, cost, memory_budget=budget, prior=None)
        sets = (s for n in range(10) for s in itertools.combinations(sorted(counts), n))
        best = min(served(counts, cost, s) for s in sets if taken(cost, s) <= budget)
        assert taken(cost, plan.buckets) <= budget
        assert best * (1 - 1e-9) <= plan.total <= best * 1.04
        assert plan.total <= greedily_dropped(counts, cost, budget) * (1 + 1e-9)
        assert plan.lower_bound <= best * (1 + 1e-9)


def test_a_budget_that_is_large_enough_changes_nothing():
    """In one dim, in two, with pieces."""
    counts, cost, _ = random_case(3)
    for options in ({}, {"split": "batch", "max_graphs": 3}):
        free = plan_buckets(counts, cost, **options)
        assert plan_buckets(counts, cost, memory_budget=1e9, **options).buckets == free.buckets


def test_a_larger_budget_is_never_worse():
    """On a line, step by step."""
    counts, cost, _ = random_case(4)
    plans = [plan_buckets(counts, cost, memory_budget=b, prior=None) for b in range(3, 90, 12)]
    totals = [plan.total for plan in plans]
    assert all(b <= a * 1.01 for a, b in itertools.pairwise(totals))
    assert totals[-1] < totals[0]


def test_plans_in_two_dims_fit():
    """Beside an included bucket; never below the bound."""
    rng = Random(1)
    counts = {(rng.randint(1, 16), rng.randint(1, 16)): 1 for _ in range(30)}
    cells = list(itertools.product((1, 4, 16), (1, 16)))
    cost = CostModel(
        {
            "replay": {cell: 5.0 + math.prod(cell) for cell in cells},
            "eager": {cell: 60.0 + math.prod(cell) for cell in cells},
            "nbytes": {cell: 10.0 + math.prod(cell) for cell in cells},
        },
        ("dim0", "dim1"),
    )
    free = plan_buckets(counts, cost, prior=None)
    whole = float(cost.of("nbytes", free.buckets).sum())
    for share in (0.9, 0.5, 0.2):
        options = {"memory_budget": share * whole, "include": [(4, 4)], "prior": None}
        for plan in (
            plan_buckets(counts, cost, **options),
            plan_buckets(counts, cost, max_graphs=4, split="dim0", **options),
        ):
            assert (4, 4) in plan.buckets
            assert float(cost.of("nbytes", plan.buckets).sum()) <= share * whole
            assert plan.lower_bound <= plan.total


def test_too_small_a_budget_leaves_calls_to_eager():
    """Where eager's cost is known a plan may have no graphs."""
    counts, cost, _ = random_case(1)
    assert plan_buckets(counts, cost, memory_budget=0.5).buckets == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory_budget": 4.0, "include": [40]}, "must be there take 12 bytes, .* is 4; raise it"),
        ({"memory_budget": 4.0, "limits": 40}, "must be there take 12 bytes, .* is 4; raise it"),
        ({"memory_budget": 4.0}, "must be there take [0-9.]+ bytes, .* is 4; raise it"),
    ],
)
def test_too_small_a_budget_is_refused_where_graphs_must_be(options, text):
    """Included, of the limits, or of calls that cannot run eagerly, as far as is known."""
    cost = CostModel.from_table({1: 5.0, 40: 50.0}, nbytes={1: 2.25, 40: 12.0})
    with pytest.raises(GraphCacheError, match=text):
        plan_buckets({3: 5, 30: 2}, cost, **options)


def test_bytes_must_be_known():
    """Without a table there is no budget to keep to."""
    for cost in (None, {1: 5.0}):
        with pytest.raises(GraphCacheError, match="pass a `cost` with a table 'nbytes'"):
            plan_buckets({3: 5}, cost, memory_budget=100)


def test_a_planted_bug_is_found(monkeypatch):
    """Without swaps at the edge plans on the hull are further from the best."""
    monkeypatch.setattr(budgets, "_at_the_edge", lambda demand, chosen, *rest: chosen)
    with pytest.raises(AssertionError):
        test_a_plan_fits_and_is_near_the_best_that_does()
