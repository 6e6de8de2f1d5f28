"""Changes that a graph must not outlive, whatever the cache's answer is: compared with a twin."""

import array
import collections
import contextvars
import dataclasses
import datetime
import functools
import operator
import threading
import types
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm

from graphcache import GraphCache
from graphcache.holdings import Slots

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


def twins(make, device="cpu"):
    """Two modules with the same weights: one for the cache, one for eager."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(make().to(device))
    return modules


def follows(make, change, x, buckets=(8,), device="cpu"):
    """A capture and a replay, the same change of both twins, and then what eager gives, twice."""
    module, plain = twins(make, device)
    cache = GraphCache(module, buckets)
    x = x.to(device)
    for _ in range(2):
        torch.testing.assert_close(cache(x), plain(x))
    assert cache.stats().replays > cache.stats().eager == 0
    change(module)
    change(plain)
    for _ in range(2):
        torch.testing.assert_close(cache(x), plain(x))
    return cache, module, plain


class TestSplits:
    """A call above the largest bucket runs in pieces of one graph."""

    def test_batch_norm_back_in_training_sees_the_whole_batch(self, device):
        """Neither its result nor its statistics are those of the pieces."""
        x = torch.randn(20, 4) * 3 + 1
        cache, module, plain = follows(
            lambda: nn.BatchNorm1d(4).eval(), lambda m: m.train(), x, [8, 16], device
        )
        torch.testing.assert_close(module.state_dict(), plain.state_dict())
        assert cache.stats().splits == 2  # as before the change

    def test_a_hook_runs_once_a_call(self, device):
        """Not once for each piece."""
        ran = collections.Counter()

        def count(module):
            module.register_forward_hook(lambda m, *args: ran.update([m]))

        x = torch.randn(20, 4)
        cache, module, plain = follows(lambda: nn.Linear(4, 2), count, x, [8, 16], device)
        assert ran == {module: 2, plain: 2}
        assert cache.stats().splits == 2


def test_a_grown_vocabulary_is_looked_up_in_the_new_table():
    """The old table has no such row: a replay raises here, and on a GPU ends the context."""
    module = nn.Sequential(nn.Embedding(10, 4), nn.Tanh())
    cache = GraphCache(module, [8])
    cache(torch.tensor([1, 2, 3]))
    assert cache.stats().graphs == 1
    module[0] = nn.Embedding(20, 4)
    i = torch.tensor([15, 2, 3])
    for _ in range(3):
        torch.testing.assert_close(cache(i), module(i))
    assert cache.stats().eager == 0


def test_a_stale_replay_draws_no_random_numbers(device):
    """A dropout in eval mode leaves the generator where it was."""
    get_state = torch.cuda.get_rng_state if device == "cuda" else torch.get_rng_state
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).to(device)
    cache = GraphCache(module)
    x = torch.ones(3, 4, device=device)
    cache(x)
    assert cache.stats().captures == 1
    module.eval()
    before = get_state()
    torch.testing.assert_close(cache(x), module(x))
    assert torch.equal(get_state(), before)


class Acting(nn.Module):
    """Computes by a function that it holds."""

    def __init__(self):
        super().__init__()
        self.act = None

    def forward(self, x):
        return self.act(x)


def test_functions_that_come_one_after_another_are_told_apart(device):
    """Each is freed before the next is made, often at the same address."""
    module = Acting()
    cache = GraphCache(module, [8], max_graphs=64)
    x = torch.ones(3, 4, device=device)
    for k in range(1, 40):
        module.act = lambda v, k=k: v * k
        for _ in range(2):
            torch.testing.assert_close(cache(x), x * k)
    stats = cache.stats()
    assert (stats.captures, stats.replays, stats.eager) == (39, 39, 0)


class TwoLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.mul, self.add = [3.0], []

    def forward(self, x):
        for k in self.mul:
            x = x * k
        for k in self.add:
            x = x + k
        return x


def move_along(module):
    module.mul, module.add = [], module.mul


def test_a_value_that_moves_to_the_list_beside_it_is_noticed(device):
    """The values are the same, and in the same order."""
    cache, *_ = follows(TwoLists, move_along, torch.ones(3, 4), device=device)
    assert (cache.stats().captures, cache.stats().eager) == (2, 0)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_hook_beside_a_norms_own_is_run(device):
    """Those of a weight norm are recorded, this one is not."""
    cache, *_ = follows(
        lambda: weight_norm(nn.Linear(4, 4)),
        lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 5,)),
        torch.ones(3, 4),
        device=device,
    )
    assert cache.stats().fallbacks == {"hooks": 2}


def test_a_hook_of_a_cache_inside_is_run(device):
    """The outer graph holds the inner module without it."""
    nested, plain = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), device)
    nested[0] = GraphCache(nested[0], [8])
    cache = GraphCache(nested, [8])
    x = torch.ones(3, 4, device=device)
    torch.testing.assert_close(cache(x), plain(x))
    assert cache.stats().captures == 1
    for hooked in (nested[0], plain[0]):
        hooked.register_forward_hook(lambda m, args, out: out * 0 + 7)
    for _ in range(2):
        torch.testing.assert_close(cache(x), plain(x))
    assert cache.stats().fallbacks == {"hooks": 2}


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 2.0

    def forward_like(self):
        return self.k


@dataclasses.dataclass(slots=True)
class Slotted:
    k: float = 2.0


class WithDict(Slotted):
    """Slots of its base, and a dict of its own."""

    def __init__(self):
        super().__init__()
        self.other = 1.0


class Classed:
    """What it holds, its class holds."""

    k = 2.0


class Locked(dict):
    """Written to by the ways of dict alone."""

    def __setitem__(self, key, value):
        raise TypeError("locked")

    def items(self):
        raise TypeError("locked")


class Open(dict):
    """A dict with attributes beside its entries."""

    def __init__(self):
        super().__init__(a=1)
        self.k = 2.0


class OpenList(list):
    def __init__(self):
        super().__init__([1])
        self.k = 2.0


def times(x, k=2.0):
    return x * k


class Holder(nn.Module):
    """Multiplies by what it reads from what it holds."""

    def __init__(self, held, read):
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x):
        return x * self.read(self.held)


def k_of(get):
    """What holds an object with an attribute k: how it is read and changed."""
    return lambda held: get(held).k, lambda held: setattr(get(held), "k", 5.0)


def first(held):
    return held[0]


def copied(function, **attributes):
    """A function with attributes of its own."""
    other = types.FunctionType(function.__code__, globals())
    other.__dict__.update(attributes)
    return other


def local(**attributes):
    made = threading.local()
    made.__dict__.update(attributes)
    return made


KEPT, DICTS = [], []  # what nothing but a weak reference, or a view, holds


HELD = {
    "a module in a list": (lambda: [Scale()], *k_of(first)),
    "a module in a tuple": (lambda: (Scale(),), *k_of(first)),
    "a module in a dict": (lambda: {"a": Scale()}, *k_of(lambda held: held["a"])),
    "a module in a list of lists": (lambda: [[Scale()]], *k_of(lambda held: held[0][0])),
    "an object in a tuple": (lambda: (types.SimpleNamespace(k=2.0),), *k_of(first)),
    "an object with slots": (Slotted, *k_of(lambda held: held)),
    "an object with slots in a list": (lambda: [Slotted()], *k_of(first)),
    "a set": (set, lambda held: 5.0 if held else 2.0, lambda held: held.add(1)),
    "a set of as many": (lambda: {2.0}, sum, lambda held: (held.clear(), held.add(5.0))),
    "an object with slots of its base": (WithDict, *k_of(lambda held: held)),
    "a module in an ordered dict": (
        lambda: collections.OrderedDict(a=Scale()),
        *k_of(lambda held: held["a"]),
    ),
    "a module in an object": (
        lambda: types.SimpleNamespace(a=Scale()),
        *k_of(lambda held: held.a),
    ),
    "a module by a bound method": (
        lambda: Scale().forward_like,
        lambda held: held.__self__.k,
        lambda held: setattr(held.__self__, "k", 5.0),
    ),
    "a module by a weak reference": (
        lambda: weakref.ref(KEPT[-1]) if KEPT.append(Scale()) is None else None,
        *k_of(lambda held: held()),
    ),
    "a partial": (
        lambda: functools.partial(times, 1.0, k=2.0),
        lambda held: held(),
        lambda held: held.keywords.update(k=5.0),
    ),
    "the class of an object": (
        lambda: type("Mine", (Classed,), {})(),
        lambda held: held.k,
        lambda held: setattr(type(held), "k", 5.0),
    ),
    "a class": (lambda: type("Mine", (Classed,), {}), *k_of(lambda held: held)),
    "a class of another": (
        lambda: type("Mine", (Classed,), {}),
        lambda held: held.k,
        lambda held: setattr(held, "k", 5.0),
    ),
    "a locked dict": (
        lambda: Locked(k=2.0),
        lambda held: held["k"],
        lambda held: dict.__setitem__(held, "k", 5.0),
    ),
    "a read-only dict": (
        lambda: types.MappingProxyType(DICTS[-1]) if DICTS.append({"k": 2.0}) is None else None,
        lambda held: held["k"],
        lambda held: [d.update(k=5.0) for d in DICTS],
    ),
    "an attribute of a dict": (lambda: Open(), *k_of(lambda held: held)),
    "an attribute of a list": (lambda: OpenList(), *k_of(lambda held: held)),
    "bytes": (lambda: bytearray(b"\2"), first, lambda held: held.__setitem__(0, 5)),
    "an array of numbers": (
        lambda: array.array("d", [2.0]),
        first,
        lambda held: held.__setitem__(0, 5.0),
    ),
    "a function's attribute": (
        lambda: copied(times, k=2.0),
        lambda held: held.k,
        lambda held: setattr(held, "k", 5.0),
    ),
    "a context's value": (
        lambda: contextvars.ContextVar("k", default=2.0),
        lambda held: held.get(),
        lambda held: held.set(5.0),
    ),
    "a thread's value": (
        lambda: local(k=2.0),
        *k_of(lambda held: held),
    ),
    "a deque": (
        lambda: collections.deque([1.0, 2.0], maxlen=2),
        lambda held: held[0],
        lambda held: held.append(5.0),
    ),
    "a small array": (
        lambda: np.full(2, 2.0),
        lambda held: float(held[1]),
        lambda held: held.__setitem__(1, 5.0),
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_what_lies_inside_what_a_module_holds_is_watched(name, device):
    make, read, change = HELD[name]
    cache, *_ = follows(
        lambda: Holder(make(), read), lambda m: change(m.held), torch.ones(3, 4), device=device
    )
    assert (cache.stats().captures, cache.stats().eager) == (2, 0)


def test_a_module_that_is_an_unregistered_attribute_is_watched(device):
    """`self.__dict__` and `object.__setattr__` keep it from nn.Module's eyes."""

    class Unregistered(nn.Module):
        def __init__(self):
            super().__init__()
            self.__dict__["inner"] = nn.Linear(4, 4).to(device)

        def forward(self, x):
            return self.inner(x)

    def change(m):
        m.inner.weight = nn.Parameter(torch.ones(4, 4, device=device), requires_grad=False)

    follows(Unregistered, change, torch.ones(3, 4), device=device)


def test_a_distribution_that_a_module_holds_is_watched():
    follows(
        lambda: Holder(torch.distributions.Normal(2.0, 1.0), lambda held: held.loc),
        lambda m: setattr(m.held, "loc", torch.tensor(5.0)),
        torch.ones(3, 4),
    )


def test_the_class_of_a_submodule_is_watched(device):
    """`module.__class__ = ...`, as parametrizations and quantisers do."""

    class Plain(nn.Linear):
        pass

    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def change(m):
        m[0].__class__ = Doubled

    follows(lambda: nn.Sequential(Plain(4, 4)), change, torch.ones(3, 4), device=device)


@pytest.mark.parametrize("form", [dict, list])
def test_what_lies_in_a_container_of_the_class_is_watched(form, device):
    key = "k" if form is dict else 0

    class ByClass(nn.Module):
        held: ClassVar = {"k": 2.0} if form is dict else [2.0]

        def forward(self, x):
            return x * self.held[key]

    cache, x = GraphCache(ByClass().to(device), [8]), torch.ones(3, 4, device=device)
    cache(x)
    ByClass.held[key] = 5.0
    torch.testing.assert_close(cache(x), x * 5)
    assert (cache.stats().captures, cache.stats().eager) == (2, 0)


def test_a_counter_on_the_class_counts_calls(device):
    """No trial counts, and no replay leaves out a count."""

    class Counting(nn.Module):
        counts: ClassVar = {"calls": 0}

        def forward(self, x):
            self.counts["calls"] += 1
            return x * self.counts["calls"]

    cache, x = GraphCache(Counting().to(device), [8]), torch.ones(3, 4, device=device)
    for call in (1, 2, 3):
        torch.testing.assert_close(cache(x), x * call)
        assert Counting.counts["calls"] == call


def test_models_of_many_submodules_are_watched_too(device):
    """More than a thousand, and an object that one of them holds."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Identity() for _ in range(1100))
            self.config = types.SimpleNamespace(k=2.0)

        def forward(self, x):
            return x * self.config.k

    follows(Deep, lambda m: setattr(m.config, "k", 5.0), torch.ones(3, 4), device=device)


def test_conjugated_weights_are_noticed(device):
    """The lazy bit lies in the tensor object, not in its memory."""
    module = Holder(nn.Parameter(torch.randn(4, dtype=torch.complex64)), lambda held: held)
    cache = GraphCache(module.to(device).requires_grad_(False), [8])
    x = torch.randn(3, 4, dtype=torch.complex64, device=device)
    cache(x)
    module.held.data = module.held.data.conj()
    torch.testing.assert_close(cache(x), module(x))


def test_weights_cached_by_parametrize_are_not_captured(device):
    """Within `parametrize.cached()` forward reads a kept value, later the weight."""
    module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)).to(device).requires_grad_(False)
    cache, x = GraphCache(module, [8]), torch.ones(3, 4, device=device)
    with nn.utils.parametrize.cached():
        torch.testing.assert_close(cache(x), module(x))
    module.parametrizations.weight.original0.mul_(3)
    torch.testing.assert_close(cache(x), module(x))
    assert cache.stats().fallbacks == {"hooks": 1}


class Hiding(nn.Module):
    """Holds a dropout of everything where nn.Module does not look for it."""

    def __init__(self, training):
        super().__init__()
        self.dropouts = [nn.Dropout(1.0).train(training)]

    def forward(self, x):
        return self.dropouts[0](x) + 1


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_a_hidden_dropout_is_noticed(training, device):
    follows(
        lambda: Hiding(training),
        lambda m: m.dropouts[0].train(not training),
        torch.ones(3, 4),
        device=device,
    )


@pytest.fixture
def by_class():
    """A class of its own for each test, which changes it."""

    class ByClass(nn.Module):
        k = 2.0

        def forward(self, x):
            return x * self.k

    return ByClass


@pytest.mark.parametrize(
    ("name", "value"),
    [("k", 5.0), ("forward", lambda self, x: x * self.k + 1)],
    ids=["k", "forward"],
)
@pytest.mark.parametrize("inherited", [False, True])
def test_what_the_class_holds_is_watched(by_class, name, value, inherited, device):
    """A value or the forward, of the class itself or of its base."""
    kind = type("Inherited", (by_class,), {}) if inherited else by_class
    cache, *_ = follows(
        kind, lambda m: setattr(by_class, name, value), torch.ones(3, 4), device=device
    )
    assert (cache.stats().captures, cache.stats().eager) == (2, 0)


@pytest.fixture(params=[True, False], ids=["training", "eval"])
def training(request):
    return request.param


class TestScripted:
    def make(self, training):
        module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0))
        return torch.jit.script(module).train(training)

    def test_the_caches_mode_reaches_it(self, training):
        module = self.make(training)
        cache = GraphCache(module, [8])
        assert cache.train(not training) is cache
        assert [part.training for part in module.modules()] == [not training] * 3
        assert cache.eval() is cache
        assert not any(part.training for part in module.modules())
        x = torch.ones(3, 4)
        for mode in (False, True, False):
            module.train(mode)
            for _ in range(2):
                torch.testing.assert_close(cache(x), module(x))


VIEWS = {
    "transposed": lambda w: setattr(w, "data", w.data.t()),
    "in place": lambda w: w.t_(),
    "fewer rows": lambda w: setattr(w, "data", w.data[:2]),
}


@pytest.mark.parametrize("how", VIEWS)
def test_another_view_of_the_same_memory_is_noticed(how, device):
    """The address alone does not tell."""
    module = nn.Linear(4, 4, bias=False).to(device).requires_grad_(False)
    cache = GraphCache(module, [8])
    x = torch.randn(3, 4, device=device)
    cache(x)
    VIEWS[how](module.weight)
    torch.testing.assert_close(cache(x), module(x))


SCALE = 1.0
KNOBS = {"shift": 0.0}


def shifted(x):
    return x + KNOBS["shift"]


class ByNames(nn.Module):
    """Reads globals in forward, in a method and in a function that they call."""

    def forward(self, x):
        return shifted(self._scaled(x))

    def _scaled(self, x):
        return x * SCALE


def serves(cache, change):
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(cache(x), cache.module(x))
            torch.testing.assert_close(cache(x), cache.module(x))
            change()
    assert cache.stats().fallbacks == {}


@pytest.mark.parametrize("change", [{"SCALE": 3.0}, {"KNOBS": {"shift": 2.0}}, "shift"], ids=str)
def test_globals_that_the_users_code_names_are_watched(change, monkeypatch):
    def changes():
        if change == "shift":
            monkeypatch.setitem(KNOBS, "shift", 5.0)
        else:
            for name, value in change.items():
                monkeypatch.setitem(globals(), name, value)

    serves(GraphCache(ByNames(), [4]), changes)


class Scaler:
    """A plain object that holds a module."""

    def __init__(self, model):
        self.model, self.scale = model, 2.0

    def __call__(self, x):
        return self.model(x) * self.scale

    def serve(self, x):
        return self(x)


def behind(kind, model):
    """A callable of some kind that calls a module, and what else it reads."""
    held = Scaler(model)
    scales = [2.0]

    def by_default(x, scales=scales):
        return model(x) * scales[0]

    return {
        "lambda": (lambda x: model(x) * scales[0], lambda: scales.__setitem__(0, 3.0)),
        "default": (by_default, lambda: scales.__setitem__(0, 3.0)),
        "partial": (functools.partial(model), model.train),
        "partial of a bound method": (functools.partial(model.forward), model.train),
        "object": (held, lambda: setattr(held, "scale", 3.0)),
        "bound method of an object": (held.serve, lambda: setattr(held, "scale", 3.0)),
    }[kind]


@pytest.mark.parametrize("what", ["its own", "weight", "training", "submodule"])
@pytest.mark.parametrize(
    "kind",
    [
        "lambda",
        "default",
        "partial",
        "partial of a bound method",
        "object",
        "bound method of an object",
    ],
)
def test_a_module_behind_a_callable_is_watched(kind, what):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    call, change = behind(kind, model)
    changes = {
        "its own": change,
        "weight": lambda: setattr(model[0].weight, "data", torch.randn(4, 4)),
        "training": lambda: setattr(model[1], "track_running_stats", False),
        "submodule": lambda: setattr(model, "0", nn.Linear(4, 4)),
    }
    if changes[what] == model.train:
        changes[what] = lambda: model[0].weight.data.neg_()
    serves(GraphCache(call, [3]), changes[what])


class Tool:
    """A namespace, and a plain object with a method."""

    scale = 1.0

    def apply(self, x):
        return x * SCALE


TOOL = Tool()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * SCALE

    @staticmethod
    def backward(ctx, grad):
        return grad


@torch.no_grad()
def without_grad(x):
    return x * SCALE


class OfManyKinds(nn.Module):
    """Reads a global in a method of another kind than a plain one."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.tool = kind, TOOL

    @staticmethod
    def static(x):
        return x * SCALE

    @classmethod
    def of_class(cls, x):
        return x * SCALE

    @property
    def scale(self):
        return SCALE

    @torch.no_grad()
    def decorated(self, x):
        return x * SCALE

    def __getitem__(self, x):
        return x * SCALE

    def forward(self, x):
        return {
            "static": lambda: self.static(x),
            "class": lambda: self.of_class(x),
            "property": lambda: x * self.scale,
            "decorated": lambda: self.decorated(x),
            "decorated function": lambda: without_grad(x),
            "item": lambda: self[x],
            "object": lambda: self.tool.apply(x),
            "global object": lambda: TOOL.apply(x),
            "made": lambda: Tool().apply(x),
            "autograd": lambda: Scaled.apply(x),
            "namespace": lambda: x * Tool.scale,
        }[self.kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "static",
        "class",
        "property",
        "decorated",
        "decorated function",
        "item",
        "object",
        "global object",
        "made",
        "autograd",
        "namespace",
    ],
)
def test_globals_are_watched_in_methods_of_every_kind(kind, monkeypatch):
    def change():
        monkeypatch.setitem(globals(), "SCALE", SCALE + 1)
        monkeypatch.setattr(Tool, "scale", SCALE + 1)

    serves(GraphCache(OfManyKinds(kind), [4]), change)


def test_defaults_assigned_anew_are_noticed():
    def scaled(x, scale=1.0):
        return x * scale

    serves(GraphCache(scaled, [4]), lambda: setattr(scaled, "__defaults__", (3.0,)))


logits = [0]


class Named(nn.Module):
    """Its attribute has the name of a global of this file, which it does not read."""

    def __init__(self):
        super().__init__()
        self.logits = 1.0

    def forward(self, x):
        return x * self.logits


def test_a_global_of_an_attributes_name_is_nobodys(monkeypatch):
    """Neither compared nor put back after a trial run."""
    cache, x = GraphCache(Named(), [4]), torch.randn(3, 4)
    assert not any(value is logits for _, _, value in Slots(cache.module).places)
    with torch.no_grad():
        for _ in range(3):
            monkeypatch.setitem(globals(), "logits", cache(x))
    assert cache.stats().captures == 1
    assert cache.stats().replays == 2


def test_a_cell_that_is_empty_is_no_change():
    def outer():
        def forward(x):
            return late(x) if len(x) > 100 else x * 2

        if len(logits) > 1:
            late = torch.relu
        return forward

    cache = GraphCache(outer(), [4])
    serves(cache, lambda: None)


class Refusing:
    """Answers no question, as proxies of a context do outside of it."""

    def __getattribute__(self, name):
        raise RuntimeError(f"working outside of context: {name}")


class OfNoModule:
    pass


OfNoModule.__module__ = None
ODD = {}


def test_objects_that_refuse_to_be_asked_are_left_alone():
    ODD.update(proxy=Refusing(), nowhere=OfNoModule())

    def scaled(x):
        return x * len(ODD)

    serves(GraphCache(scaled, [4]), lambda: None)


class Patched(nn.Module):
    """Its methods, and a class and an object that its class holds."""

    class Numbers:
        scale = 1.0

    act = Scaler(nn.Identity())

    def forward(self, x):
        return self.scaled(x) * self.Numbers.scale * self.act.scale

    def scaled(self, x):
        return x

    @staticmethod
    def fixed(x):
        return x


@pytest.mark.parametrize("what", ["method", "class", "object"])
def test_what_a_class_holds_is_watched(what, monkeypatch):
    def change():
        if what == "method":
            monkeypatch.setattr(Patched, "scaled", lambda self, x: x * 5)
        elif what == "class":
            monkeypatch.setattr(Patched.Numbers, "scale", 3.0)
        else:
            monkeypatch.setattr(Patched.act, "scale", 7.0)

    serves(GraphCache(Patched(), [4]), change)


def test_wrappers_that_go_in_circles_are_left_alone():
    def first(x):
        return x * 2

    def second(x):
        return first(x)

    first.__wrapped__, second.__wrapped__ = second, first
    with torch.no_grad():
        cache = GraphCache(lambda x: second(x), [4])
        torch.testing.assert_close(cache(torch.ones(3, 4)), torch.full((3, 4), 2.0))


@pytest.mark.parametrize(
    "value", [datetime.timedelta(1), operator.itemgetter(0), datetime.datetime(2026, 1, 1)], ids=str
)
def test_objects_of_c_are_no_hindrance(value):
    net = nn.Linear(4, 4)
    net.held = value
    cache = GraphCache(net, [4])
    with torch.no_grad():
        torch.testing.assert_close(cache(torch.ones(3, 4)), net(torch.ones(3, 4)))
    assert cache.stats().captures == 1
