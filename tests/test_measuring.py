"""Measured costs: what is timed, that it leaves no trace, and that calls are routed by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from graphcache import CostModel, GraphCache, GraphCacheError, Reason, plan_buckets
from graphcache.compare import close
from graphcache.measuring import rising


def net(device):
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device).eval()


def ones(n, device):
    return torch.ones(n, 16, device=device)


def test_every_size_asked_for_is_measured(device):
    """With what is known: replay, capture, bytes; eager where a replay can save something."""
    cache = GraphCache(net(device), [8, 64])
    costs = CostModel.measure(cache, [4, 8, 64], sample=ones(1, device), progress=False)
    for kind in ("replay", "capture", "nbytes"):
        assert set(costs.tables[kind]) == {(4,), (8,), (64,)}
        assert min(costs.tables[kind].values()) > 0
    assert costs.knows("eager") == (device == "cuda")
    assert cache.costs is costs


def test_measuring_counts_nothing_and_keeps_only_what_was_there(device):
    """Graphs of other sizes are for the time being."""
    cache = GraphCache(net(device), [8])
    with torch.no_grad():
        cache(ones(3, device))
    before = cache.stats()
    CostModel.measure(cache, [2, 8, 16], progress=False)
    after = cache.stats()
    assert (after.calls, after.captures, after.replays, after.eager, after.graphs) == (
        before.calls, before.captures, before.replays, before.eager, before.graphs,
    )  # fmt: skip
    cache._check()


def test_measuring_leaves_no_trace(device):
    """Running statistics, random generators, inputs, and the results of calls."""
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)).to(device)
    cache = GraphCache(module.train(), [8])
    state = {name: value.clone() for name, value in module.state_dict().items()}
    sample = ones(8, device)
    generator = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    CostModel.measure(cache, [4, 8], sample=sample, progress=False)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    now = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    assert torch.equal(now, generator)
    assert torch.equal(sample, ones(8, device))


def test_static_inputs_that_were_handed_out_keep_their_contents(device):
    """Timed replays copy into them, and put back what was there."""
    cache = GraphCache(net(device), [8])
    view = cache.static_inputs(8, like=ones(1, device))["input"]
    x = torch.randn(8, 16, device=device)
    view.copy_(x)
    CostModel.measure(cache, [8], progress=False)
    assert torch.equal(view, x)


@pytest.mark.gpu
def test_lent_results_are_over():
    """A late read raises, as after a call."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cache = GraphCache(net("cuda"), [8], outputs="view")
    with torch.no_grad():
        lent = cache(ones(8, "cuda"))
    CostModel.measure(cache, [8], progress=False)
    with pytest.raises(RuntimeError, match="overwritten"):
        lent.sum().item()


def test_sizes_by_default_are_geometric_up_to_the_largest_bucket(device):
    """Nine in one dim at most."""
    cache = GraphCache(net(device), [1, 100])
    costs = CostModel.measure(cache, sample=ones(1, device), progress=False)
    assert sorted(costs.tables["replay"]) == [(n,) for n in (1, 2, 3, 6, 10, 18, 32, 56, 100)]


def test_a_size_that_gets_no_graph_is_left_out(device):
    """And if none does, it says why."""

    class Short(nn.Module):
        def forward(self, x):
            if x.shape[0] > 8:
                raise ValueError("too long")
            return x * 2

    cache = GraphCache(Short(), [8])
    costs = CostModel.measure(cache, [4, 8, 16], sample=ones(1, device), progress=False)
    assert set(costs.tables["replay"]) == {(4,), (8,)}
    with pytest.raises(GraphCacheError, match="no size of 1 gets a graph"):
        CostModel.measure(cache, [16], sample=ones(1, device), progress=False)


def test_a_cache_without_buckets_or_calls_says_what_to_pass(device):
    """Sizes; a sample."""
    with pytest.raises(GraphCacheError, match="pass `sample`"):
        CostModel.measure(GraphCache(net(device), [8]))
    with pytest.raises(GraphCacheError, match="pass `sizes`"):
        CostModel.measure(GraphCache(net(device)), sample=ones(1, device))


TABLE = CostModel.from_table(
    {4: 10.0, 8: 30.0, 16: 40.0}, eager={4: 35.0, 16: 35.0, 32: 200.0}, capture={4: 100.0}
)


@pytest.mark.parametrize(
    ("n", "action"),
    [(3, "replay"), (4, "replay"), (6, "split"), (8, "split"), (15, "eager"), (40, "split")],
)
def test_calls_go_the_cheapest_way(device, n, action):
    """By a bucket, in pieces, or eagerly, whichever is measured to be the cheapest."""
    costs = CostModel(TABLE.tables, piece=2.0)
    cache = GraphCache(
        net(device), plan_buckets({4: 1, 8: 1, 16: 1}, costs, max_graphs=3, include=[4, 8, 16])
    )
    x = torch.randn(n, 16, device=device)
    with torch.no_grad():
        cache(torch.randn(3, 16, device=device))
        cache(x)
        assert close(cache(x), cache.module(x))
        assert cache.explain(x).action == action
    if action == "eager":
        assert cache.stats().fallbacks == {Reason.CHEAPER_EAGER: 2}
    cache._check()


def test_static_inputs_are_those_of_a_bucket_whatever_calls_cost(device):
    """Also where a call of these sizes goes in pieces or runs eagerly; results are right."""
    plan = plan_buckets({4: 1, 8: 1, 16: 1}, TABLE, max_graphs=3, include=[4, 8, 16])
    cache = GraphCache(net(device), plan)
    with torch.no_grad():
        for n in (6, 15, 3):
            view = cache.static_inputs(n, like=ones(1, device))["input"]
            x = torch.randn(n, 16, device=device)
            view.copy_(x)
            assert close(cache(view), cache.module(x))


def test_a_plan_and_its_file_are_buckets(device, tmp_path):
    """With their costs; a plan for other dims is refused."""
    plan = plan_buckets({3: 10, 9: 5}, TABLE, max_graphs=2)
    plan.save(tmp_path / "plan.json")
    for buckets in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        cache = GraphCache(net(device), buckets)
        assert [corner[0] for corner in cache._miss.buckets.corners] == plan.buckets
        assert cache.costs.tables == TABLE.tables
    other = CostModel.from_table({4: 1.0})
    cache.rebucket([5])
    assert cache.costs.tables == TABLE.tables, "what was measured holds for other buckets too"
    cache.rebucket(plan_buckets({3: 10}, other))
    assert cache.costs.tables == other.tables
    with pytest.raises(GraphCacheError, match="is no plan"):
        GraphCache(net(device), str(tmp_path / "none.json"))
    two = plan_buckets({(1, 2): 3})
    with pytest.raises(GraphCacheError, match="dims"):
        GraphCache(net(device), two)


def test_a_plan_that_wants_no_graph_runs_eagerly(device):
    """With the reason; nothing is captured."""
    costs = CostModel.from_table({8: 100.0}, eager={8: 50.0}, capture={8: 10.0})
    cache = GraphCache(net(device), plan_buckets({3: 10, 9: 5}, costs))
    with torch.no_grad():
        for n in (3, 9):
            cache(torch.randn(n, 16, device=device))
    assert cache.stats().fallbacks == {Reason.CHEAPER_EAGER: 2}


@pytest.mark.parametrize("seed", range(5))
def test_measured_costs_never_fall_with_a_size(seed):
    """What did not fall is kept; the rest is moved no further than it has to be."""
    rng = np.random.default_rng(seed)
    table = {(b, s): float(rng.uniform(1, 2) + b) for b in (1, 2, 4) for s in (8, 16, 32)}
    smooth = rising(table)
    for one in smooth:
        for other in smooth:
            if all(a <= b for a, b in zip(one, other, strict=True)):
                assert smooth[one] <= smooth[other]
    spread = max(abs(smooth[size] - table[size]) for size in table)
    falls = [table[a] - table[b] for a in table for b in table if a[0] <= b[0] and a[1] <= b[1]]
    assert spread <= max(falls) / 2 + 1e-9
    assert rising(smooth) == smooth


def test_exact_sizes_stay_exact_when_priced(device):
    """A cache without buckets can be measured too."""
    cache = GraphCache(net(device), dynamic_shapes={"input": {0: "batch"}})
    CostModel.measure(cache, [4, 8], sample=ones(1, device), progress=False)
    with torch.no_grad():
        for _ in range(4):
            cache(ones(4, device))
    assert cache._miss.buckets.exact
    assert "over-max" not in cache.stats().fallbacks
