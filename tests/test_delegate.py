"""A cache in a model's place: no trace in state dicts, and all a module does is forwarded."""

import copy
import pickle

import pytest
import torch
from torch import nn

from graphcache import GraphCache


class Net(nn.Module):
    """With a parameter, a buffer, a non-persistent buffer, submodules and a plain attribute."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.bias = nn.Parameter(torch.zeros(4))
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.scale = 1.0

    def forward(self, x):
        return self.norm(self.first(x)) * self.scale + self.bias + self.table

    def double_of(self, x):
        return self.forward(x) * 2


class Model(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.encoder(x))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def cache(net):
    return GraphCache(net, [8])


X = torch.arange(12.0).view(3, 4) / 10


def run(module, x=X):
    with torch.no_grad():
        return module(x)


def assert_serves(cache, module, x=X):
    """Twice, so that a replay is among it."""
    for _ in range(2):
        torch.testing.assert_close(run(cache, x), run(module, x))


class TestNames:
    def test_state_dict_keys_carry_no_prefix(self, net, cache):
        """The keys, and the tensors, are the module's own."""
        ours, theirs = cache.state_dict(), net.state_dict()
        assert list(ours) == list(theirs)
        assert all(ours[k].data_ptr() == theirs[k].data_ptr() for k in ours)
        assert "scratch" not in ours

    @pytest.mark.parametrize("what", ["named_parameters", "named_buffers", "named_children"])
    def test_named_things_are_the_modules_own(self, net, cache, what):
        """The same names, the same objects."""
        ours, theirs = dict(getattr(cache, what)()), dict(getattr(net, what)())
        assert list(ours) == list(theirs)
        assert all(ours[k] is theirs[k] for k in ours)

    def test_a_parents_state_dict_does_not_change_when_a_part_is_graphed(self):
        """`model.encoder = GraphCache(model.encoder)` keeps every key and its order."""
        model = Model(Net())
        before = model.state_dict()
        parameters = [name for name, _ in model.named_parameters()]
        buffers = [name for name, _ in model.named_buffers()]
        model.encoder = GraphCache(model.encoder, [8])
        after = model.state_dict()
        assert list(after) == list(before)
        assert [name for name, _ in model.named_parameters()] == parameters
        assert [name for name, _ in model.named_buffers()] == buffers

    def test_each_parameter_is_listed_once_in_a_parent(self):
        """An optimizer must not get one twice."""
        model = Model(GraphCache(Net(), [8]))
        found = [id(p) for p in model.parameters()]
        assert len(found) == len(set(found)) == 7

    def test_an_optimizer_over_the_caches_parameters_trains_the_module(self, net, cache):
        """They are the same Parameters; the graph reads the new values without a recapture."""
        run(cache)
        optimizer = torch.optim.SGD(cache.parameters(), lr=0.1)
        net(X).sum().backward()
        before = net.bias.clone()
        optimizer.step()
        assert not torch.equal(net.bias, before)
        assert_serves(cache, net)
        assert cache.stats().recaptures == 0


class TestLoading:
    def test_load_state_dict_reaches_the_module(self, net, cache):
        """In place, and the next call serves the new weights."""
        run(cache)
        state = {k: torch.full_like(v, 2) for k, v in net.state_dict().items()}
        result = cache.load_state_dict(state)
        assert result.missing_keys == []
        assert result.unexpected_keys == []
        assert net.bias.eq(2).all()
        assert_serves(cache, net)

    def test_missing_and_unexpected_keys_are_reported_as_the_module_would(self, net, cache):
        """strict and not."""
        state = net.state_dict()
        state.pop("bias")
        state["more"] = torch.ones(1)
        with pytest.raises(RuntimeError, match="Missing key"):
            cache.load_state_dict(state)
        result = cache.load_state_dict(state, strict=False)
        assert result.missing_keys == ["bias"]
        assert result.unexpected_keys == ["more"]

    def test_a_parent_loads_into_the_graphed_part(self):
        """A checkpoint of the plain model loads into the graphed one, and back."""
        plain, graphed = Model(Net()).eval(), Model(GraphCache(Net(), [8])).eval()
        run(graphed)
        graphed.load_state_dict(plain.state_dict())
        assert_serves(graphed, plain)
        plain.load_state_dict(graphed.state_dict())

    def test_a_parent_reports_keys_of_the_graphed_part(self):
        """With the parent's prefix."""
        graphed = Model(GraphCache(Net(), [8]))
        state = graphed.state_dict()
        state.pop("encoder.first.weight")
        result = graphed.load_state_dict(state, strict=False)
        assert result.missing_keys == ["encoder.first.weight"]

    def test_load_state_dict_with_assign_is_served(self, net, cache):
        """New storages: one recapture, right results."""
        run(cache)
        cache.load_state_dict({k: v.clone() + 1 for k, v in net.state_dict().items()}, assign=True)
        assert_serves(cache, net)


class TestForwarded:
    def test_double_converts_the_module(self, net, cache):
        """Parameters of the module itself, and calls in the new dtype."""
        run(cache)
        assert cache.double() is cache
        assert net.bias.dtype == torch.float64
        assert_serves(cache, net, X.double())

    def test_a_parents_double_converts_the_graphed_part(self):
        """`model.double()` goes through the parent's `_apply`."""
        model = Model(GraphCache(Net(), [8])).eval()
        run(model)
        model.double()
        assert all(p.dtype == torch.float64 for p in model.parameters())
        assert run(model, X.double()).dtype == torch.float64

    def test_train_and_eval_reach_every_submodule(self, net, cache):
        """And return the cache; `training` is read from the module."""
        assert cache.train() is cache
        assert net.training
        assert net.norm.training
        assert cache.training
        assert cache.eval() is cache
        assert not net.norm.training
        assert not cache.training

    def test_a_parents_train_and_eval_reach_the_graphed_part(self):
        """The parent's flags and the module's agree."""
        model = Model(GraphCache(Net(), [8]))
        model.eval()
        assert not model.encoder.module.norm.training
        model.train()
        assert model.encoder.module.norm.training

    def test_a_module_that_overrides_train_keeps_its_own(self):
        """A frozen BatchNorm stays in eval when the cache is told to train."""

        class Frozen(Net):
            def train(self, mode=True):
                super().train(mode)
                self.norm.eval()
                return self

        cache = GraphCache(Frozen(), [8])
        cache.train()
        assert cache.module.first.training
        assert not cache.module.norm.training

    def test_unknown_attributes_are_read_from_the_module(self, net, cache):
        """Attributes, submodules and methods."""
        assert cache.scale == 1.0
        assert cache.first is net.first
        torch.testing.assert_close(cache.double_of(X), net.double_of(X))

    def test_an_attribute_that_nobody_has_is_named_in_the_error(self, cache):
        """As the module says it."""
        with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
            _ = cache.nothing

    def test_writes_go_to_the_module(self, net, cache):
        """A plain attribute, seen by the next call."""
        run(cache)
        cache.scale = 3.0
        assert net.scale == 3.0
        assert "scale" not in vars(cache)
        assert_serves(cache, net)

    def test_parameters_and_submodules_written_through_the_cache_are_the_modules(self, net, cache):
        """`cache.first = ...` registers on the module."""
        run(cache)
        cache.first = nn.Linear(4, 4)
        cache.bias = nn.Parameter(torch.full((4,), 5.0))
        assert net.first is cache.first
        assert net.bias.eq(5).all()
        assert_serves(cache, net)

    def test_attributes_are_deleted_from_the_module(self, net, cache):
        """`del cache.scale`."""
        del cache.scale
        assert not hasattr(net, "scale")

    def test_apply_visits_the_modules_own_tree(self, net, cache):
        """The function gets the module and its submodules, not the cache."""
        seen = []
        assert cache.apply(seen.append) is cache
        assert seen == [net.first, net.norm, net]

    def test_registering_through_the_cache_registers_on_the_module(self, net, cache):
        """Buffers, parameters and submodules."""
        cache.register_buffer("late", torch.ones(1))
        cache.register_parameter("extra", nn.Parameter(torch.ones(1)))
        cache.add_module("more", nn.ReLU())
        assert "late" in dict(net.named_buffers())
        assert "extra" in dict(net.named_parameters())
        assert net.more is cache.more
        cache.register_buffer("hidden", torch.ones(1), persistent=False)
        assert "hidden" not in net.state_dict()

    def test_requires_grad_and_zero_grad_reach_the_module(self, net, cache):
        """Both are the module's."""
        net.bias.grad = torch.ones(4)
        cache.zero_grad()
        assert net.bias.grad is None
        cache.requires_grad_(False)
        assert not any(p.requires_grad for p in net.parameters())

    def test_the_wrapped_module_is_at_module(self, net, cache):
        """Whatever was wrapped: module, bound method or function."""
        assert cache.module is net
        assert GraphCache(net.double_of, [8]).module == net.double_of


class TestHooks:
    def test_hooks_on_the_cache_itself_fire_on_each_call(self, cache):
        """Pre-hook, hook with a new result, and its removal."""
        seen = []
        handles = [
            cache.register_forward_pre_hook(lambda m, args: seen.append("before")),
            cache.register_forward_hook(lambda m, args, out: out * 0),
        ]
        for _ in range(3):
            assert run(cache).eq(0).all()
        assert seen == ["before"] * 3
        assert cache.stats().replays == 2
        for handle in handles:
            handle.remove()
        assert not run(cache).eq(0).all()


class TestCopies:
    def test_a_deep_copy_has_graphs_and_weights_of_its_own(self, net, cache):
        """Changing one leaves the other alone; nothing is shared."""
        run(cache)
        twin = copy.deepcopy(cache)
        assert twin.stats().calls == 0
        assert twin.module is not net
        with torch.no_grad():
            net.bias.fill_(9.0)
        assert not torch.equal(run(twin), run(cache))
        assert_serves(twin, twin.module)
        assert_serves(cache, net)
        assert twin.stats().graphs == 1

    def test_a_deep_copy_keeps_its_options(self, net):
        """Buckets and settings travel."""
        twin = copy.deepcopy(GraphCache(net, [4, 8], on_fallback="warn", capture_after=2))
        run(twin)
        assert twin.stats().fallbacks == {"not-admitted": 1}
        run(twin)
        assert twin.stats().per_bucket == {4: 1}

    def test_a_deep_copy_of_a_parent_keeps_the_sharing(self):
        """A module reached twice in the model is one module in the copy as well."""
        model = Model(Net())
        model.also = model.encoder
        model.encoder = GraphCache(model.encoder, [8])
        twin = copy.deepcopy(model)
        assert twin.encoder.module is twin.also
        assert twin.encoder.module is not model.also

    def test_a_pickle_brings_a_fresh_cache_with_the_same_results(self, net, cache):
        """Graphs are not pickled, weights and options are."""
        expected = run(cache)
        twin = pickle.loads(pickle.dumps(cache))
        assert twin.stats().calls == 0
        torch.testing.assert_close(run(twin), expected)
        assert twin.stats().per_bucket == {8: 1}

    def test_a_cache_over_a_bound_method_is_copied_with_its_module(self, net):
        """The copy's method is bound to the copy's module."""
        cache = GraphCache(net.double_of, [8])
        expected = run(cache)
        for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            torch.testing.assert_close(run(twin), expected)
            assert twin.module.__self__ is not net
            assert list(twin.state_dict()) == list(net.state_dict())

    def test_torch_save_and_load_bring_a_working_cache(self, net, cache, tmp_path):
        """The usual way to write a whole model."""
        expected = run(cache)
        torch.save(Model(cache).eval(), tmp_path / "model.pt")
        twin = torch.load(tmp_path / "model.pt", weights_only=False)
        torch.testing.assert_close(run(twin.encoder), expected)


class TestCallables:
    def test_a_bound_method_counts_as_its_module(self, net):
        """State dict, modes and results are the module's."""
        cache = GraphCache(net.double_of, [8])
        assert list(cache.state_dict()) == list(net.state_dict())
        for _ in range(2):
            torch.testing.assert_close(run(cache), run(net.double_of))
        assert cache.stats().replays == 1

    def test_a_plain_callable_has_no_state(self):
        """An empty state dict, its own training flag, and the usual service."""
        cache = GraphCache(lambda x: x * 2, [8])
        assert cache.state_dict() == {}
        assert cache.load_state_dict({}) is not None
        assert list(cache.parameters()) == []
        assert cache.eval() is cache
        assert cache.double() is cache
        assert cache.apply(lambda m: None) is cache
        assert torch.equal(cache(X), X * 2)

    def test_a_plain_callable_lacks_attributes_as_a_module_does(self):
        """With the class's name in the error."""
        with pytest.raises(AttributeError, match="nothing"):
            _ = GraphCache(lambda x: x, [8]).nothing

    def test_attributes_of_a_plain_callables_cache_are_its_own(self):
        """There is no module to forward to."""
        cache = GraphCache(lambda x: x, [8])
        cache.note = "text"
        assert cache.note == "text"
        del cache.note
        assert not hasattr(cache, "note")


class TestWrapped:
    """What others put around a module, around a cache."""

    def test_forward_may_be_wrapped(self, net, cache):
        """As accelerate does it; the old forward serves by graphs."""
        expected, old, calls = run(net), cache.forward, []

        def doubled(x):
            calls.append(x)
            assert len(calls) < 3
            return old(x) * 2

        cache.forward = doubled
        for _ in range(2):
            torch.testing.assert_close(run(cache), expected * 2)
        assert (cache.stats().captures, cache.stats().replays) == (1, 1)
        torch.testing.assert_close(run(net), expected)
        del cache.forward
        torch.testing.assert_close(run(cache), expected)

    def test_a_full_backward_hook_runs(self):
        """Once a backward pass, with the gradients that a plain module's hook gets."""
        plain = Net().eval()
        cache = GraphCache(copy.deepcopy(plain), [8])
        seen = []
        for module in (cache, plain):
            module.register_full_backward_hook(lambda m, given, got: seen.append((given, got)))
            for _ in range(2):
                x = X.clone().requires_grad_()
                module(x).sum().backward()
        assert len(seen) == 4
        for ours, theirs in zip(seen[:2], seen[2:], strict=True):
            torch.testing.assert_close(ours, theirs)
