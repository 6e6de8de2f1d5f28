"""`buckets="auto"` at run time: results stay eager's, graphs follow the traffic, and a review never
disturbs a call, a caller's capture, or memory that was handed out.
"""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch import nn

from graphcache import CostModel, GraphCache, Reason
from graphcache.adapting import Adapter
from graphcache.compare import close
from graphcache.planning.online import OnlinePlanner


def net(device):
    """Deep enough for graphs to pay soon on a GPU."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers).to(device).eval()


def serve(cache, sizes, device, module=None):
    """Call with rows of each size, and compare each result with eager's."""
    module = module or cache.module
    with torch.no_grad():
        for n in sizes:
            x = torch.randn(n, 16, device=device)
            assert close(cache(x), module(x))
    cache._check()


def drawn(count, low, high, seed=0):
    rng = random.Random(seed)
    return [rng.randint(low, high) for _ in range(count)]


def test_buckets_are_found_from_the_traffic(device, caplog):
    """Eight eager calls, then graphs, with a log line and a count for each change."""
    cache = GraphCache(net(device), "auto")
    with caplog.at_level(logging.INFO, "graphcache"):
        serve(cache, drawn(300, 1, 40), device)
    stats = cache.stats()
    assert stats.fallbacks[Reason.NOT_ADMITTED] == 8
    assert stats.captures >= 1
    assert stats.replans == sum("'auto' after" in r.message for r in caplog.records) >= 1
    assert cache.costs.knows("replay")
    assert cache.costs.knows("eager") == (device == "cuda")


def test_other_traffic_gets_other_buckets(device):
    """The largest bucket follows; captures stay few."""
    cache = GraphCache(net(device), "auto", split=None)
    serve(cache, drawn(300, 1, 10), device)
    before = cache._miss.buckets.largest()
    serve(cache, drawn(700, 100, 140), device)
    assert before[0] <= 10 < cache._miss.buckets.largest()[0]
    assert cache.stats().captures <= 48


def test_a_review_leaves_lent_results_and_written_inputs_alone(device):
    """outputs="view" and `static_inputs`: the call after which a review is due, and the next."""
    cache = GraphCache(net(device), "auto", outputs="view", max_graphs=2)
    serve(cache, [7] * 8 + [5] * 7, device)
    views = cache.static_inputs(7, like=torch.ones(1, 16, device=device))
    with torch.no_grad():
        for n in range(40):
            x = torch.randn(7, 16, device=device)
            views["input"].copy_(x)
            assert close(cache(views["input"]), cache.module(x)), n


def test_reviews_leave_no_trace_in_the_module(device):
    """Running statistics count each call once, and draws come as in eager."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)).to(device)
    twin = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)).to(device)
    twin.load_state_dict(module.state_dict())
    cache = GraphCache(module.train(), "auto")
    twin.train()
    with torch.no_grad():
        for n in drawn(100, 4, 6):
            x = torch.randn(n, 16, device=device)
            cache(x)
            twin(x)
    assert module[1].num_batches_tracked == twin[1].num_batches_tracked == 100
    torch.testing.assert_close(module[1].running_mean, twin[1].running_mean)


def test_a_failing_review_ends_them_and_serves_on(device, monkeypatch, caplog):
    """Whatever it raises."""
    cache = GraphCache(net(device), "auto")

    def broken(*args):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(OnlinePlanner, "plan", broken)
    serve(cache, drawn(100, 1, 20), device)
    assert "planted" in caplog.text
    assert cache.stats().replays > 0


def test_what_fails_to_capture_is_planned_around(device):
    """A table of positions that ends below the largest size seen."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(37, 16))

        def forward(self, x):
            return x + self.rows[: x.shape[0]]

    cache = GraphCache(Table().to(device).eval(), "auto")
    serve(cache, drawn(300, 20, 37), device)
    assert cache.stats().replays > 0
    assert Reason.CAPTURE_FAILED not in cache.stats().fallbacks


def test_a_call_larger_than_any_before_waits_quietly_for_a_bucket(device):
    """It is ordinary use there: no error, and a larger bucket comes."""
    cache = GraphCache(net(device), "auto", split=None, on_fallback="raise")
    serve(cache, [4] * 8 + [50] * 300, device)
    assert set(cache.stats().fallbacks) <= {Reason.NOT_ADMITTED, Reason.CHEAPER_EAGER}
    assert cache._miss.buckets.largest() == (50,)


def test_buckets_that_were_never_used_are_not_stuck_to(device):
    """Traffic moved on before anything was captured."""
    cache = GraphCache(net(device), "auto", split=None)
    serve(cache, [1, 2] * 4 + [16, 17, 18, 19, 20] * 20, device)
    assert cache.stats().replays > 0


def test_buckets_too_large_for_the_memory_give_way_to_smaller_ones(device):
    """The first calls were the largest."""
    wide = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(device).eval()
    budget = 40_000_000 if device == "cuda" else 20_000
    cache = GraphCache(wide, "auto", max_bytes=budget, split=None)
    many = 4_000_000 if device == "cuda" else 3_000
    serve(cache, [many] * 9 + [1, 2, 3] * 30, device)
    assert cache.stats().replays > 0


def test_what_the_user_measured_is_kept(device):
    """Reviews plan with it instead of what they would time themselves."""
    cache = GraphCache(net(device), "auto")
    serve(cache, [5] * 3, device)
    sample = torch.ones(1, 16, device=device)
    costs = CostModel.measure(cache, [1, 4, 16, 64], sample=sample, progress=False)
    serve(cache, drawn(100, 1, 40), device)
    assert cache.costs is costs
    assert cache.stats().replans >= 1


def test_a_sealed_cache_keeps_its_buckets(device):
    """They could not be captured any more."""
    cache = GraphCache(net(device), "auto")
    serve(cache, drawn(40, 1, 10), device)
    cache.seal()
    before = cache._miss.buckets.corners
    serve(cache, drawn(400, 50, 60), device)
    assert cache._miss.buckets.corners == before


def test_warmup_gives_the_first_buckets_and_captures_planned_ones(device):
    """Between calls of the caller's choosing."""
    cache = GraphCache(net(device), "auto")
    cache.warmup([4, 8], sample=torch.ones(1, 16, device=device), progress=False)
    serve(cache, [3, 8], device)
    assert cache.stats().replays == 2
    serve(cache, drawn(50, 20, 30), device)
    cache.warmup(progress=False)
    captures = cache.stats().captures
    planned = [corner[0] for corner in cache._miss.buckets.corners]
    serve(cache, planned, device)
    assert cache.stats().captures == captures


def test_declared_limits_bound_the_buckets(device):
    """`torch.export.Dim(max=)`."""
    dims = {"input": {0: torch.export.Dim("rows", min=1, max=24)}}
    cache = GraphCache(net(device), "auto", dynamic_shapes=dims)
    assert cache._miss.dims.limits == (24,)
    serve(cache, drawn(300, 1, 20), device)
    assert cache._miss.buckets.largest()[0] <= 24


def test_rebucket_to_auto_and_back(device):
    """Reviews begin, and end."""
    cache = GraphCache(net(device), [8])
    serve(cache, [3] * 20, device)
    assert cache.stats().replans == 0
    cache.rebucket("auto")
    serve(cache, drawn(60, 1, 30), device)
    changes = cache.stats().replans
    assert changes >= 1
    cache.rebucket([16])
    serve(cache, drawn(300, 1, 60), device)
    assert cache.stats().replans == changes
    assert cache._miss.buckets.corners == ((16,),)


def test_a_module_that_must_not_be_padded_is_served_at_exact_sizes(device):
    """BatchNorm in training is coupled; frequent sizes get graphs of their own."""
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).to(device).train()
    cache = GraphCache(module, "auto")
    with torch.no_grad():
        for _ in range(40):
            cache(torch.randn(6, 16, device=device))
    assert cache.stats().replays > 0
    cache._check()


@pytest.mark.gpu
def test_a_review_never_breaks_a_caller_that_captures():
    """It waits for another time."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cache = GraphCache(net("cuda"), "auto")
    serve(cache, [5] * 8, "cuda")  # a review is due now
    x = torch.randn(5, 16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        cache.module(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = cache(x)
        graph.replay()
        torch.testing.assert_close(y, cache.module(x))
    assert cache.stats().fallbacks[Reason.NESTED_CAPTURE] == 1


def test_the_tests_above_can_fail(device, monkeypatch):
    """A planted fault: reviews that run after the call, over the result that it lends."""

    def late(self, args, kwargs):
        due, self.adapter.due = self.adapter.due, float("inf")
        result = original(self, args, kwargs)
        self.adapter.due = due
        if self.ledger.calls >= due:
            self.adapter.review(self.traffic)
        return result

    if device == "cpu":
        pytest.skip("the recorder copies what it lends")
    from graphcache.serving import Server

    original = Server.call
    monkeypatch.setattr(Server, "call", late)
    with pytest.raises((AssertionError, RuntimeError)):
        test_a_review_leaves_lent_results_and_written_inputs_alone(device)


def test_restart_counts_from_now():
    """A new policy is first due eight calls on."""
    cache = GraphCache(net("cpu"), [8])
    serve(cache, [3] * 20, "cpu")
    cache.rebucket("auto")
    adapter = cache._server.adapter
    assert isinstance(adapter, Adapter)
    assert adapter.due == 28


def test_plans_of_calls_that_are_served_as_before_survive_a_review():
    """Making them anew takes longer than most replays."""
    cache = GraphCache(net("cpu"), "auto", split=None)
    serve(cache, [10] * 8 + [10, 5, 10, 5] * 2, "cpu")
    server = cache._server
    before = dict(server._plans)
    assert len(before) == 2
    server.review()
    kept = {key: plan for key, plan in before.items() if key in server._plans}
    for key, plan in before.items():
        same = plan.entry.alive and plan.bucket == cache._miss.buckets.way(plan.traffic).bucket
        assert (key in kept) == same
    assert kept
    serve(cache, [10, 5, 7], "cpu")
