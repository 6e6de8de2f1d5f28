"""Scores: against a plain sum over the calls."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcache import TrafficProfile
from graphcache.buckets import BucketSet
from graphcache.planning import score as scores
from graphcache.planning.cost import CostModel
from graphcache.planning.score import Comparison, Score, score

COST = CostModel(
    {
        "replay": {(1, 1): 10.0, (9, 1): 50.0, (1, 9): 30.0, (9, 9): 200.0},
        "eager": {(1, 1): 35.0, (9, 9): 150.0},
        "nbytes": {(1, 1): 2.0**20, (9, 9): 2.0**22},
    },
    ("a", "b"),
)
DIMS = ("a", "b")
pair = st.tuples(st.integers(1, 9), st.integers(1, 9))


def recorded(counts, dims=DIMS):
    """A profile of these counts."""
    profile = TrafficProfile(dims)
    for sizes, count in counts.items():
        profile.record(sizes, count)
    return profile


def plain(corners, counts, cost):
    """Padding, mean cost and share of eager calls, by their definitions."""
    real = padded = spent = eager = 0
    for sizes, count in counts.items():
        held = [c for c in corners if sizes[0] <= c[0] and sizes[1] <= c[1]]
        price = math.prod if cost is None else cost.replay_of
        best = min(held, key=price, default=None)
        alone = math.inf if cost is None else cost.eager_of(sizes)
        if best is None or alone < price(best):
            eager += count
            spent += count * (alone if alone < math.inf else price(sizes))
        else:
            spent += count * price(best)
            real += count * math.prod(sizes)
            padded += count * math.prod(best)
    calls = sum(counts.values())
    return (padded / real - 1 if real else 0.0), spent / calls, eager / calls


counted = st.dictionaries(pair, st.integers(1, 5), min_size=1, max_size=6)
cornered = st.lists(pair, max_size=4, unique=True)


@settings(max_examples=80)
@given(cornered, counted, st.booleans())
def test_a_score_is_the_sum_over_the_calls(corners, counts, priced):
    """With measured costs and without; of no buckets too."""
    cost = COST if priced else None
    found = score("x", BucketSet(DIMS, corners, cost), recorded(counts))
    expected = plain(BucketSet(DIMS, corners).corners, counts, cost)
    assert found.expected_cost == pytest.approx(expected[1])
    assert found.eager == pytest.approx(expected[2])
    if not priced or len({COST.replay_of(c) for c in corners}) == len(corners):  # else by ties
        assert found.padding_overhead == pytest.approx(expected[0])
    assert (found.name, found.graphs) == ("x", len(corners))


def test_pieces_pad_what_their_buckets_have():
    """Two of 4 for 7 rows: 8 elements, at both prices and the overhead."""
    cost = CostModel.from_table({n: float(n) for n in range(1, 9)}, piece=0.5)
    buckets = BucketSet(("batch",), [(4,)], cost)
    found = score("x", buckets, recorded({7: 2, 4: 2}, ("batch",)), axes=[0])
    assert found.padding_overhead == pytest.approx(12 / 11 - 1)
    assert found.expected_cost == pytest.approx((8.5 + 4) / 2)


def test_bytes_are_summed_where_they_are_known():
    """Over the buckets, used or not; else None."""
    traffic = recorded({(1, 1): 1})
    assert score("x", BucketSet(DIMS, [(1, 1), (9, 9)], COST), traffic).nbytes == 5 * 2**20
    assert score("x", BucketSet(DIMS, [], COST), traffic).nbytes == 0
    assert score("x", BucketSet(DIMS, [(1, 1)]), traffic).nbytes is None


def test_a_comparison_is_a_table():
    """Names on the left, numbers to the right, "-" for what is not known."""
    rows = Comparison([
        Score("planned", 4, 0.1234, 56.78, 0.05, 3 * 2**20),
        Score("powers of two", 1200, 1.5, 1234567.8, 0.0, None),
    ])  # fmt: skip
    assert str(rows) == (
        "buckets        graphs  padding  cost per call  eager  memory\n"
        "planned             4    12.3%           56.8   5.0%   3 MiB\n"
        "powers of two   1,200   150.0%    1,234,567.8   0.0%       -"
    )


def test_a_planted_bug_is_found(monkeypatch):
    """Calls that no bucket holds and that cost nothing: the plain sum says so."""
    monkeypatch.setattr(scores, "_unheld", lambda buckets, sizes: 0.0)
    with pytest.raises(AssertionError):
        test_a_score_is_the_sum_over_the_calls()
