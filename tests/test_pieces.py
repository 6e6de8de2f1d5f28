"""Buckets for calls that are served in pieces: against enumeration, and on real batches."""

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from graphcache import TrafficProfile
from graphcache.planning import pieces
from graphcache.planning.cost import CostModel
from graphcache.planning.pieces import SplitDemand

SHARED = Path(__file__).parents[2] / "shared"
BATCHES = ["derived/azure_conv_decode30ms", "derived/azure_code_window1s"]

needs_traces = pytest.mark.skipif(not SHARED.exists(), reason="no traces beside the checkout")


def reference(demand, chosen, rest, rows):
    """The cheapest pieces, by the definition."""

    @cache
    def cheapest(left):
        options = [np.inf]
        for j in chosen:
            if demand.corner_holds[j, rest]:
                more = left - demand.corner_rows[j]
                then = demand.overhead + cheapest(int(more)) if more > 0 else 0.0
                options.append(demand.costs[j] + then)
        return min(options)

    return cheapest(int(rows))


def random_demand(seed):
    """A dozen points over two dims, corners of any cost, prices, a forced one now and then."""
    rng = np.random.default_rng(seed)
    n, m, rests = 12, int(rng.integers(3, 9)), int(rng.integers(1, 4))
    corner_rows = rng.integers(1, 15, m)
    holds = np.arange(rests)[None, :] <= rng.integers(0, rests, m)[:, None]
    weights = rng.random(n)
    return SplitDemand(
        rng.integers(1, 20, n),
        rng.integers(0, rests, n),
        weights / weights.sum(),
        rng.uniform(3, 9, n),
        corner_rows,
        holds,
        np.maximum(1.0, corner_rows / 4) + rng.random(m),
        rng.choice([0.0, 0.3]) * rng.random(m),
        rng.random(m) < 0.1,
        0.1,
    )


@pytest.mark.parametrize("seed", range(30))
def test_covers_are_the_cheapest_pieces(seed):
    """The table equals the recursion, for each combination of the other dims."""
    demand = random_demand(seed)
    chosen = np.arange(0, len(demand.costs), 2)
    table = demand.covers(chosen)
    for rest, rows in zip(demand.rest, demand.rows, strict=True):
        assert table[rest, rows] == pytest.approx(reference(demand, chosen, rest, rows))


def enumerated(demand, most):
    """The least total over every set that has the forced corners."""
    forced = set(np.flatnonzero(demand.forced).tolist())
    sets = (
        s
        for t in range(most + 1)
        for s in itertools.combinations(range(len(demand.costs)), t)
        if forced <= set(s)
    )
    return min(demand.total(np.array(s, dtype=np.int64)) for s in sets)


@pytest.mark.parametrize("seed", [*range(60), 1067, 1106, 5186, 5310])
def test_search_is_within_half_a_percent_of_enumeration(seed):
    """With eager, prices and forced corners; never below it. The last need two additions at once,
    of which neither pays alone.
    """
    demand = random_demand(seed)
    most = 3 + int(demand.forced.sum())
    found = pieces.search(demand, most, [])
    assert len(found) <= most
    assert set(np.flatnonzero(demand.forced)) <= set(found)
    best = enumerated(demand, most)
    assert best * (1 - 1e-9) <= demand.total(found) <= best * 1.005


def batches_of(trace, cost, overhead=0.05):
    """The batches of a trace under a cost by rows; eager never pays."""
    counts = TrafficProfile.from_csv(SHARED / "traces" / f"{trace}.csv").counts
    rows = np.array([rows for (rows,) in sorted(counts)])
    weights = np.array([float(counts[(n,)]) for n in rows])
    return split_demand(rows, weights / weights.sum(), cost, overhead)


def split_demand(rows, weights, cost, overhead):
    sizes = np.arange(1, rows.max() + 1)
    zeros, costs = np.zeros(len(sizes)), cost(sizes)
    return SplitDemand(
        rows, np.zeros(len(rows), dtype=np.int64), weights, np.full(len(rows), 1e9), sizes,
        np.ones((len(sizes), 1), dtype=bool), costs, zeros, zeros > 0, overhead,
    )  # fmt: skip


def knee(at):
    return lambda rows: np.maximum(1.0, rows / at)


@needs_traces
@pytest.mark.parametrize("at", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("trace", BATCHES)
def test_real_batches_are_within_half_a_percent_of_enumeration(trace, at):
    """Every pair of buckets, and of the shorter trace every three, the last one batched."""
    demand = batches_of(trace, knee(at))
    for most in (2, 3) if trace == BATCHES[1] else (2,):
        firsts = itertools.combinations(range(len(demand.costs)), most - 1)
        best = min(pieces._totals(demand, np.array(first)).min() for first in firsts)
        assert best * (1 - 1e-9) <= demand.serving(pieces.search(demand, most, [])) <= best * 1.005


@needs_traces
def test_four_graphs_are_near_a_graph_for_each_batch():
    """Decode batches, the cost rising from 16 rows: at most 1.05 x."""
    demand = batches_of(BATCHES[0], knee(16))
    alone = float(demand.weights @ knee(16)(demand.rows))
    assert demand.serving(pieces.search(demand, 4, [])) <= 1.05 * alone


@pytest.mark.parametrize("most", [1, 2, 4, 8])
def test_flat_costs_are_never_split(most):
    """One piece serves every call where a larger bucket costs no more."""
    rng = np.random.default_rng(most)
    rows = np.arange(1, 33)
    demand = split_demand(rows, rng.dirichlet(np.ones(32)), lambda n: np.ones(len(n)), 0.05)
    assert pieces.search(demand, most, []).tolist() == [31]


@needs_traces
@pytest.mark.parametrize(("graphs", "share"), [(4, 0.80), (8, 0.77)])
def test_a_resnet_s_measured_costs_want_few_middle_sizes(graphs, share):
    """Batches uniform on 1..200, beside powers of two up to 256 without splitting."""
    cost = CostModel.from_csv(SHARED / "costs" / "h200_resnet50.csv")
    rows = np.arange(1, 201)
    demand = split_demand(rows, np.full(200, 1 / 200), lambda n: cost.replay(n[:, None]), 20.0)
    powers = cost.replay((2 ** np.ceil(np.log2(rows)).astype(int))[:, None]).mean()
    assert demand.serving(pieces.search(demand, graphs, [])) <= share * powers


def test_units_are_multiples_of_the_alignment_and_few():
    """As many rows in each as it takes."""
    assert pieces.row_units(np.array([3, 200]), 1) == 1
    assert pieces.row_units(np.array([14_050]), 8) == 56


def test_the_curve_falls():
    """Each further corner serves at no more cost."""
    curve = pieces.curve(random_demand(3), 5)
    assert np.all(np.diff(curve) <= 1e-12)


def test_the_same_seed_finds_the_same_set():
    """Twice over."""
    demand = random_demand(5)
    assert pieces.search(demand, 3, [], 7).tolist() == pieces.search(demand, 3, [], 7).tolist()


def test_a_planted_bug_is_found(monkeypatch):
    """Pieces without their overhead are cheaper than they are: the recursion says so."""
    tables = pieces._tables

    def free(demand, fixed, trial):
        return tables(pieces.replace(demand, overhead=0.0), fixed, trial)

    monkeypatch.setattr(pieces, "_tables", free)
    with pytest.raises(AssertionError):
        test_covers_are_the_cheapest_pieces(0)
