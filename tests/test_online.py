"""The policy of `buckets="auto"`: simulated on traces with two cost models, beside the best static
set in hindsight; and its bounds.

The models are those of the planning notes: costs in milliseconds per size in tokens, a launch-bound
and a compute-bound one. What is counted is serving and captures.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcache import CostModel, TrafficProfile, plan_buckets
from graphcache.planning import online
from graphcache.planning.online import OnlinePlanner
from graphcache.planning.plan import make_plan
from graphcache.planning.problem import Options

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.exists(), reason="the traces are not here")


@cache
def sizes_of(name):
    """One stream; "splice" is three laid end to end."""
    if name == "splice":
        parts = [sizes_of(n) for n in ("azure_llm_conv", "azure_llm_code", "azure_llm_conv")]
        return np.concatenate(parts)
    with open(TRACES / f"{name}.csv", newline="") as file:
        rows = csv.DictReader(file)
        return np.array([int(row["input" if "mooncake" in name else "context"]) for row in rows])


class Costs:
    """A cost model of one kind, as functions and as a `CostModel`."""

    def __init__(self, floor, slope, eager_floor, eager_extra, capture, eager=True):
        self.replay = lambda n: np.maximum(floor, slope * n)
        self.eager = lambda n: np.maximum(eager_floor, slope * n + eager_extra)
        self.capture, self.routes = capture, eager
        turns = [1, floor / slope, (eager_floor - eager_extra) / slope, 200_000]
        table = sorted({round(turn) for turn in turns})
        known = {"eager": {n: float(self.eager(n)) for n in table}} if eager else {}
        self.model = CostModel.from_table(
            {n: float(self.replay(n)) for n in table},
            capture=dict.fromkeys(table, capture),
            **known,
        )

    def serving(self, sizes, corners):
        """The cost of these calls: eager where nothing holds one, or where it may be and pays."""
        corners = np.array(sorted(corners))
        at = np.searchsorted(corners, sizes)
        held = at < len(corners)
        cost = self.eager(sizes)
        replays = self.replay(corners[at[held]])
        cost[held] = np.minimum(cost[held], replays) if self.routes else replays
        return float(cost.sum())


LAUNCH = Costs(0.4, 0.0004, 2.5, 0.3, 150.0)
COMPUTE = Costs(2.0, 0.008, 6.0, 1.0, 300.0)
COMPUTE_WITHOUT_EAGER = Costs(2.0, 0.008, 6.0, 1.0, 300.0, eager=False)


def hindsight(sizes, costs, most, align, limit=None):
    """The best static set, planned on all of the stream, with its captures."""
    plan = plan_buckets(
        Counter(sizes.tolist()), costs.model, max_graphs=most, align=align, limits=limit,
        prior=None, horizon=1e12,
    )  # fmt: skip
    return costs.serving(sizes, plan.buckets) + costs.capture * len(plan.buckets)


def online_total(sizes, costs, most, limit=None, start=()):
    """What the policy costs in all, and its captures. A bucket is captured at its first use."""
    planner = OnlinePlanner(("batch",), (limit,), most)
    corners, captured = sorted(start), set(start)
    total, captures, at, counts = costs.capture * len(captured), len(captured), 0, Counter()
    while at < len(sizes):
        stop = int(min(planner.due, len(sizes)))
        part, at = sizes[at:stop], stop
        total += costs.serving(part, corners)
        counts.update(part.tolist())
        used = set(corners) & set(holders(part, corners, costs))
        captures += len(used - captured)
        total += costs.capture * len(used - captured)
        captured |= used
        planner.see({(n,): count for n, count in counts.items()})
        before = corners
        if not corners:
            corners = sorted(n for (n,) in planner.first())
        elif plan := planner.plan(costs.model, [(n,) for n in captured], captures):
            corners = plan.buckets
        captured &= set(corners)
        planner.reviewed(at, corners != before)
    return total, captures


def holders(sizes, corners, costs):
    """The corners that serve some of these calls."""
    corners = np.array(sorted(corners), dtype=np.int64)
    at = np.searchsorted(corners, sizes)
    held = at < len(corners)
    chosen = corners[at[held]]
    if costs.routes:
        chosen = chosen[costs.replay(chosen) <= costs.eager(sizes[held])]
    return np.unique(chosen).tolist()


def replanned_total(sizes, costs, most, align, horizon):
    """The switch-aware plan every 250 calls, from no graph, as `Plan.replan` makes it."""
    recent, corners = TrafficProfile(("batch",), half_life=4000), []
    options = Options(most, None, horizon, (align,), (), (None,), True, None, False, 0, quick=True)
    total = captures = 0
    for i in range(0, len(sizes), 250):
        part = sizes[i : i + 250]
        total += costs.serving(part, corners)
        for n in part.tolist():
            recent.record(n)
        present = tuple((n,) for n in corners)
        plan = make_plan(recent, costs.model, replace(options, captured=present))
        captures += len(set(plan.buckets) - set(corners))
        corners = plan.buckets
    return total + captures * costs.capture, captures


@needs_traces
@pytest.mark.parametrize(
    ("name", "align", "limit"),
    [
        ("azure_llm_conv", 8, 16_384),
        ("mooncake_conversation", 64, 131_072),
        ("splice", 8, 16_384),
    ],
)
def test_following_the_traffic_costs_little_more_than_hindsight(name, align, limit):
    """From 16 geometric buckets, compute-bound, without eager: within 3 %, at most 50 captures."""
    sizes, costs = sizes_of(name), COMPUTE_WITHOUT_EAGER
    start = np.geomspace(100, limit, 16).round().astype(int).tolist()
    total, captures = online_total(sizes, costs, 16, limit, start)
    assert total <= 1.03 * hindsight(sizes, costs, 16, align, limit)
    assert captures <= 50


@needs_traces
@pytest.mark.parametrize("costs", [LAUNCH, COMPUTE], ids=["launch-bound", "compute-bound"])
@pytest.mark.parametrize("name", ["azure_llm_conv", "azure_llm_code", "mooncake_conversation"])
def test_from_nothing_it_never_costs_more_than_eager_and_its_captures(name, costs):
    """At most one capture per slot more than eager alone."""
    sizes = sizes_of(name)
    total, captures = online_total(sizes, costs, 8)
    assert total <= float(costs.eager(sizes).sum()) + 8 * costs.capture
    assert captures <= 24


@needs_traces
@pytest.mark.parametrize(
    ("name", "align"),
    [("azure_llm_conv", 128), ("azure_llm_code", 128), ("mooncake_conversation", 1024)],
)
def test_planning_again_stays_within_5_percent_of_hindsight(name, align):
    """With room for 8 graphs, launch-bound, from no graph."""
    sizes = sizes_of(name)
    total, _ = replanned_total(sizes, LAUNCH, 8, align, 8000)
    assert total <= 1.05 * hindsight(sizes, LAUNCH, 8, align)


@given(st.lists(st.integers(1, 4000), min_size=8, max_size=400), st.integers(1, 8))
def test_captures_stay_within_the_allowance(stream, most):
    """Whatever the traffic, also where each review would like other buckets."""
    sizes = np.array(stream * 4)
    _, captures = online_total(sizes, LAUNCH, most)
    assert captures <= online.CAPTURES_PER_GRAPH * most + len(sizes) // online.CALLS_PER_CAPTURE


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=60))
def test_no_bucket_is_larger_than_what_was_seen(stream):
    """A module may take no more than that."""
    planner = OnlinePlanner(("batch",), (None,), 8)
    planner.see({(n,): count for n, count in Counter(stream).items()})
    plan = planner.plan(LAUNCH.model, [], 0)
    assert max(n for (n,) in planner.first()) == max(stream)
    assert plan is None or max(plan.buckets, default=0) <= max(stream)


def test_the_first_buckets_hold_everything_and_the_median():
    """In each dim."""
    planner = OnlinePlanner(("batch", "seq"), (None, None), 8)
    planner.see({(1, 10): 5, (2, 20): 5, (30, 7): 1})
    assert planner.first() == [(2, 10), (30, 20)]


def test_calls_are_seen_once():
    """The counts given are those of all calls so far."""
    planner = OnlinePlanner(("batch",), (None,), 8)
    planner.see({(3,): 5})
    planner.see({(3,): 5, (0,): 4})
    planner.see({(3,): 6, (4,): 1})
    assert planner.calls == 7


def test_reviews_come_soon_and_then_less_often_while_nothing_changes():
    """At 8, 16, .. 250 calls, then every 250, 500, 1,000; and every 250 after a change."""
    planner = OnlinePlanner(("batch",), (None,), 8)
    due = []
    for _ in range(10):
        due.append(planner.due)
        planner.reviewed(int(planner.due), False)
    assert due == [8, 16, 32, 64, 128, 250, 500, 1000, 2000, 3000]
    planner.reviewed(3000, True)
    assert planner.due == 3250


def noisy(slope):
    """Two close sizes, measured where a replay saves most of eager's time, and a slope of noise."""
    replay = {(5,): 60.0, (9,): 60.0 + 4 * slope}
    eager, capture = dict.fromkeys(replay, 400.0), dict.fromkeys(replay, 20_000.0)
    return {"replay": replay, "eager": eager, "capture": capture}


@pytest.mark.parametrize("slope", [0.0, 3.0, 10.0])
def test_sizes_far_beyond_what_was_measured_get_a_graph(slope):
    """A slope of noise would make replays look dearer than eager there, and nothing be learned."""
    planner = OnlinePlanner(("batch",), (None,), 16)
    planner.see({(n,): 30 for n in range(1, 11)} | {(n,): 10 for n in range(100, 141)})
    costs = planner.priced(noisy(slope))
    assert costs.replay_of((9,)) == 60 + 4 * slope
    assert costs.replay_of((140,)) < costs.eager_of((140,))
    assert planner.plan(costs, [(5,), (9,)], 2).buckets[-1] >= 100


def test_what_was_measured_is_not_hoped_for():
    """Where graphs do not pay, near by, or without eager's time."""
    planner = OnlinePlanner(("batch",), (None,), 16)
    assert planner.priced({}) is None
    planner.see({(18,): 100})
    assert planner.priced(noisy(3.0)).tables == noisy(3.0)
    planner.see({(18,): 100, (140,): 100})
    assert planner.priced(noisy(3.0)).tables != noisy(3.0)
    dear = {**noisy(0.0), "replay": {(5,): 500.0, (9,): 500.0}}
    without = {kind: table for kind, table in noisy(3.0).items() if kind != "eager"}
    assert planner.priced(dear).tables == dear
    assert planner.priced(without).tables == without


def test_what_cannot_be_captured_is_not_planned():
    """The next larger one is."""
    planner = OnlinePlanner(("batch",), (None,), 1)
    planner.see({(7,): 1000, (8,): 10})
    assert planner.plan(LAUNCH.model, [], 0).buckets == [8]
    planner.see({(7,): 1000, (8,): 10, (9,): 10})
    assert planner.plan(LAUNCH.model, [], 0, failed=[(9,)]).buckets == [8]


def test_graphs_that_exist_stay_where_a_move_does_not_pay():
    """A capture of 150 ms for a hundredth of it in serving."""
    planner = OnlinePlanner(("batch",), (None,), 2)
    planner.see({(2000,): 60, (2100,): 60})
    assert planner.plan(LAUNCH.model, [(2100,)], 1).buckets == [2100]
