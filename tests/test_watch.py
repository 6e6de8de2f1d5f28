"""The watch: which changes of a module are moves, which are modes, and which are neither."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from graphcache import GraphCache
from graphcache.attributes import Attributes
from graphcache.errors import Fallback
from graphcache.holdings import Slots, tree
from graphcache.reasons import Reason
from graphcache.watch import Watch, refuse_hooks


class Holder(nn.Module):
    """Holds a tensor, a number, a list and a dict as plain attributes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.table = torch.ones(3)
        self.scale = 2.0
        self.history = [1]
        self.options = {"flip": False}

    def forward(self, x):
        return self.inner(x) * self.scale + self.table


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def load_in_place(m):
    m.load_state_dict({k: torch.ones_like(v) for k, v in m.state_dict().items()})


def swap_keeping_the_old(m):
    m.keep = m[0].weight.data  # the storage lives on, so that no weak reference tells
    m[0].weight.data = torch.ones(4, 4)


def resize(m):
    storage = m[0].weight.untyped_storage()
    storage.resize_(4096 * 64)


MOVES = {
    "a new Parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 4))),
    "p.data = other": lambda m: setattr(m[0].weight, "data", torch.ones(4, 4)),
    "p.data = other, the old one kept": swap_keeping_the_old,
    "_parameters[k] =": lambda m: m[0]._parameters.__setitem__(
        "weight", nn.Parameter(torch.ones(4, 4))
    ),
    "_buffers[k] =": lambda m: m[1]._buffers.__setitem__("running_mean", torch.ones(4)),
    "register_buffer over a buffer": lambda m: m[1].register_buffer("running_var", torch.ones(4)),
    "register_parameter over one": lambda m: m[0].register_parameter(
        "bias", nn.Parameter(torch.ones(4))
    ),
    "a submodule replaced": lambda m: m.__setitem__(0, nn.Linear(4, 4)),
    "a submodule appended": lambda m: m.append(nn.ReLU()),
    "a submodule removed": lambda m: m.__delitem__(2),
    "double()": lambda m: m.double(),
    "a parameter set to None": lambda m: setattr(m[0], "bias", None),
    "load_state_dict(assign=True)": lambda m: m.load_state_dict(
        {k: v.clone() for k, v in m.state_dict().items()}, assign=True
    ),
    "storage.resize_": resize,
    "parametrize": lambda m: parametrizations.weight_norm(m[0]),
}

NEITHER = {
    "load_state_dict": load_in_place,
    "an optimizer's step": lambda m: m[0].weight.data.add_(1),
    "a buffer written in place": lambda m: m[1].running_mean.add_(1),
    "a gradient": lambda m: setattr(m[0].weight, "grad", torch.ones(4, 4)),
    "requires_grad off": lambda m: m[0].weight.requires_grad_(False),
    "reading": lambda m: (m.state_dict(), list(m.parameters()), repr(m)),
}

MODES = {
    "training flag of one submodule": lambda m: m.inner.eval(),
    "a plain number": lambda m: setattr(m, "scale", 3.0),
    "a plain number of another type": lambda m: setattr(m, "scale", 2),
    "a new attribute": lambda m: setattr(m, "extra", "text"),
    "an attribute deleted": lambda m: delattr(m, "scale"),
}


class TestChanges:
    @pytest.mark.parametrize("name", MOVES)
    def test_tensors_that_lie_elsewhere_are_a_move(self, name):
        """`same()` notices, and a refresh counts one move."""
        module = net()
        watch = Watch(module)
        assert watch.same()
        MOVES[name](module)
        gc.collect()
        assert watch.lost or not watch.same()
        watch.refresh()
        assert watch.moves == 1
        assert watch.same()
        assert not watch.lost

    @pytest.mark.parametrize("name", NEITHER)
    def test_updates_in_place_are_neither(self, name):
        """A replay reads the new values, so nothing is stale."""
        module = net()
        watch = Watch(module)
        state = watch.state
        NEITHER[name](module)
        assert watch.same()
        assert not watch.lost
        watch.refresh()
        assert (watch.moves, watch.state) == (0, state)

    @pytest.mark.parametrize("name", MODES)
    def test_flags_and_plain_attributes_are_modes(self, name):
        """Another number for the signature, no move."""
        module = Holder()
        watch = Watch(module)
        state = watch.state
        MODES[name](module)
        assert not watch.same()
        watch.refresh()
        assert watch.moves == 0
        assert watch.state != state

    def test_a_mode_that_comes_back_has_its_old_number(self):
        """train, eval, train: the first graphs serve again."""
        module = net()
        watch = Watch(module)
        numbers = []
        for mode in (True, False, True, False):
            module.train(mode)
            watch.refresh()
            numbers.append(watch.state)
        assert numbers[0] == numbers[2] != numbers[1] == numbers[3]

    def test_a_held_tensor_that_is_replaced_is_a_move(self):
        """Plain tensor attributes are watched as parameters are."""
        module = Holder()
        watch = Watch(module)
        module.table = torch.zeros(3)
        assert watch.lost or not watch.same()
        watch.refresh()
        assert watch.moves == 1

    def test_a_list_attribute_that_is_replaced_is_noticed(self):
        """Containers of plain values are told apart by value after a refresh."""
        module = Holder()
        watch = Watch(module)
        state = watch.state
        module.history = [2]
        assert not watch.same()
        watch.refresh()
        assert watch.state != state

    def test_freed_memory_is_known_at_once(self):
        """`lost` is set when a watched storage dies, before anyone compares."""
        module = net()
        watch = Watch(module)
        assert not watch.lost
        module[0].weight.data = torch.ones(4, 4)
        assert watch.lost

    def test_a_followed_tensor_that_dies_is_a_loss(self):
        """Closures and globals that a run read are watched like held tensors."""
        module, outside = net(), torch.ones(3)
        watch = Watch(module)
        watch.follow([outside, module[0].weight])
        assert watch.same()
        del outside
        gc.collect()
        assert watch.lost

    def test_a_module_that_is_none_is_always_the_same(self):
        """A plain callable holds nothing that could be seen."""
        watch = Watch(None)
        assert watch.same()
        watch.refresh()
        assert watch.moves == 0


class TestGradients:
    def test_a_held_tensor_that_requires_grad_needs_grad(self):
        """Parameters, plain tensors and followed tensors; none of them, no need."""
        module = net().requires_grad_(False)
        watch = Watch(module)
        assert not watch.needs_grad()
        outside = torch.ones(2, requires_grad=True)
        watch.follow([outside])
        assert watch.needs_grad()
        module[0].weight.requires_grad_(True)
        del outside
        assert watch.needs_grad()


class TestHooks:
    @pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
    def test_a_hook_is_noticed_and_refused_until_it_is_removed(self, kind):
        """A replay would not run it."""
        module = net()
        watch = Watch(module)
        handle = getattr(module[2], kind)(lambda *args: None)
        assert not watch.same()
        watch.refresh()
        assert watch.hooked == "Linear has forward hooks"
        with pytest.raises(Fallback, match="hooks: Linear has forward hooks"):
            refuse_hooks(watch)
        handle.remove()
        watch.refresh()
        assert watch.hooked is None
        refuse_hooks(watch)

    def test_a_global_hook_is_refused(self):
        """It would run for every module."""
        watch = Watch(net())
        handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
        try:
            assert not watch.same()
            watch.refresh()
            with pytest.raises(Fallback) as caught:
                refuse_hooks(watch)
            assert caught.value.reason == Reason.HOOKS
        finally:
            handle.remove()

    @pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
    @pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
    def test_legacy_norms_are_recorded_and_not_refused(self, norm):
        """Their pre-hooks only compute a weight, which a replay computes too."""
        module = norm(nn.Linear(3, 3))
        watch = Watch(module)
        assert watch.hooked is None
        module(torch.ones(2, 3))  # sets the derived weight anew
        assert watch.same()


class TestTree:
    def test_a_cache_inside_stands_for_the_module_it_wraps(self):
        """Its own counters are nobody's state."""
        inner = nn.Linear(4, 4)
        model = nn.Sequential(GraphCache(inner, [8]), nn.ReLU())
        assert inner in list(tree(model))
        watch = Watch(model)
        with torch.no_grad():
            model[0](torch.ones(3, 4))
        assert watch.same()

    def test_modules_behind_many_bound_methods_are_all_found(self):
        """Each part keeps the method of a module of its own."""
        model = nn.Module()
        hidden = [nn.Identity() for _ in range(50)]
        for number, module in enumerate(hidden):
            part = nn.Module()
            part.call = module.forward
            model.add_module(str(number), part)
        found = set(map(id, tree(model)))
        assert all(id(module) in found for module in hidden)

    def test_no_module_has_no_submodules(self):
        """For plain callables."""
        assert list(tree(None)) == []


CHANGES = {
    "a number": lambda m: setattr(m, "scale", 9.0),
    "a new attribute": lambda m: setattr(m, "extra", 1),
    "a deleted attribute": lambda m: delattr(m, "scale"),
    "a list": lambda m: m.history.append(2),
    "a dict": lambda m: m.options.update(flip=True),
    "a dict with a new key": lambda m: m.options.update(more=1),
    "a buffer": lambda m: m.register_buffer("late", torch.ones(1)),
    "a parameter": lambda m: setattr(m.inner, "weight", nn.Parameter(torch.ones(3, 3))),
    "a submodule": lambda m: setattr(m, "more", nn.ReLU()),
}


class TestAttributes:
    @pytest.mark.parametrize("name", CHANGES)
    def test_what_a_run_changed_is_told_and_undone(self, name):
        """Every holder and every list and dict in one is as before, down to the objects."""
        module = Holder()
        before = {k: v for m in module.modules() for k, v in vars(m).items()}
        weight, history = module.inner.weight, module.history
        attributes = Attributes(Slots(module))
        CHANGES[name](module)
        assert attributes.restore()
        assert {k: v for m in module.modules() for k, v in vars(m).items()} == before
        assert module.inner.weight is weight
        assert module.history is history
        assert (history, module.options, module.scale) == ([1], {"flip": False}, 2.0)
        assert not attributes.restore()

    def test_a_run_that_changes_nothing_is_told_so(self):
        """Reading and computing are no change."""
        module = Holder()
        attributes = Attributes(Slots(module))
        module(torch.ones(2, 3))
        assert not attributes.restore()


class TestThroughTheCache:
    """What the watch is for: results stay right whatever happens to the module."""

    @pytest.mark.parametrize("name", [*MOVES, *NEITHER])
    def test_results_equal_eagers_after_every_change(self, name):
        """A capture, the change, and two more calls."""
        module = net().eval()
        cache = GraphCache(module, [8])
        x = torch.randn(5, 4)
        with torch.no_grad():
            cache(x)
            (MOVES | NEITHER)[name](module)
            module.eval()
            x = x.to(next(module.parameters()).dtype)
            for _ in range(2):
                torch.testing.assert_close(cache(x), module(x))
        cache._check()

    @pytest.mark.parametrize("name", MODES)
    def test_results_equal_eagers_after_a_change_of_mode(self, name):
        """Where eager fails on the changed module, so does the cache."""
        module = Holder()
        cache = GraphCache(module, [8])
        x = torch.randn(5, 3)
        with torch.no_grad():
            cache(x)
            MODES[name](module)
            if name == "an attribute deleted":
                with pytest.raises(AttributeError, match="scale"):
                    cache(x)
            else:
                torch.testing.assert_close(cache(x), module(x))

    def test_a_list_changed_in_place_changes_the_result(self):
        """`module.history.append(...)` leaves the attribute's identity alone, and eager sees it."""

        class Sum(nn.Module):
            def __init__(self):
                super().__init__()
                self.history = [1.0]

            def forward(self, x):
                return x * sum(self.history)

        module = Sum()
        cache = GraphCache(module, [4])
        x = torch.ones(3, 2)
        torch.testing.assert_close(cache(x), module(x))
        module.history.append(5.0)
        torch.testing.assert_close(cache(x), module(x))

    def test_a_value_changed_in_a_dict_in_place_changes_the_result(self):
        """As a list, for a dict whose length stays."""

        class Option(nn.Module):
            def __init__(self):
                super().__init__()
                self.options = {"scale": 1.0}

            def forward(self, x):
                return x * self.options["scale"]

        module = Option()
        cache = GraphCache(module, [4])
        x = torch.ones(3, 2)
        torch.testing.assert_close(cache(x), module(x))
        module.options["scale"] = 7.0
        torch.testing.assert_close(cache(x), module(x))

    def test_an_attribute_of_a_held_object_changes_the_result(self):
        """`module.config.scale = ...`, where the config is an object of its own."""

        class Config:
            scale = 1.0

        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.config = Config()

            def forward(self, x):
                return x * self.config.scale

        module = Scale()
        cache = GraphCache(module, [4])
        x = torch.ones(3, 2)
        torch.testing.assert_close(cache(x), module(x))
        module.config.scale = 7.0
        torch.testing.assert_close(cache(x), module(x))
