"""Covers: the cheapest pieces for any number of rows, against enumeration."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcache import cover
from graphcache.cover import MAX_PIECES, Cover

steps = st.dictionaries(st.integers(1, 12), st.floats(0.1, 9), min_size=1, max_size=4)


def cheapest(rows, costs, overhead, total):
    """By enumeration: the least cost and, at that cost, the fewest pieces; None if 16 are few."""
    options = [
        (sum(costs[i] for i in chosen) + overhead * (count - 1), count)
        for count in range(1, MAX_PIECES + 1)
        for chosen in itertools.combinations_with_replacement(range(len(rows)), count)
        if sum(rows[i] for i in chosen) >= total
    ]
    return min(options, default=None)


def check(table, overhead, total):
    """One cover equals enumeration."""
    rows, costs = sorted(table), [table[n] for n in sorted(table)]
    found = Cover(rows, costs, overhead)
    chosen, best = found.chosen(total), cheapest(rows, costs, overhead, total)
    assert bool(chosen) == (best is not None)
    if best is not None:
        assert sum(rows[i] for i in chosen) >= total
        assert len(chosen) <= MAX_PIECES
        assert chosen == sorted(chosen, reverse=True)
        assert found.cost(chosen) == pytest.approx(best[0])


@settings(max_examples=60)
@given(steps, st.sampled_from([0.0, 0.3, 5.0]), st.integers(1, 40))
def test_a_cover_is_the_cheapest(table, overhead, total):
    """Bumpy costs too, each piece after the first at its overhead, at most 16."""
    check(table, overhead, total)


def test_sixteen_pieces_are_the_most():
    """Where more would be cheaper fewer and dearer ones are taken; above 16 of the largest none."""
    found = Cover([1, 3], [1.0, 9.0], 0.0)
    assert found.chosen(16) == [0] * 16
    assert found.chosen(18) == [1] + [0] * 15
    assert found.chosen(48) == [1] * 16
    assert found.chosen(49) == []
    check({1: 1.0, 3: 9.0}, 0.0, 20)


def test_of_equal_costs_the_fewest_pieces_are_taken():
    """One of 16 rather than two of 8."""
    assert Cover([8, 16], [8.0, 16.0], 0.0).chosen(16) == [1]
    assert Cover([4, 8, 16], [4.0, 8.0, 16.0], 0.0).chosen(24) == [2, 1]


def test_an_overhead_makes_pieces_larger():
    """The dearer each cut, the fewer there are."""
    counts = [len(Cover([2, 5, 9], [2.0, 6.0, 12.0], o).chosen(18)) for o in (0.0, 2.0, 50.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


@given(steps, st.lists(st.integers(1, 60), min_size=2, max_size=6))
def test_what_was_asked_before_does_not_matter(table, totals):
    """The table is kept and extended."""
    rows, costs = sorted(table), [table[n] for n in sorted(table)]
    kept = Cover(rows, costs, 0.5)
    for total in totals:
        assert kept.chosen(total) == Cover(rows, costs, 0.5).chosen(total)


def test_the_table_is_filled_once():
    """A second look at no more rows makes no new entry."""
    found = Cover([3, 7], [1.0, 2.0], 0.1)
    found.chosen(50)
    entries = list(found._best)
    for total in (50, 20, 1):
        found.chosen(total)
    assert found._best == entries


def test_a_planted_bug_is_found(monkeypatch):
    """Without the limit of 16 pieces there are more: enumeration says so."""
    monkeypatch.setattr(cover, "MAX_PIECES", 99)
    with pytest.raises(AssertionError):
        check({1: 1.0, 3: 9.0}, 0.0, 20)
