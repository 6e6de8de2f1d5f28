"""Plans: look-ups, files, comparisons, and plans after plans."""

import json
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcache import BucketError, GraphCacheError, Plan, TrafficProfile, plan_buckets
from graphcache.cover import MAX_PIECES
from graphcache.planning import plan as plans
from graphcache.planning.cost import CostModel
from graphcache.planning.plan import bucket_set

SIZES = range(1, 65)
COST = CostModel(
    {
        "replay": {(n,): 20 + n * 1.5 + 9 * (n % 5 == 0) for n in SIZES},
        "eager": {(n,): 90 + n * 2.5 for n in SIZES},
        "capture": {(n,): 4000.0 + n for n in SIZES},
        "nbytes": {(n,): 1000.0 + 50 * n for n in SIZES},
    },
    piece=7.0,
)
COUNTS = {n: 1 + 97 * n % 11 for n in range(1, 64, 2)}
WIDE = {(a, b): 1 + (a * b) % 5 for a in range(1, 9) for b in range(3, 40, 5)}


def made(**options):
    """A plan of measured costs in one dim."""
    return plan_buckets(COUNTS, COST, **{"max_graphs": 5, **options})


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 90))
def test_a_look_up_is_the_cheapest_way(seed, size):
    """Of the buckets that hold the size, and eager; in one dim, with bumpy prices."""
    rng = Random(seed)
    table = {n: rng.uniform(1, 9) for n in range(1, 65, 7)}
    cost = CostModel.from_table(table, eager={1: rng.uniform(1, 9), 64: rng.uniform(1, 12)})
    plan = plan_buckets({rng.randint(1, 64): 1 for _ in range(6)}, cost, max_graphs=4)
    held = [bucket for bucket in plan.buckets if bucket >= size]
    found = plan.lookup(size)
    assert found is None or found in held
    prices = {None: cost.eager_of((size,)), **{b: cost.replay_of((b,)) for b in held}}
    assert prices[found] == min(prices.values())


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)))
def test_a_look_up_in_two_dims_is_the_least_area(seed, sizes):
    """Without costs: the least area of those that hold it, or None."""
    rng = Random(seed)
    plan = plan_buckets({(rng.randint(1, 10), rng.randint(1, 10)): 1 for _ in range(6)})
    areas = [math.prod(b) for b in plan.buckets if sizes[0] <= b[0] and sizes[1] <= b[1]]
    found = plan.lookup(sizes)
    assert (found is None) == (not areas)
    assert found is None or (found in plan.buckets and math.prod(found) == min(areas))


def test_sizes_above_all_buckets_are_eager():
    """None, in one dim and in two."""
    plan = plan_buckets({3: 5, 8: 1}, prior=None)
    assert (plan.lookup(8), plan.lookup((8,)), plan.lookup(9)) == (8, 8, None)
    assert plan_buckets({(3, 3): 5}, prior=None).lookup((3, 4)) is None


@pytest.mark.parametrize("size", [1, 7, 30, 64, 100, 200])
def test_pieces_hold_the_call(size):
    """Their buckets have its rows, at most 16, and the way adds up to its cost."""
    plan = plan_buckets(dict.fromkeys(range(1, 120), 1), COST, max_graphs=3, split="batch")
    found, way = plan.lookup(size), plan.way((size,))
    pieces = found if isinstance(found, list) else [found]
    if found is not None:
        assert sum(pieces) >= size
        assert len(pieces) <= MAX_PIECES
        spent = sum(COST.replay_of((n,)) for n in pieces) + COST.piece * (len(pieces) - 1)
        assert way.cost == pytest.approx(spent)
    assert way.cost <= COST.eager_of((size,))


def test_some_calls_are_served_in_pieces():
    """Where cost rises faster than the rows, large calls are cut."""
    steep = CostModel.from_table({n: 10 + n * n for n in SIZES}, eager={1: 9e9}, piece=1.0)
    plan = plan_buckets({40: 5, 8: 5}, steep, max_graphs=2, split="batch", prior=None)
    assert isinstance(plan.lookup(40), list)
    assert plan.lookup(40) == [piece.bucket[0] for piece in plan.way((40,)).pieces]


@pytest.mark.parametrize("sizes", [0, -1, (1, 2), (), "a", 2.5, None, (2.5,), ("a",)])
def test_sizes_that_are_none_are_refused(sizes):
    """A look-up names them and the dims."""
    with pytest.raises(GraphCacheError, match="for the dims batch; pass a positive one for each"):
        made().lookup(sizes)


def test_without_graphs_every_call_is_eager():
    """Where no capture pays: no buckets, not exact ones."""
    plan = made(horizon=1e-3)
    assert plan.buckets == []
    assert not plan.bucket_set.exact
    assert plan.lookup(5) is None
    assert plan.compare()[0].eager == 1
    assert "100.0% of the calls eager" in str(plan)


def test_a_plan_states_what_it_costs():
    """The expected cost is the mean over the traffic; with captures it is the total."""
    plan = made(prior=None)
    calls = sum(COUNTS.values())
    mean = sum(count * plan.way((n,)).cost for n, count in COUNTS.items()) / calls
    captures = COST.of("capture", plan.buckets).sum() / plan.options.horizon
    assert plan.expected_cost == pytest.approx(mean)
    assert plan.total == pytest.approx(mean + captures)
    assert list(plan.curve) == sorted(plan.curve, reverse=True)
    assert plan.curve[4] <= plan.expected_cost * (1 + 1e-9)
    for line in ("5: ", "us per call", "0.00% cheaper", "dims batch"):
        assert line in str(plan)


def test_padding_counts_the_calls_of_graphs():
    """Padded elements of the buckets over real ones, of pieces too; what is eager is left out."""
    plan = plan_buckets({3: 2, 5: 1, 50: 1}, limits=8, max_graphs=1, prior=None)
    assert plan.padding_overhead == pytest.approx(24 / 11 - 1)
    assert plan.compare()[0].eager == 0.25


PLANS = [
    made(align=4, include=[8, 24], limits=60, horizon=1e4, seed=3),
    made(split="batch", max_graphs=3),
    made(memory_budget=9000),
    made(horizon=1e-3),
    plan_buckets(WIDE, max_graphs=4, align={"dim1": 8}, limits={"dim0": 8}, include=[(2, 8)]),
    plan_buckets(WIDE, max_graphs=6, grid=True, prior=None),
    made().replan({5: 3, 60: 8}, captured=[8, 60]),
]


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_a_file_is_a_round_trip(plan, tmp_path):
    """Every field, and every look-up."""
    plan.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    for name in ("dims", "corners", "options", "total", "lower_bound", "curve", "buckets"):
        assert getattr(again, name) == getattr(plan, name), name
    assert again.traffic.counts == plan.traffic.counts
    assert str(again) == str(plan)
    assert (again.costs is None) == (plan.costs is None)
    if plan.costs is not None:
        assert again.costs.to_json() == plan.costs.to_json()
    for sizes in plan.traffic.counts:
        assert again.lookup(sizes) == plan.lookup(sizes)
    changed = {(1,) * len(plan.dims): 4, (7,) * len(plan.dims): 2}
    assert again.replan(changed).buckets == plan.replan(changed).buckets


def test_decayed_traffic_is_kept_in_a_file(tmp_path):
    """With its half-life."""
    traffic = TrafficProfile(half_life=10)
    for n in range(1, 40):
        traffic.record(1 + n % 9)
    plan_buckets(traffic).save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json").traffic
    assert again.half_life == 10
    assert again.counts == pytest.approx(traffic.counts)


def faulty(path, **changes):
    """The text of a plan's file with other fields; None drops one."""
    made().save(path)
    data = {**json.loads(path.read_text()), **changes}
    return json.dumps({key: value for key, value in data.items() if value is not None})


@pytest.mark.parametrize(
    "changes",
    [
        *("not json", "", "[]", "3", "null", '{"version": 1}', "{}"),
        {"version": 99},
        *({name: None} for name in ("version", "dims", "buckets", "traffic", "options", "curve")),
        {"total": "x"},
        {"buckets": 5},
        {"buckets": [5]},
        {"buckets": [["a"]]},
        {"buckets": [[0]]},
        {"buckets": [[2.5]]},
        {"buckets": [[1, 2]]},
        {"dims": ["batch", "seq"]},
        {"dims": ["seq"]},
        {"options": {}},
        {"options": {"max_graphs": 3, "other": 1}},
        {"traffic": {"version": 1, "dims": ["batch"], "counts": [[1]]}},
        {"traffic": {"version": 7, "dims": ["batch"], "counts": []}},
        {"costs": {"version": 1, "dims": ["batch"], "piece": 1, "tables": {}}},
        {"costs": {"version": 9}},
        {"costs": [1]},
    ],
    ids=str,
)
def test_a_faulty_file_is_refused(changes, tmp_path):
    """Named, whatever is wrong with it."""
    path = tmp_path / "broken.json"
    path.write_text(changes if isinstance(changes, str) else faulty(path, **changes))
    with pytest.raises(GraphCacheError, match=r"broken\.json is no plan of version 1"):
        Plan.load(path)


def test_a_missing_file_a_folder_and_bytes_are_refused(tmp_path):
    """With the path."""
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "bytes.json"):
        with pytest.raises(GraphCacheError, match="is no plan of version 1"):
            Plan.load(path)


def test_a_comparison_scores_lists_and_rules_on_the_same_traffic():
    """The plan first, then your lists, then the rules in common use."""
    plan = made()
    found = plan.compare({"one": [64], "two": [(32,), 64], "grid": {"batch": [16, 64]}})
    assert [score.name for score in found[:5]] == ["planned", "one", "two", "grid", "powers of two"]
    assert [score.graphs for score in found[:4]] == [5, 1, 2, 2]
    assert found[0].expected_cost == pytest.approx(plan.expected_cost)
    assert found[0].padding_overhead == pytest.approx(plan.padding_overhead)
    assert found[0].nbytes == pytest.approx(COST.of("nbytes", plan.buckets).sum())
    rivals = [s for s in found if s.graphs <= 5]
    assert all(found[0].expected_cost <= s.expected_cost * 1.05 for s in rivals)


def test_a_comparison_may_be_on_later_traffic():
    """A mapping or a profile of the same dims."""
    plan = plan_buckets({4: 1, 8: 1}, prior=None)
    later = plan.compare({"mine": [16]}, traffic={12: 3, 8: 1})
    assert (later[0].eager, later[1].eager) == (0.75, 0)
    assert later[1].padding_overhead == pytest.approx(64 / 44 - 1)
    profile = TrafficProfile()
    profile.record(12, 3)
    profile.record(8)
    assert plan.compare({"mine": [16]}, traffic=profile) == later


def test_a_comparison_prints_a_table():
    """One line a set, in columns of equal width."""
    lines = str(made().compare({"mine": [64]})).splitlines()
    assert lines[0].split()[:3] == ["buckets", "graphs", "padding"]
    assert [line.split()[0] for line in lines[1:3]] == ["planned", "mine"]
    assert len({len(line) for line in lines}) == 1
    assert "MiB" in lines[1]
    assert str(plan_buckets({3: 1}).compare()).splitlines()[1].endswith("-")


def test_faulty_lists_and_traffic_are_refused():
    """By what they are compared on."""
    plan = made()
    with pytest.raises(BucketError, match="is not a positive integer"):
        plan.compare({"mine": [0]})
    for traffic in ({}, TrafficProfile(), {(1, 2): 3}):
        with pytest.raises(GraphCacheError):
            plan.compare(traffic=traffic)
    other = TrafficProfile(("seq",))
    other.record(3)
    for use in (plan.replan, lambda seen: plan.compare(traffic=seen)):
        with pytest.raises(GraphCacheError, match="has the dims seq, the plan batch"):
            use(other)


MOVED = dict.fromkeys(range(2, 60, 3), 5)


def test_a_plan_stays_where_captures_cost_more_than_the_gain():
    """Over a short horizon the set stays; its own captures are paid."""
    plan = made(horizon=1e6)
    assert set(plan.replan(MOVED, horizon=10).buckets) <= set(plan.buckets)
    same = plan.replan(COUNTS)
    assert same.buckets == plan.buckets
    paid = COST.of("capture", plan.buckets).sum() / 1e6
    assert same.total == pytest.approx(plan.total - paid)


def test_a_plan_moves_where_the_gain_pays_the_captures():
    """Over a long one it is as if nothing had been captured."""
    moved = made().replan(MOVED, horizon=1e9)
    fresh = plan_buckets(MOVED, COST, max_graphs=5, horizon=1e9)
    assert moved.buckets != made().buckets
    assert moved.expected_cost == pytest.approx(fresh.expected_cost, rel=1e-4)


def test_a_new_graph_is_paid_once_and_an_old_one_not():
    """The total is the serving, and the captures of what is new."""
    plan = made(prior=None)
    for horizon in (100, 1e3, 1e4, 1e5):
        moved = plan.replan(MOVED, horizon=horizon)
        new = sorted(set(moved.buckets) - set(plan.buckets))
        paid = COST.of("capture", new).sum() / horizon if new else 0.0
        assert moved.total == pytest.approx(moved.expected_cost + paid)


def test_graphs_that_exist_elsewhere_may_be_said():
    """`captured` names them; none at all plans anew."""
    plan = made(prior=None)
    assert plan.replan(MOVED, captured=[60], horizon=1e-3).buckets == [60]
    anew = plan.replan(MOVED, captured=[])
    assert anew.buckets == plan_buckets(MOVED, COST, max_graphs=5, prior=None).buckets


def test_without_costs_of_captures_a_plan_is_made_anew():
    """By padding, with the same options."""
    plan = plan_buckets(COUNTS, max_graphs=4, align=8)
    assert plan.replan(MOVED).buckets == plan_buckets(MOVED, max_graphs=4, align=8).buckets


@pytest.mark.parametrize("options", [{"split": "batch", "max_graphs": 3}, {"memory_budget": 9000}])
def test_other_kinds_of_plan_stay_too(options):
    """With pieces, and within a budget."""
    plan = made(horizon=1e6, **options)
    again = plan.replan(COUNTS, horizon=1e3)
    assert set(again.buckets) <= set(plan.buckets)
    assert again.total <= plan.total * (1 + 1e-9)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"horizon": 0}, "`horizon` is 0; pass a positive number"),
        ({"captured": [(1, 2)]}, r"bucket \(1, 2\) has 2 size\(s\)"),
        ({"captured": [0]}, "bucket size 0"),
    ],
)
def test_a_faulty_replan_is_refused(options, text):
    """As `plan_buckets` does."""
    with pytest.raises(GraphCacheError, match=text):
        made().replan(MOVED, **options)


def test_a_cache_reads_plans_paths_and_lists(tmp_path):
    """A plan's costs come with it; its dims must be the cache's."""
    plan = made()
    plan.save(tmp_path / "p.json")
    for buckets in (plan, tmp_path / "p.json", str(tmp_path / "p.json")):
        found = bucket_set(buckets, ("batch",))
        assert found.corners == plan.bucket_set.corners
        assert found.costs is not None
    assert bucket_set([8, 4], ("batch",)).corners == ((4,), (8,))
    assert bucket_set("auto", ("batch",)).exact
    assert bucket_set(None, ("batch",)).exact
    with pytest.raises(BucketError, match=r"the plan is for the dims batch, .* names seq"):
        bucket_set(plan, ("seq",))
    with pytest.raises(GraphCacheError, match="is no plan"):
        bucket_set("nothing.json", ("batch",))


def test_a_planted_bug_is_found(monkeypatch, tmp_path):
    """A file that forgets which graphs exist: the round trip says so."""
    read = plans._options
    monkeypatch.setattr(
        plans, "_options", lambda data, dims: replace(read(data, dims), captured=())
    )
    with pytest.raises(AssertionError):
        test_a_file_is_a_round_trip(PLANS[-1], tmp_path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("options", "split"), "nope"),
        (("options", "align"), []),
        (("options", "align"), [0]),
        (("options", "max_graphs"), "a"),
        (("options", "horizon"), 0),
        (("options", "seed"), -1),
        (("traffic", "counts"), []),
        (("traffic", "counts"), [["a", 3]]),
        (("traffic", "counts"), [[3, "x"]]),
        (("traffic", "counts"), [[3.5, 1]]),
        (("traffic", "counts"), [[-3, 1]]),
    ],
    ids=str,
)
def test_an_edited_file_is_refused_when_it_is_read(tmp_path, place, value):
    """Not at some later use."""
    path = tmp_path / "plan.json"
    plan_buckets({3: 5, 9: 2}).save(path)
    data = json.loads(path.read_text())
    data[place[0]][place[1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(GraphCacheError, match=r"plan\.json is no plan"):
        Plan.load(path)


def test_files_that_are_not_there_or_without_end_are_refused(tmp_path):
    """All three kinds of file."""
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    for path in (tmp_path / "none.json", tmp_path, deep):
        for kind in (Plan, TrafficProfile, CostModel):
            with pytest.raises(GraphCacheError, match=path.name):
                kind.load(path)
