"""A report: planned on the trace, scored on calls that the plan did not know, told in one form."""

import json

import pytest

from graphcache import GraphCacheError, plan_buckets
from graphcache.planreport import counted, few, later, report, with_prior


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [1, 2, 3, 7] * 20 + [9] * 20
    path.write_text("timestamp_s,batch\n" + "".join(f",{n}\n" for n in rows))
    return path


def test_plans_on_all_and_scores_what_came_later(trace):
    """The held-out plan knows nothing of the last calls, which its buckets do not hold."""
    made = report(trace, max_graphs=3, prior=None, share=0.8)
    assert made.plan.traffic.total == 100
    assert (made.held_out.planned, made.held_out.scored) == (80, 20)
    assert made.held_out.scores[0].eager == 1.0
    assert made.compared[0].eager == 0.0


def test_a_share_of_one_holds_nothing_out(trace):
    made = report(trace, share=1.0)
    assert made.held_out is None
    assert "held out" not in str(made)


def test_json_has_what_is_printed(trace):
    """Plain values only, and the same numbers."""
    made = report(trace, max_graphs=3)
    answer = json.loads(json.dumps(made.to_json()))
    assert answer["buckets"] == made.plan.buckets
    assert [one["name"] for one in answer["compared"]] == [one.name for one in made.compared]
    assert len(answer["curve"]) == 3
    assert answer["held_out"]["planned"] == 50
    assert all(one["name"] in str(made) for one in answer["held_out"]["compared"])


def test_the_curve_is_measured_as_its_rivals_are(trace):
    """With the prior, the plan's own score is its point of the curve."""
    plan = report(trace, max_graphs=3).plan
    assert with_prior(plan)[0].expected_cost == pytest.approx(plan.curve[len(plan.corners) - 1])


def test_rivals_know_the_declared_limits():
    plan = plan_buckets({3: 5, 4: 5}, max_graphs=2, limits=20)
    scores = later(plan, counted([(20,)], ("batch",)))
    assert [one.eager for one in scores] == [0.0] * len(scores)


def test_few_counts_show_the_curve():
    plan = plan_buckets(dict.fromkeys(range(1, 30), 1), max_graphs=11)
    assert few(plan) == [1, 2, 4, 8, 11]


@pytest.mark.parametrize(
    ("content", "share", "said"),
    [
        ("batch\n", 0.5, "has no rows"),
        ("batch\n3\n", 0.0, "above 0 and up to 1"),
        ("size\n3\n", 0.5, r"no column \['batch'\]"),
    ],
)
def test_refuses_what_cannot_be_planned(tmp_path, content, share, said):
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(GraphCacheError, match=said):
        report(path, share=share)
