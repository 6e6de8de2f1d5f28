"""Which planner solves what: lines, boxes, grids, pieces."""

import itertools
import math
from random import Random

import numpy as np
import pytest

from graphcache import GraphCacheError, plan_buckets
from graphcache.planning import solve
from graphcache.planning.cost import CostModel

SIDES = [1, 3, 6, 10]


def plane_case(seed):
    """Counts over two dims and costs of replays, eager calls and captures."""
    rng = Random(seed)
    cells = list(itertools.product(SIDES, SIDES))
    counts = {(rng.randint(1, 10), rng.randint(1, 10)): rng.randint(1, 9) for _ in range(8)}
    tables = {
        "replay": {cell: 8.0 + math.prod(cell) for cell in cells},
        "eager": {cell: 25.0 + 1.4 * math.prod(cell) for cell in cells},
        "capture": {cell: rng.uniform(5, 60) for cell in cells},
    }
    return counts, CostModel(tables, ("dim0", "dim1"), piece=2.0)


def total_of(plan):
    """What a call costs by the plan's own ways, and the captures."""
    calls = plan.traffic.total
    served = sum(n * plan.way(sizes).cost for sizes, n in plan.traffic.counts.items()) / calls
    eager = sum(
        n * plan.costs.eager_of(sizes)
        for sizes, n in plan.traffic.counts.items()
        if plan.way(sizes).cost == math.inf
    )
    assert eager == 0 or served == math.inf
    if served == math.inf:
        held = sum(
            n * way.cost
            for sizes, n in plan.traffic.counts.items()
            if (way := plan.way(sizes)).cost < math.inf
        )
        served = (held + eager) / calls
    nodes = plan.costs.of("capture", plan.corners).sum() if plan.corners else 0.0
    return served + float(nodes) / plan.options.horizon


@pytest.mark.parametrize("options", [{}, {"grid": True}, {"include": [(5, 5)]}], ids=str)
def test_a_total_is_what_the_calls_and_captures_cost(options):
    """Free-form, as a grid, and with a bucket that must be there."""
    for seed in range(15):
        counts, cost = plane_case(seed)
        plan = plan_buckets(counts, cost, max_graphs=4, horizon=20, prior=None, **options)
        assert plan.total == pytest.approx(total_of(plan), rel=1e-9)
        assert plan.lower_bound <= plan.total
        assert list(plan.curve) == sorted(plan.curve, reverse=True)


def test_a_grid_is_a_product_of_levels():
    """Of at most so many cells, and never cheaper than the free-form bound."""
    for seed in range(15):
        counts, cost = plane_case(seed)
        for most in (1, 4, 6):
            plan = plan_buckets(counts, cost, max_graphs=most, grid=True, prior=None)
            levels = [sorted(set(axis)) for axis in zip(*plan.buckets, strict=True)]
            assert sorted(plan.buckets) == sorted(itertools.product(*levels))
            assert len(plan.buckets) <= most
            free = plan_buckets(counts, cost, max_graphs=most, prior=None)
            assert free.lower_bound <= plan.total * (1 + 1e-9)
            assert free.total <= plan.total * 1.01


def test_a_grid_holds_every_call_where_eager_is_not_known():
    """Its top is the limits."""
    counts, _ = plane_case(1)
    plan = plan_buckets(counts, max_graphs=4, grid=True, limits=12, prior=None)
    assert (12, 12) in plan.buckets
    assert all(plan.lookup(sizes) for sizes in counts)


def batches(seed):
    """Counts of rows and costs that rise beyond a knee, in one dim."""
    rng = Random(seed)
    counts = {rng.randint(1, 20): rng.randint(1, 9) for _ in range(7)}
    table = {n: max(8.0, 2.0 * n) + rng.random() for n in range(1, 21)}
    eager = {1: rng.uniform(12, 30), 20: rng.uniform(40, 90)}
    capture = {1: rng.uniform(0, 30)}
    return counts, CostModel.from_table(table, piece=0.5, eager=eager, capture=capture)


def test_pieces_are_within_half_a_percent_of_enumeration():
    """Over every set of so many sizes, with captures; the total is what the calls cost."""
    for seed in range(12):
        counts, cost = batches(seed)
        options = {"horizon": 20, "prior": None, "split": "batch"}
        plan = plan_buckets(counts, cost, max_graphs=2, **options)
        top = max(counts)
        sets = [s for n in (1, 2) for s in itertools.combinations(range(1, top + 1), n)]
        best = min(cut_cost(counts, cost, chosen) for chosen in [(), *sets])
        assert best * (1 - 1e-9) <= plan.total <= best * 1.005
        assert plan.total == pytest.approx(cut_cost(counts, cost, plan.buckets))
        assert plan.lower_bound <= best


def cut_cost(counts, cost, chosen):
    """The mean cost of a call in pieces of these sizes or eager, with captures over 20 calls."""
    prices = {n: cost.replay_of((n,)) for n in chosen}
    best = [-cost.piece]
    for rows in range(1, max(counts) + 1):
        options = (best[max(0, rows - n)] + cost.piece + prices[n] for n in chosen)
        best.append(min(options, default=math.inf))
    served = sum(n * min(best[rows], cost.eager_of((rows,))) for rows, n in counts.items())
    captures = sum(float(cost.of("capture", [(n,)])[0]) for n in chosen)
    return served / sum(counts.values()) + captures / 20


def test_where_no_capture_pays_there_are_no_graphs():
    """With pieces, without, in two dims."""
    counts, cost = batches(0)
    both, wide = plane_case(0)
    for plan in (
        plan_buckets(counts, cost, horizon=1e-6),
        plan_buckets(counts, cost, horizon=1e-6, split="batch"),
        plan_buckets(both, wide, horizon=1e-6),
        plan_buckets(both, wide, horizon=1e-6, split="dim0"),
    ):
        assert plan.buckets == []
        assert plan.gap <= 1e-3 or plan.options.split


@pytest.mark.parametrize("split", ["dim0", "dim1"])
def test_pieces_in_two_dims_keep_to_what_is_asked(split):
    """Included buckets are there, limits hold, and no call costs more than without pieces."""
    for seed in range(5):
        counts, cost = plane_case(seed)
        options = {"max_graphs": 4, "include": [(3, 7)], "limits": 9, "align": 4}
        plan = plan_buckets(counts, cost, split=split, **options)
        assert (3, 7) in plan.buckets
        assert len(plan.buckets) <= 4
        assert all(max(bucket) <= 9 for bucket in plan.buckets)
        assert all(plan.way(sizes).cost <= plan.bucket_set.way(sizes).cost for sizes in counts)


def test_pieces_in_one_dim_keep_to_what_is_asked():
    """Where rows are counted in units of several, too."""
    counts = dict.fromkeys(range(1, 700, 3), 1)
    cost = CostModel.from_table({1: 10.0, 700: 1500.0}, eager={1: 200.0, 700: 4000.0})
    options = {"max_graphs": 4, "include": [13], "limits": 645, "split": "batch"}
    plan = plan_buckets(counts, cost, **options)
    assert 13 in plan.buckets
    assert max(plan.buckets) <= 645


def test_a_planted_bug_is_found(monkeypatch):
    """Pieces planned at no overhead: enumeration says so."""
    split = solve.SplitDemand
    monkeypatch.setattr(solve, "SplitDemand", lambda **fields: split(**{**fields, "overhead": 0.0}))
    with pytest.raises(AssertionError):
        test_pieces_are_within_half_a_percent_of_enumeration()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"split": "dim0", "grid": True}, "`grid` goes with neither `split`"),
        ({"memory_budget": 1e6, "grid": True}, "nor `memory_budget`; leave it out"),
        ({"include": [(1, 1), (2, 2)], "max_graphs": 1}, "`include` has 2 buckets"),
        ({"memory_budget": 1e6}, "`memory_budget` needs the graphs' bytes"),
    ],
)
def test_what_does_not_go_together_is_refused(options, text):
    """With costs of replays and eager calls."""
    counts, cost = plane_case(0)
    with pytest.raises(GraphCacheError, match=text):
        plan_buckets(counts, cost, **options)


def test_the_curve_falls_to_what_a_graph_of_every_size_costs():
    """On a line, by padding."""
    counts = {3: 4, 5: 1, 9: 2}
    plan = plan_buckets(counts, max_graphs=5, prior=None)
    assert plan.curve == pytest.approx([9, (12 + 9 + 18) / 7, 5, 5, 5])
    assert np.argmin(plan.curve) == 2
