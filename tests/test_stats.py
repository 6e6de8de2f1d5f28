"""The counters."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphcache import GraphCache, Reason, Stats
from graphcache.stats import Ledger


def test_the_fields_are_the_designs():
    """Names and order are the contract."""
    assert [f.name for f in dataclasses.fields(Stats)] == [
        "calls", "captures", "replays", "eager", "splits", "evictions", "recaptures",
        "warmup_captures", "failures", "real_elements", "padded_elements", "padding_overhead",
        "graphs", "graph_bytes", "capture_seconds", "fallbacks", "per_bucket",
            "replans",
    ]  # fmt: skip


def test_stats_are_frozen():
    """A snapshot does not change, and nobody changes it."""
    stats = Stats(calls=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.calls = 2


def test_a_snapshot_is_apart_from_the_ledger():
    """Later calls do not show in it."""
    ledger = Ledger(calls=1)
    ledger.fell_back(Reason.EMPTY)
    ledger.served((8,), 5, 8, 1, False)
    before = ledger.snapshot(1, 100)
    ledger.fell_back(Reason.EMPTY)
    ledger.served((8,), 8, 8, 1, False)
    assert before.fallbacks == {"empty": 1}
    assert before.per_bucket == {8: 1}
    assert (before.real_elements, before.padded_elements) == (5, 8)
    assert (before.graphs, before.graph_bytes) == (1, 100)


def test_the_padding_overhead_is_padded_over_real_minus_one():
    """Over what graphs served; 0 before anything was."""
    ledger = Ledger()
    assert ledger.snapshot(0, 0).padding_overhead == 0.0
    ledger.served((8,), 5, 8, 1, False)
    ledger.served((8,), 8, 8, 1, False)
    assert ledger.snapshot(0, 0).padding_overhead == pytest.approx(16 / 13 - 1)
    ledger.served((8,), 4, 8, 3, False)
    assert ledger.snapshot(0, 0).padding_overhead == pytest.approx(40 / 25 - 1)
    assert ledger.snapshot(0, 0).per_bucket == {8: 5}


def test_buckets_are_ints_in_one_dim_and_tuples_in_more():
    """As they were passed."""
    ledger = Ledger()
    ledger.served((16,), 1, 16, 1, False)
    ledger.served((8,), 1, 8, 1, False)
    assert list(ledger.snapshot(0, 0).per_bucket) == [8, 16]
    ledger = Ledger()
    ledger.served((8, 4), 1, 32, 1, False)
    assert ledger.snapshot(0, 0).per_bucket == {(8, 4): 1}


def test_only_reasons_that_occurred_are_listed():
    """Non-zero only."""
    ledger = Ledger()
    ledger.fell_back(Reason.HOST_SYNC)
    assert ledger.snapshot(0, 0).fallbacks == {"host-sync": 1}
    assert ledger.snapshot(0, 0).eager == 1


def test_printed_stats_have_a_line_for_each_field():
    """Numbers with separators, dicts spelled out."""
    text = str(Stats(calls=1234567, fallbacks={Reason.EMPTY: 2}))
    assert len(text.splitlines()) == len(dataclasses.fields(Stats))
    assert "1,234,567" in text
    assert "empty: 2" in text


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=15))
@settings(max_examples=20, deadline=None)
def test_every_piece_of_work_is_counted_exactly_once(sizes):
    """captures + replays + eager = calls + extra pieces; eager = sum of its reasons (I8)."""
    cache = GraphCache(nn.Linear(2, 2).eval(), [2, 8])
    pieces = 0
    with torch.no_grad():
        for n in sizes:
            explained = cache.explain(torch.ones(n, 2))
            pieces += max(1, len(explained.pieces))
            cache(torch.ones(n, 2))
    stats = cache.stats()
    assert stats.calls == len(sizes)
    assert stats.captures + stats.replays + stats.eager == pieces
    assert stats.eager == sum(stats.fallbacks.values())
    assert sum(stats.per_bucket.values()) == stats.captures + stats.replays
    assert stats.real_elements == sum(sizes)
    assert stats.fallbacks.get("empty", 0) == sizes.count(0)
    assert stats.captures == stats.graphs


def test_a_split_call_that_runs_eagerly_in_the_end_is_counted_once():
    """A result without the split dim that differs between pieces sends the whole call to eager."""

    def function(x):
        return x * 2, x.sum()

    cache = GraphCache(function, [4], dynamic_shapes={"x": {0: "batch"}}, split="batch")
    with torch.no_grad():
        for n in (4, 9, 10):
            x = torch.rand(n, 2)
            for ours, theirs in zip(cache(x), function(x), strict=True):
                torch.testing.assert_close(ours, theirs)
    stats = cache.stats()
    assert stats.captures + stats.replays + stats.eager == stats.calls
    assert stats.eager == sum(stats.fallbacks.values())


def test_the_first_piece_of_a_fresh_graph_is_its_capture():
    ledger = Ledger()
    ledger.served((8,), 5, 8, 3, True)
    ledger.served((8,), 5, 8, 2, False)
    assert (ledger.captures, ledger.replays) == (1, 4)
