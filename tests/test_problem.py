"""Problems: priors, alignment, limits, prices and candidates."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcache import GraphCacheError, TrafficProfile, plan_buckets
from graphcache.planning import problem as problems
from graphcache.planning.cost import CostModel
from graphcache.planning.problem import Options, Problem

COST = CostModel(
    {
        "replay": {(1,): 10.0, (64,): 73.0},
        "eager": {(1,): 30.0, (64,): 156.0},
        "capture": {(1,): 1000.0},
    }
)


def made(counts, cost=None, **changes):
    """A problem of these counts; without a prior unless asked."""
    dims = ("a", "b", "c")[: len(next(iter(counts)))]
    options = {
        "max_graphs": 8, "memory_budget": None, "horizon": 100, "align": (1,) * len(dims),
        "include": (), "limits": (None,) * len(dims), "prior": False, "split": None,
        "grid": False, "seed": 0, **changes,
    }  # fmt: skip
    profile = TrafficProfile(dims)
    for sizes, count in counts.items():
        profile.record(sizes, count)
    if cost is not None:
        cost = CostModel(cost.tables, dims)
    return Problem.of(profile, cost, Options(**options))


def listed(array):
    """Rows as tuples."""
    return [tuple(row) for row in array.tolist()]


line = st.dictionaries(st.tuples(st.integers(1, 90)), st.integers(1, 9), min_size=1, max_size=12)
plane = st.dictionaries(
    st.tuples(st.integers(1, 30), st.integers(1, 30)), st.integers(1, 9), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(counts=line, align=st.sampled_from([1, 4, 8]), limit=st.sampled_from([None, 7, 40, 95]))
def test_on_a_line_sizes_stay_and_buckets_are_aligned(counts, align, limit):
    """Candidates: sizes within the limit, rounded up but not beyond it, and the limit itself."""
    demand = made(counts, align=(align,), limits=(limit,)).demand()
    assert listed(demand.points) == sorted(counts)
    assert demand.weights.sum() == pytest.approx(1)
    within = [n for (n,) in counts if limit is None or n <= limit]
    rounded = {min(-(-n // align) * align, limit or 10**9) for n in within}
    assert set(demand.corners[:, 0].tolist()) == rounded | ({limit} if limit else set())
    assert np.all(np.diff(demand.corners[:, 0]) > 0)
    assert demand.corners[demand.forced].tolist() == [[limit or demand.corners.max()]]


@settings(max_examples=60)
@given(counts=plane, align=st.tuples(st.sampled_from([1, 4]), st.sampled_from([1, 8])))
def test_in_two_dims_sizes_are_rounded_and_merged(counts, align):
    """The weight of each point is that of its calls; the corners are by volume."""
    demand = made(counts, align=align).demand()
    expected = {}
    for (a, b), count in counts.items():
        key = (-(-a // align[0]) * align[0], -(-b // align[1]) * align[1])
        expected[key] = expected.get(key, 0) + count / sum(counts.values())
    weights = dict(zip(listed(demand.points), demand.weights.tolist(), strict=True))
    assert weights == pytest.approx(expected)
    volumes = np.prod(demand.corners, axis=1)
    assert np.all(np.diff(volumes) >= 0)
    assert demand.holds().any(axis=1).all()


@settings(max_examples=40)
@given(counts=st.one_of(line, plane), more=st.integers(0, 50))
def test_a_prior_takes_its_share_and_covers_what_may_come(counts, more):
    """32 calls' worth on a line and 64 in two dims, up to the limits; what was seen keeps its
    proportions.
    """
    dims = len(next(iter(counts)))
    limits = tuple(max(sizes[i] for sizes in counts) + more for i in range(dims))
    plain = made(counts, limits=limits).demand()
    mixed = made(counts, limits=limits, prior=True).demand()
    assert mixed.weights.sum() == pytest.approx(1)
    calls, strength = sum(counts.values()), 32 if dims == 1 else 64
    before = dict(zip(listed(plain.points), plain.weights, strict=True))
    after = dict(zip(listed(mixed.points), mixed.weights, strict=True))
    assert limits in after
    assert all(point in after for point in before)
    kept = calls / (calls + strength)
    assert all(after[point] >= kept * weight * (1 - 1e-9) for point, weight in before.items())
    assert all(
        low <= n <= high
        for point in after
        for n, low, high in zip(point, plain.points.min(axis=0), limits, strict=True)
    )


def test_a_prior_weighs_less_the_more_calls_were_seen():
    """Its share falls to nothing."""
    shares = []
    for count in (1, 100, 100_000):
        demand = made({(5,): count}, limits=(50,), prior=True).demand()
        shares.append(float(demand.weights[demand.points[:, 0] != 5].sum()))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9
    assert shares[-1] < 0.001


def test_costs_are_the_measured_ones_or_elements():
    """Of replays, of eager calls, of captures over the horizon; those that exist are free."""
    problem = made({(8,): 1, (64,): 3}, COST, captured=((64,),))
    demand = problem.demand()
    assert demand.costs.tolist() == COST.replay([(8,), (64,)]).tolist()
    assert demand.eager.tolist() == COST.eager([(8,), (64,)]).tolist()
    assert demand.nodes.tolist() == [10.0, 0.0]
    assert problem.eager_known
    plain = made({(8, 2): 1, (4, 3): 3})
    assert not plain.eager_known
    assert plain.price(np.array([[8, 2], [8, 3]])).tolist() == [16.0, 24.0]
    assert plain.demand().nodes.tolist() == [0.0] * 3


def test_without_eager_what_is_left_out_costs_more_than_any_bucket():
    """So that every call within the limits is held; above them nothing is."""
    demand = made({(8,): 1, (64,): 3}, limits=(16,)).demand()
    assert demand.eager.min() > demand.costs.max()
    assert listed(demand.corners) == [(8,), (16,)]
    assert listed(demand.corners[demand.forced]) == [(16,)]


@pytest.mark.parametrize("counts", [{(1,): 1e9, (100,): 1}, {(1, 1): 1e9, (100, 100): 1}])
def test_no_call_is_so_rare_that_it_is_left_out(counts):
    """Where nothing is known of eager, every call has a bucket."""
    for prior in ("auto", None):
        plan = plan_buckets(counts, max_graphs=1, prior=prior)
        assert all(plan.lookup(sizes) is not None for sizes in counts)


def test_included_and_captured_buckets_are_candidates():
    """The included are forced, captured ones are not; with eager known neither is the limit."""
    demand = made({(8,): 1}, COST, include=((20,),), captured=((33,),), limits=(50,)).demand()
    assert listed(demand.corners) == [(8,), (20,), (33,), (50,)]
    assert listed(demand.corners[demand.forced]) == [(20,)]


def test_equal_points_have_their_mean_eager_cost():
    """By weight."""
    cost = CostModel({"replay": {(1, 1): 5.0}, "eager": {(1, 1): 10.0, (4, 1): 40.0}}, ("a", "b"))
    demand = made({(1, 1): 3, (4, 1): 1}, cost, align=(4, 1)).demand()
    assert listed(demand.points) == [(4, 1)]
    assert demand.eager.tolist() == [pytest.approx(17.5)]


def test_too_many_points_are_rounded_more():
    """Until a search takes them; corners stay multiples of the alignment, all points held."""
    rng = np.random.default_rng(0)
    counts = {tuple(sizes): 1 for sizes in rng.integers(1, 4000, (1500, 2)).tolist()}
    demand = made(counts, align=(8, 2)).demand()
    assert len(demand.points) <= problems._MOST_POINTS
    assert len(demand.corners) <= problems._MOST_CORNERS + 1
    assert np.all(demand.corners % (8, 2) == 0)
    assert demand.holds().any(axis=1).all()
    assert demand.weights.sum() == pytest.approx(1)


def test_three_dims_have_candidates_that_hold_all():
    """With the boxes of merging among them; the starts are sets of candidates."""
    sides = itertools.product((3, 9, 14), (2, 7), (5, 6, 11))
    problem = made({sizes: 1 + sum(sizes) % 3 for sizes in sides})
    demand = problem.demand()
    assert demand.holds().any(axis=1).all()
    for count, start in enumerate(problem.starts(demand, 5), start=1):
        assert len(start) <= count
        assert demand.holds()[:, start].any(axis=1).all()


def test_no_traffic_is_refused():
    """Nor is one of counts of 0 any."""
    with pytest.raises(GraphCacheError, match="the profile has no calls"):
        made({(3,): 0})


def test_a_planted_bug_is_found(monkeypatch):
    """Buckets rounded beyond the limits: the definition says so."""

    def beyond(self, sizes, align):
        return -(-sizes // np.array(align)) * np.array(align)

    monkeypatch.setattr(Problem, "_rounded", beyond)
    with pytest.raises(AssertionError):
        test_on_a_line_sizes_stay_and_buckets_are_aligned()
