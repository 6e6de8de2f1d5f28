"""Calls of a form that was read before: planned from their shapes, as a reading would plan them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphcache import GraphCache, Reason
from graphcache.call import Call
from graphcache.compare import close
from graphcache.forms import Form
from graphcache.miss import MissPath


class Counted:
    """Counts the calls that were read; each that was not must be planned as a reading plans it."""

    def __init__(self, monkeypatch):
        self.read = self.quick = 0
        anew, known = MissPath._planned_anew, MissPath._planned_as

        def planned_anew(miss, args, kwargs):
            self.read += 1
            return anew(miss, args, kwargs)

        def planned_as(miss, form, leaves):
            plan = known(miss, form, leaves)
            if plan is not None:
                self.quick += 1
                self.plans.append((plan.entry.key, plan.traffic or miss.sizes_read, plan._slots))
            return plan

        self.plans = []
        monkeypatch.setattr(MissPath, "_planned_anew", planned_anew)
        monkeypatch.setattr(MissPath, "_planned_as", planned_as)


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


def read(cache, args, kwargs):
    """What a reading says: the key of the graph, the sizes, the slots."""
    reading, _, route = cache._miss.routed(Call(cache._miss.binder, args, kwargs))
    return (reading.signature, route.bucket), reading.sizes, reading.call.slots


class Mixed(nn.Module):
    """Rows and columns of two tensors, a vector without a dim, a flag and an option."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 6)

    def forward(self, ids, x, side=None, *, double=False):
        out = self.table(ids) + x
        if side is not None:
            out = out * side.sum()
        return out * 2 if double else out


DIMS = {"ids": {0: "rows", 1: "columns"}, "x": {0: "rows", 1: "columns"}}


def call_of(rows, columns, dtype, side, double, turned, keyword):
    ids = (
        torch.randint(0, 20, (columns, rows)).T if turned else torch.randint(0, 20, (rows, columns))
    )
    x = torch.randn(rows, columns, 6).to(dtype)
    kwargs = {} if side is None else {"side": torch.randn(side)}
    kwargs |= {"double": True} if double else {}
    return ((), {"x": x, "ids": ids, **kwargs}) if keyword else ((ids, x), kwargs)


calls = st.builds(
    call_of,
    rows=st.integers(1, 8),  # larger calls are cut in pieces, which are calls of their own
    columns=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64]),
    side=st.sampled_from([None, None, 3, 5]),
    double=st.booleans(),
    turned=st.booleans(),
    keyword=st.booleans(),
)


@given(stream=st.lists(calls, min_size=2, max_size=8))
@settings(max_examples=15, deadline=None)
def test_a_known_form_is_planned_as_a_reading_plans_it(stream, monkeypatch):
    """The same graph, sizes and slots, and eager's result; whatever came before."""
    with monkeypatch.context() as patch:
        counted = Counted(patch)
        module = Mixed().eval()
        cache = GraphCache(module, [(4, 4), (8, 6)], dynamic_shapes=DIMS)
        with torch.no_grad():
            for args, kwargs in (*stream, *stream):
                cache._server.drop_plans()
                counted.plans.clear()
                assert close(cache(*args, **kwargs), module(*args, **kwargs))
                for plan in counted.plans:
                    assert plan == read(cache, args, kwargs)
                cache._check()


def test_further_sizes_are_not_read(counted, device):
    """One reading a graph, and two where a graph's first padded call is compared."""
    module = nn.Linear(4, 2).to(device).eval()
    cache = GraphCache(module, [8, 16])
    cache.warmup(sample=torch.ones(1, 4, device=device), progress=False)
    with torch.no_grad():
        for n in (3, 12, *range(1, 17)):
            x = torch.randn(n, 4, device=device)
            assert close(cache(x), module(x))
    assert counted.read <= 4
    assert counted.quick + counted.read == 16
    assert cache.stats().replays == 18


def test_a_length_that_is_equal_by_chance_is_read(counted):
    """A side input as long as the batch may follow it."""

    class Weighted(nn.Module):
        def forward(self, x, w):
            return x * w if len(x) == len(w) else x * w.sum()

    module = Weighted()
    cache = GraphCache(module, [8])
    w = torch.tensor([[1.0], [2.0], [3.0]])
    for n in (5, 6, 4, 3, 7, 3, 2):
        x = torch.randn(n, 2)
        assert close(cache(x, w), module(x, w)), n


def test_what_changes_between_calls_is_noticed():
    """Hooks, moves, modes, other buckets and a forgotten graph, each before a new size."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    cache = GraphCache(module, [8, 16])
    sizes = iter(range(2, 16))

    def served():
        x = torch.randn(next(sizes), 4)
        with torch.no_grad():
            torch.manual_seed(0)
            ours = cache(x)
            torch.manual_seed(0)
            assert close(ours, module(x))
        cache._check()

    for _ in range(3):
        served()
    seen = []
    hook = module[0].register_forward_hook(lambda *_: seen.append(1))
    served()
    assert len(seen) == 2
    assert cache.stats().fallbacks[Reason.HOOKS] == 1
    hook.remove()
    served()
    module[0].weight = nn.Parameter(torch.randn(4, 4))
    served()
    served()
    cache.rebucket([5, 16])
    served()
    served()
    cache.invalidate()
    served()
    module.train()
    served()
    module.eval()
    served()
    assert cache.stats().fallbacks[Reason.HOOKS] == 1
    assert cache.stats().replays >= 4


def test_calls_that_need_gradients_still_run_eagerly(counted):
    """Of a form whose calls without them have graphs."""
    cache = GraphCache(lambda x: x * 2, [8])
    for n in (2, 3, 4, 5):
        cache(torch.ones(n, 2))
    assert counted.quick
    x = torch.ones(6, 2, requires_grad=True)
    cache(x).sum().backward()
    assert x.grad.eq(2).all()
    assert cache.stats().fallbacks == {Reason.GRAD: 1}


def test_one_tensor_passed_twice_is_another_form(counted):
    """As is a call in which they are two."""
    cache = GraphCache(lambda a, b: a - b if a is not b else a + 1, [8])
    for n in (2, 3, 4, 5):
        a, b = torch.randn(n, 2), torch.randn(n, 2)
        assert torch.equal(cache(a, b), a - b)
        assert torch.equal(cache(a, a), a + 1)


def test_a_size_of_zero_is_empty():
    """Eager, with its own reason."""
    cache = GraphCache(nn.Linear(4, 2), [8])
    with torch.no_grad():
        for n in (2, 3, 4, 0):
            assert cache(torch.ones(n, 4)).shape == (n, 2)
    assert cache.stats().fallbacks == {Reason.EMPTY: 1}


def test_the_check_can_fail(monkeypatch):
    """With static sizes left out of the comparison another width would be served by this graph."""
    original = Form.sizes

    def sizes(self, leaves):
        return original(self, [leaf[..., :3] for leaf in leaves])

    cache = GraphCache(lambda x: x.cumsum(1), [8])
    for n in (2, 3):
        cache(torch.ones(n, 3))
    monkeypatch.setattr(Form, "sizes", sizes)
    with pytest.raises(RuntimeError):
        cache(torch.ones(4, 5))
