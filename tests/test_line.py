"""Exact buckets on a line: against enumeration, and its shape."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from graphcache import TrafficProfile
from graphcache.planning import line
from graphcache.planning.demand import Demand


def cheapest(demand, most):
    """The least total over every set of at most `most` corners that has the forced ones."""
    forced = set(np.flatnonzero(demand.forced).tolist())
    indices = range(len(demand.corners))
    sets = (s for t in range(most + 1) for s in itertools.combinations(indices, t))
    return min(demand.total(np.array(s, dtype=np.int64)) for s in sets if forced <= set(s))


def random_demand(seed, bumpy=False, noisy=False):
    """A dozen sizes or fewer, aligned or not, with prices, eager costs and forced corners."""
    rng = np.random.default_rng(seed)
    sizes = np.unique(rng.integers(1, 60, rng.integers(2, 10)))
    align = rng.choice([1, 1, 4, 8])
    extra = rng.integers(1, 70, 2)
    corners = np.unique(-(-np.concatenate([sizes, extra]) // align) * align)
    costs = rng.uniform(1, 5, len(corners)) if bumpy else np.sort(rng.uniform(1, 5, len(corners)))
    eager = rng.uniform(2, 7, len(sizes))
    weights = rng.random(len(sizes))
    return Demand(
        sizes[:, None],
        weights / weights.sum(),
        eager if noisy else np.sort(eager),
        corners[:, None],
        costs,
        rng.choice([0.0, 0.05, 0.4]) * rng.random(len(corners)),
        rng.random(len(corners)) < rng.choice([0.0, 0.15]),
    )


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("bumpy", [False, True])
def test_equals_enumeration(bumpy, noisy):
    """1,000 random cases: monotone and bumpy costs, eager of any shape, prices, forced, aligned."""
    for seed in range(250):
        demand = random_demand(seed, bumpy, noisy)
        forced = int(demand.forced.sum())
        sets = line.best_sets(demand, forced + 3)
        for t in range(forced, forced + 4):
            assert len(sets[t]) <= t
            assert set(np.flatnonzero(demand.forced)) <= set(sets[t])
            assert demand.total(sets[t]) == pytest.approx(cheapest(demand, t), rel=1e-9)


def many(count, seed=0):
    """Sizes 1 to `count` with random weights, a floor under the cost, and no prices."""
    rng = np.random.default_rng(seed)
    sizes = np.arange(1, count + 1)
    weights = rng.random(count)
    zeros = np.zeros(count)
    costs = np.maximum(count / 3, sizes.astype(float))
    eager = costs + rng.uniform(0, count) + 0.2 * sizes
    args = (sizes[:, None], weights / weights.sum(), eager, sizes[:, None], costs)
    return Demand(*args, zeros, zeros > 0)


@pytest.mark.parametrize("seed", range(20))
def test_divide_and_conquer_finds_what_every_link_finds(seed, monkeypatch):
    """At sizes that enumeration cannot reach."""
    demand = many(150 + seed, seed)
    fast = [demand.total(chosen) for chosen in line.best_sets(demand, 12)]
    monkeypatch.setattr(line, "_Monge", line._dense)
    dense = [demand.total(chosen) for chosen in line.best_sets(demand, 12)]
    assert fast == pytest.approx(dense, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_curve_is_convex(seed):
    """Each further bucket saves at most what the one before it saved."""
    demand = many(200, seed)
    curve = [demand.total(chosen) for chosen in line.best_sets(demand, 32)]
    assert np.all(np.diff(curve, 2) >= -1e-9)


def test_divide_and_conquer_looks_at_few_links(monkeypatch):
    """O(n log n) a layer, counted: 4,096 sizes would have 8 million."""
    looked = []
    between = line._Monge._between

    def counted(self, i, j):
        looked.append(len(i))
        return between(self, i, j)

    monkeypatch.setattr(line._Monge, "_between", counted)
    line.best_sets(many(4096), 4)
    assert sum(looked) <= 4 * 4096 * (12 + 2) * 2


def test_flat_costs_take_one_bucket():
    """The largest replaces all others at no more cost."""
    demand = many(50)
    flat = Demand(
        demand.points, demand.weights, demand.eager, demand.corners, np.ones(50),
        demand.nodes, demand.forced,
    )  # fmt: skip
    assert [chosen.tolist() for chosen in line.best_sets(flat, 3)] == [[], [49], [49], [49]]


def test_a_planted_bug_is_found(monkeypatch):
    """Without the tail, sizes above the last bucket cost nothing: enumeration says so."""
    monkeypatch.setattr(line, "_tail", lambda weights, eager, ends: np.zeros(len(ends)))
    with pytest.raises(AssertionError):
        test_equals_enumeration(False, False)


TRACES = Path(__file__).parents[2] / "shared" / "traces"

# Trace, its column, alignment, padding overhead in % that 8 graphs may have, graphs that match
# powers of two.
BARS = [
    ("azure_llm_conv", "context", 8, 14.1, 4),
    ("azure_llm_code", "context", 8, 17.8, 5),
    ("mooncake_conversation", "input", 64, 30.3, 7),
    ("librispeech_frames", "frames", 8, 6.8, 2),
    ("banking77_tokens", "tokens", 1, 12.7, 4),
    ("derived/azure_conv_decode30ms", "batch", 1, 5.2, 2),
]


def by_padding(trace, column, align):
    """A trace whose cost is its padded size, and the mean of its real sizes."""
    counts = TrafficProfile.from_csv(TRACES / f"{trace}.csv", dims=(column,)).counts
    sizes = np.array([size for (size,) in sorted(counts)])
    weights = np.array([float(counts[(size,)]) for size in sizes])
    corners = np.unique(-(-sizes // align) * align)
    zeros = np.zeros(len(corners))
    forced = corners == corners[-1]
    worst = np.full(len(sizes), float(corners[-1]))
    args = (sizes[:, None], weights / weights.sum(), worst, corners[:, None], corners.astype(float))
    return Demand(*args, zeros, forced), float(weights @ sizes / weights.sum())


def powers_of_two(demand):
    """The padded size of powers of two, the first that covers the largest size on top."""
    padded = 2.0 ** np.ceil(np.log2(demand.points[:, 0]))
    return float(demand.weights @ padded)


@pytest.mark.skipif(not TRACES.exists(), reason="no traces beside the checkout")
@pytest.mark.parametrize(("trace", "column", "align", "padding", "match"), BARS)
def test_real_traces_are_padded_as_little_as_can_be(trace, column, align, padding, match):
    """In hindsight: 8 graphs, the curve's shape, and how few match powers of two."""
    demand, real = by_padding(trace, column, align)
    curve = [demand.serving(chosen) for chosen in line.best_sets(demand, 32)[1:]]
    assert 100 * (curve[7] / real - 1) <= padding
    assert curve[match - 1] <= powers_of_two(demand)
    assert np.all(np.diff(curve, 2) >= -1e-9 * curve[0])


@pytest.mark.skipif(not TRACES.exists(), reason="no traces beside the checkout")
def test_five_graphs_match_the_eleven_of_a_serving_engine_s_list():
    """1, 2, 4 and the multiples of 8, on batches in flight."""
    demand, _ = by_padding("derived/azure_conv_decode30ms", "batch", 1)
    listed = np.array([1, 2, 4, *range(8, 65, 8)])
    padded = listed[np.searchsorted(listed, demand.points[:, 0])]
    five = demand.serving(line.best_sets(demand, 5)[5])
    assert five <= float(demand.weights @ padded)
