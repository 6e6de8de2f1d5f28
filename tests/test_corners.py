"""Free-form bucket sets in several dims: against enumeration, bounds and real traces."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from graphcache import TrafficProfile
from graphcache.planning import corners
from graphcache.planning.demand import Demand

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.exists(), reason="no traces beside the checkout")


def area(boxes):
    return np.prod(boxes.astype(float), axis=1)


def random_demand(seed, dims=2):
    """Few points, their tight corners, a floor under the cost, eager, prices, forced ones."""
    rng = np.random.default_rng(seed)
    points = np.unique(rng.integers(1, 9, (7, dims)), axis=0)
    boxes = corners.tight_corners(points)
    weights, costs = rng.random(len(points)), np.maximum(6.0, area(boxes))
    return Demand(
        points,
        weights / weights.sum(),
        rng.uniform(5, 60, len(points)),
        boxes,
        costs,
        rng.choice([0.0, 0.5]) * rng.random(len(boxes)),
        rng.random(len(boxes)) < 0.05,
    )


def planned(demand, most):
    """What the planner does: greedy and merged starts, then the search."""
    merged = corners.agglomerative(demand.points, demand.weights, area, most)[-1]
    index = {tuple(box): i for i, box in enumerate(demand.corners.tolist())}
    start = np.array([index[tuple(box)] for box in merged.tolist() if tuple(box) in index])
    starts = [corners.greedy(demand, most)[-1], start.astype(np.int64)]
    return corners.search(demand, most, starts, 0)


def enumerated(demand, most):
    forced = set(np.flatnonzero(demand.forced).tolist())
    sets = (
        s
        for t in range(most + 1)
        for s in itertools.combinations(range(len(demand.corners)), t)
        if forced <= set(s)
    )
    return min(demand.total(np.array(s, dtype=np.int64)) for s in sets)


@pytest.mark.parametrize("seed", range(40))
def test_search_is_within_a_percent_of_enumeration_and_the_bound_below(seed):
    """With eager, prices and forced corners."""
    demand = random_demand(seed)
    most = max(2, int(demand.forced.sum()))
    if most > 3:
        return
    found, best = planned(demand, most), enumerated(demand, most)
    assert len(found) <= most
    assert set(np.flatnonzero(demand.forced)) <= set(found)
    assert best * (1 - 1e-9) <= demand.total(found) <= best * 1.01
    assert demand.total(found) <= demand.total(corners.greedy(demand, most)[-1]) * (1 + 1e-9)
    assert corners.lower_bound(demand, most, demand.total(found)) <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_three_dims_are_searched_and_bounded(seed):
    """The same search and bound; the candidates hold every point, the top one all."""
    demand = random_demand(seed, dims=3)
    assert demand.holds().any(axis=1).all()
    assert demand.holds()[:, -1].all()
    total = demand.total(planned(demand, 3))
    assert corners.lower_bound(demand, 3, total) <= total * (1 + 1e-9)
    assert total <= demand.total(np.flatnonzero(demand.forced)) + 1e-9


def test_tight_corners_touch_a_point_at_each_face():
    """Two points span three boxes, of which one is none's."""
    points = np.array([[1, 4], [3, 2]])
    assert corners.tight_corners(points).tolist() == [[1, 4], [3, 2], [3, 4]]
    assert corners.tight_corners(np.array([[2], [5], [2]])).tolist() == [[2], [5]]


def test_the_same_seed_finds_the_same_set():
    """Twice over."""
    demand = random_demand(3)
    assert planned(demand, 3).tolist() == planned(demand, 3).tolist()


def by_padding(trace, dims, align):
    """A trace whose cost is its padded area, every point by a corner, and the mean real area."""
    counts = TrafficProfile.from_csv(TRACES / f"{trace}.csv", dims=dims).counts
    sizes = np.array(sorted(counts))
    weights = np.array([float(counts[tuple(s)]) for s in sizes.tolist()])
    weights /= weights.sum()
    points, which = np.unique(-(-sizes // align) * align, axis=0, return_inverse=True)
    boxes = corners.tight_corners(points)
    costs, zeros = area(boxes), np.zeros(len(boxes))
    shares = np.bincount(which.ravel(), weights)
    never = np.full(len(points), 100 * costs.max())
    demand = Demand(points, shares, never, boxes, costs, zeros, zeros > 0)
    return demand, float(weights @ area(sizes))


CW = ("derived/azure_conv_window1s", ("batch", "seq"), (1, 256))
DW = ("derived/azure_code_window1s", ("batch", "seq"), (1, 256))
TACO = ("taco_images", ("height", "width"), (128, 128))
SERVICE = ("derived/embedding_service", ("batch", "seq"), (1, 8))


@needs_traces
@pytest.mark.parametrize(
    ("trace", "most", "padding", "exact"),
    [
        (CW, 8, 61.8, 61.1),
        (CW, 16, 33.5, 33.0),
        (DW, 16, 22.9, None),
        (TACO, 8, 16.3, 16.2),
        (TACO, 16, 7.2, 7.0),
        (SERVICE, 16, 51.5, None),
    ],
)
def test_real_traces_are_padded_nearly_as_little_as_can_be(trace, most, padding, exact):
    """In hindsight: at most these percents, and within 1 % of the exact optimum where known."""
    demand, real = by_padding(*trace)
    found = 100 * (demand.serving(planned(demand, most)) / real - 1)
    assert found <= padding
    assert exact is None or (100 + found) <= 1.01 * (100 + exact + 0.05)


@needs_traces
@pytest.mark.parametrize("most", [4, 8, 16, 32])
@pytest.mark.parametrize("trace", [CW, DW, TACO], ids=["conv", "code", "taco"])
def test_the_stated_gap_is_small(trace, most):
    """At most 1.5 % above the bound."""
    demand, _ = by_padding(*trace)
    total = demand.serving(planned(demand, most))
    assert corners.lower_bound(demand, most, total) >= total / 1.015


@needs_traces
def test_a_grid_pads_more_than_as_many_free_corners():
    """And is itself no worse than what one axis at a time from quantiles was measured to be."""
    demand, real = by_padding(*CW)
    levels = [np.unique(demand.points[:, axis]) for axis in range(2)]
    axes = corners.grid(demand.points, demand.weights, demand.eager, area, levels, 16)
    assert np.prod([len(axis) for axis in axes]) <= 16
    cells = np.array(list(itertools.product(*(axis.tolist() for axis in axes))))
    held = (demand.points[:, None, :] <= cells[None]).all(axis=2)
    served = float(demand.weights @ np.where(held, area(cells), np.inf).min(axis=1))
    assert 100 * (served / real - 1) <= 52.5
    assert demand.serving(planned(demand, 16)) <= served
