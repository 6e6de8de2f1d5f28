"""Plots are drawn for one dim and for several, and say what is missing."""

import sys

import pytest

from graphcache import GraphCacheError, plan_buckets
from graphcache.plotting import plot

PLANS = {
    "one dim": dict.fromkeys(range(1, 9), 1),
    "one size": {5: 3},
    "wide": {1: 3, 50: 2, 4000: 1},
    "two dims": {(1, 8): 3, (5, 700): 2, (7, 9): 1},
    "three dims": {(1, 8, 3): 3, (5, 70, 3): 2},
}


@pytest.mark.parametrize("name", PLANS)
def test_draws_a_png(name, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    path = tmp_path / "plan.png"
    plot(plan_buckets(PLANS[name], max_graphs=3), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    for path in (tmp_path / "none" / "plan.png", tmp_path / "plan.strange"):
        with pytest.raises(GraphCacheError, match=f"cannot draw into .*{path.name}"):
            plot(plan_buckets(PLANS["one dim"]), path)


def test_says_how_to_get_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(GraphCacheError, match=r"pip install 'torch-graphcache\[plot\]'"):
        plot(plan_buckets(PLANS["one dim"]), tmp_path / "plan.png")
