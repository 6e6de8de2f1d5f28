"""The bucket lists in common use."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcache.planning import rivals


@pytest.mark.parametrize("rule", rivals.RULES)
@given(ends=st.tuples(st.integers(1, 3000), st.integers(1, 3000)))
def test_every_rule_covers_the_sizes_and_stops(rule, ends):
    """Ascending, positive, and the last is the first that holds the largest size."""
    low, high = sorted(ends)
    levels = rivals.RULES[rule](low, high)
    assert levels == sorted(set(levels))
    assert levels[0] >= 1
    assert levels[-1] >= high
    assert all(level < high for level in levels[:-1])


def test_rules_are_what_they_are_called():
    """By example."""
    assert rivals.powers_of_two(5, 33) == [1, 2, 4, 8, 16, 32, 64]
    assert rivals.powers_of_two(1, 1) == [1]
    assert rivals.decode_list(1, 20) == [1, 2, 4, 8, 16, 24]
    assert rivals.steps_of_a_fifth(10, 20) == [10, 12, 14, 16, 19, 22]
    assert rivals.steps_of_a_fifth(1, 4) == [1, 2, 3, 4]
    assert rivals.exponential(8, 8) == [8]


@given(st.lists(st.integers(1, 99), min_size=1, max_size=30, unique=True), st.integers(1, 9))
def test_quantiles_take_equal_shares(sizes, count):
    """At most so many; of equal weights, each holds at most its share, rounded up."""
    levels = rivals._quantiles(np.array(sizes), np.ones(len(sizes)), count)
    assert len(levels) <= count
    assert levels[-1] == max(sizes)
    held = np.searchsorted(levels, sizes)
    assert np.bincount(held).max() <= -(-len(sizes) // count) + 1


def test_quantiles_follow_the_weights():
    """A size of half the weight ends a half."""
    assert rivals._quantiles(np.array([9, 2, 5]), np.array([1.0, 2.0, 1.0]), 2) == [2, 9]


def test_several_dims_take_products():
    """Of each dim's levels; quantiles share the count among the dims."""
    sizes = np.array([[1, 8], [3, 30], [4, 17]])
    sets = rivals.rival_sets(sizes, np.ones(3), 4)
    assert len(sets["powers of two"]) == 3 * 6
    assert sets["powers of two"][-1] == (4, 32)
    assert "quantiles (4)" in sets
    for corners in sets.values():
        assert (sizes[:, None] <= np.array(corners)[None]).all(axis=2).any(axis=1).all()


def test_huge_products_are_left_out():
    """What would have more than 4,096 buckets is not listed."""
    sizes = np.array([[1, 1], [2000, 2000]])
    sets = rivals.rival_sets(sizes, np.ones(2), 16)
    assert "vLLM's list" not in sets
    assert "powers of two" in sets
    assert all(len(corners) <= 4096 for corners in sets.values())
