"""Grids: against enumeration, and beside free-form corners."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_corners import FILES, area, planned, random_demand, sizes, traced, traffic

from graphcache.planning import corners, grids
from graphcache.planning.demand import Demand


def cells(levels):
    """The corners of a grid."""
    return np.stack(np.meshgrid(*levels, indexing="ij"), axis=-1).reshape(-1, len(levels))


def grid_cost(points, weights, eager, levels):
    """The mean cost of a call where each point takes the smallest cell that holds it."""
    costs, cost = area(cells(levels)), 0.0
    for point, weight, eagerly in zip(points, weights, eager, strict=True):
        held = (point <= cells(levels)).all(axis=1)
        cost += weight * min([eagerly, *costs[held]])
    return cost


@pytest.mark.parametrize("top", [True, False])
@pytest.mark.parametrize("most", [2, 3])
def test_grid_equals_enumeration_where_one_axis_is_split(most, top):
    """With two or three cells only one axis has more than one level, and its levels are exact."""
    for seed in range(40):
        demand = random_demand(seed)
        points, weights = demand.points, demand.weights
        eager = demand.eager if top else np.full(len(points), 1e3)
        levels = [np.unique(points[:, axis]) for axis in range(2)]
        found = grids.grid(points, weights, eager, area, levels, most, top)
        others = [
            [np.append(chosen, axis[-1]) for n in range(most) for chosen in choose(axis[:-1], n)]
            for axis in levels
        ]
        pairs = [pair for pair in itertools.product(*others) if len(cells(pair)) <= most]
        best = min(grid_cost(points, weights, eager, pair) for pair in pairs)
        assert grid_cost(points, weights, eager, found) == pytest.approx(best)


def choose(levels, count):
    """Every choice of so many levels."""
    return (np.array(some, dtype=np.int64) for some in itertools.combinations(levels, count))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(2, 3).flatmap(sizes), st.integers(1, 9), st.booleans())
def test_free_form_from_a_grid_costs_at_most_the_grid(points, most, top):
    """The search that starts at the grid's cells never ends above it; the grid keeps its limit."""
    weights, eager = np.full(len(points), 1 / len(points)), 3 * area(points) + 5
    levels = [np.unique(column) for column in points.T]
    found = grids.grid(points, weights, eager, area, levels, most, top)
    boxes = cells(found)
    costs = area(boxes)
    nothing = np.zeros(len(boxes))
    demand = Demand(points, weights, eager, boxes, costs, nothing, nothing > 0)
    chosen = corners.search(demand, most, [np.arange(len(boxes))], 0, 2)
    assert 1 <= len(boxes) <= most
    assert not top or (boxes[-1] == points.max(axis=0)).all()
    assert demand.total(chosen) <= grid_cost(points, weights, eager, found) + 1e-9


@traced
@pytest.mark.parametrize("name", FILES)
def test_a_grid_pads_more_than_free_form_corners(name):
    """Sixteen of each, on the traces."""
    demand, _ = traffic(name)
    levels = [np.unique(column) for column in demand.points.T]
    found = grids.grid(demand.points, demand.weights, demand.eager, area, levels, 16)
    cost = grid_cost(demand.points, demand.weights, demand.eager, found)
    assert demand.total(planned(demand, 16)) <= cost


def test_a_planted_bug_is_found(monkeypatch):
    """Calls above the last level that cost nothing: enumeration says so."""
    below = grids._Lattice._below

    def free(self, axis, chosen):
        served, tail = below(self, axis, chosen)
        return served, np.zeros_like(tail)

    monkeypatch.setattr(grids._Lattice, "_below", free)
    with pytest.raises(AssertionError):
        test_grid_equals_enumeration_where_one_axis_is_split(2, False)
