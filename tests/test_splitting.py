"""Serving a call in pieces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphcache import GraphCache
from graphcache.buckets import Piece
from graphcache.call import Binder, Call, Reading
from graphcache.dims import DynamicDims
from graphcache.errors import Fallback
from graphcache.facts import Facts
from graphcache.modes import Modes
from graphcache.padding import OutputAxis
from graphcache.probe import DimFacts
from graphcache.reasons import Reason
from graphcache.splitting import SplitPlan

SHAPES = {"x": {1: "batch"}, "y": {0: "batch"}}


def split_plan(pieces, x, y, table, axes):
    binder = Binder(lambda x, table, y: None)
    dims = DynamicDims(SHAPES, binder.parameters)
    call = Call(binder, (), {"y": y, "table": table, "x": x})
    reading = Reading(call, dims, {}, Modes(torch.device("cpu")), False, 0)
    facts = Facts(dims=(DimFacts(True, axes=axes, independent=True),))
    return SplitPlan(reading, facts, 0, pieces), call.leaves


@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=6))
@settings(deadline=None)
def test_joining_what_was_cut_gives_back_the_whole(cuts):
    """join(split(x)) == x along each tensor's own axis; what lacks the dim is passed whole."""
    total = sum(cuts)
    ends = [sum(cuts[: i + 1]) for i in range(len(cuts))]
    pieces = [Piece(end - n, end, (4,)) for n, end in zip(cuts, ends, strict=True)]
    x, y, table = torch.randn(2, total), torch.randn(total, 3), torch.randn(5)
    axes = [[OutputAxis(1, 0, 1, 0)], [OutputAxis(0, 0, 1, 0)], []]
    plan, leaves = split_plan(pieces, x, y, table, axes)
    results = []
    for piece in pieces:
        args, kwargs = plan.cut(leaves, piece)
        assert args == ()
        assert kwargs["table"] is table
        results.append({"x": kwargs["x"], "y": kwargs["y"], "table": kwargs["table"]})
    joined = plan.join(results)
    assert torch.equal(joined["x"], x)
    assert torch.equal(joined["y"], y)
    assert torch.equal(joined["table"], table)


def test_results_without_the_dim_must_be_the_same_bit_for_bit():
    """Else `over-max`, and the whole call runs eagerly."""
    pieces = [Piece(0, 2, (2,)), Piece(2, 4, (2,))]
    plan, _ = split_plan(pieces, torch.ones(2, 4), torch.ones(4, 3), torch.ones(5), [[]])
    same = plan.join([torch.tensor([1.0]), torch.tensor([1.0])])
    assert same.tolist() == [1.0]
    with pytest.raises(Fallback, match="differs between the pieces") as caught:
        plan.join([torch.tensor([1.0]), torch.tensor([1.0000001])])
    assert caught.value.reason == Reason.OVER_MAX


@pytest.mark.parametrize("n", [17, 37, 64, 200, 256])
def test_a_split_call_equals_eager_and_is_counted_by_pieces(n):
    """16-row buckets: pieces of the cheapest cover, each a capture or a replay."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    cache = GraphCache(module, [4, 16])
    x = torch.randn(n, 4)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(cache(x), module(x))
        pieces = len(cache.explain(x).pieces)
    stats = cache.stats()
    assert stats.splits == 2
    assert stats.captures + stats.replays == 2 * pieces
    assert stats.padded_elements == 2 * (-(-n // 4) * 4)
    assert stats.fallbacks == {}


def test_a_call_above_sixteen_pieces_runs_eagerly():
    """`over-max`."""
    module = nn.Linear(4, 4).eval()
    cache = GraphCache(module, [4])
    with torch.no_grad():
        for n in (65, 64):
            x = torch.randn(n, 4)
            torch.testing.assert_close(cache(x), module(x))
    assert cache.stats().fallbacks == {"over-max": 1}


def test_nested_results_are_joined_in_their_structure():
    """Dicts and tuples with plain values; a constant table comes back whole."""

    class Rich(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(3))

        def forward(self, x):
            pair = (x + 1, [(x * 3).t()])
            return {"y": x * 2, "pair": pair, "constant": self.table * 2, "tag": "v1"}

    module = Rich().eval()
    cache = GraphCache(module, [4])
    x = torch.randn(10, 3)
    with torch.no_grad():
        ours, theirs = cache(x), module(x)
    assert cache.stats().splits == 1
    assert list(ours) == list(theirs)
    assert ours["tag"] == "v1"
    torch.testing.assert_close(ours["y"], theirs["y"])
    torch.testing.assert_close(ours["pair"][1][0], theirs["pair"][1][0])
    torch.testing.assert_close(ours["constant"], theirs["constant"])


@pytest.mark.parametrize(
    "module",
    [nn.Dropout(0.5).train(), nn.BatchNorm1d(3).train(), nn.Softmax(0)],
    ids=["draws", "writes", "coupled"],
)
def test_what_must_not_be_split_is_not(module):
    """Random draws, written state, coupled rows."""
    cache = GraphCache(module, [4])
    with torch.no_grad():
        for _ in range(2):
            cache(torch.randn(10, 3))
    assert cache.stats().splits == 0


def test_flags_and_ids_that_couple_rows_are_not_cut(device):
    """Whatever the first call holds: all flags false, all ids one."""

    def any_flag(x, flags):
        return torch.where(flags.any(), x * 2, x)

    def largest(x, ids):
        return x * ids.max()

    x = torch.randn(12, 3, device=device)
    flags = torch.zeros(12, dtype=torch.bool, device=device)
    ids = torch.full((12,), 3, device=device)
    with torch.no_grad():
        for function, first in ((any_flag, flags), (largest, ids)):
            cache = GraphCache(function, [4, 8], dynamic_shapes=({0: "b"}, {0: "b"}))
            cache(x, first)
            other = first.clone()
            other[0] = 1
            torch.testing.assert_close(cache(x, other), function(x, other))
            assert cache.stats().splits == 0


def test_a_tensor_passed_twice_is_cut_once(device):
    """In each piece the two arguments are one tensor, as in the call."""

    def same(a, b):
        return a * 2 if a is b else a + b * 3

    cache, x = GraphCache(same, [4]), torch.randn(10, 3, device=device)
    with torch.no_grad():
        torch.testing.assert_close(cache(x, x), x * 2)
        torch.testing.assert_close(cache(x, x.clone()), x * 4)
    assert (cache.stats().splits, cache.stats().eager) == (2, 0)


def test_splitting_may_be_switched_off():
    """split=None: `over-max`."""
    cache = GraphCache(nn.Linear(3, 3).eval(), [4], split=None)
    with torch.no_grad():
        cache(torch.randn(10, 3))
    assert cache.stats().fallbacks == {"over-max": 1}


def test_a_dim_the_caller_named_is_split_unprobed_where_the_probe_is_off():
    """verify="off" splits only a dim named in `split`."""
    shapes = {"input": {0: "batch"}}
    x = torch.randn(10, 3)
    for split, splits in (("auto", 0), ("batch", 1)):
        module = nn.Linear(3, 3).eval()
        cache = GraphCache(module, [4], dynamic_shapes=shapes, verify="off", split=split)
        with torch.no_grad():
            torch.testing.assert_close(cache(x), module(x))
        assert cache.stats().splits == splits
