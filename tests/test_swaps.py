"""Whatever is swapped, added, moved or written in a served module: eager's result at every size.

The same change is made to an eager twin. What moves memory is captured again, what is written in
place is replayed, and a mode that comes back finds its graphs.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from zoo import Twin, assert_same

from graphcache import GraphCache

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
]

SIZES = (3, 8, 11, 3)  # padded, exact, split, and padded once more


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


class Turning(nn.Module):
    """Another sign in training."""

    def forward(self, x):
        return -x if self.training else x


class Net(nn.Module):
    """Something of every kind to change: layers, a buffer, a plain tensor, a plain flag."""

    def __init__(self, device):
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Tanh(), Turning())
        self.decoder = nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))
        self.gain = torch.rand(4, device=device) + 0.5
        self.squared = False
        self.to(device).eval()

    def forward(self, x):
        y = self.decoder(self.body(self.encoder(x))) + self.shift
        y = y * self.gain.to(y.dtype)
        return y * y if self.squared else y


class Adapter(nn.Module):
    """LoRA: a low-rank addition to a layer, which can be switched off."""

    def __init__(self, base):
        super().__init__()
        self.base, self.enabled = base, True
        self.lora_A = nn.Parameter(random_like(base.weight)[:2].clone())
        self.lora_B = nn.Parameter(random_like(base.weight)[:, :2].clone())

    def forward(self, x):
        y = self.base(x)
        return y + F.linear(F.linear(x, self.lora_A), self.lora_B) if self.enabled else y


class Int8(nn.Module):
    """A layer whose weight is kept in bytes, with one scale a row."""

    def __init__(self, layer):
        super().__init__()
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("q", (layer.weight / scale).round().to(torch.int8))
        self.bias = layer.bias

    def forward(self, x):
        return F.linear(x, self.q.to(x.dtype) * self.scale, self.bias)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT

    def right_inverse(self, weight):
        return weight.triu()


def random_like(tensor):
    """Other values in new memory."""
    return torch.randn_like(tensor).requires_grad_(False)


def served(make, device):
    """A cache and a twin that is built like its module, since copies of a parametrized one share
    their class.
    """
    torch.manual_seed(1)
    twin = Twin(GraphCache(make(device), [4, 8]))
    torch.manual_seed(1)
    twin.eager = make(device)
    return twin


def calls(twin, sizes=SIZES):
    weight = next(twin.eager.parameters())
    for n in sizes:
        twin(torch.randn(n, 4, device=weight.device, dtype=weight.dtype))


def both(twin, change, *args):
    """Make one change to the served module and to the twin, with the same random numbers."""
    kept = []
    for module in (twin.cache.module, twin.eager):
        torch.manual_seed(7)
        kept.append(change(module, *args))
    return kept


def changed(twin, change, device):
    """Calls, the change, and calls; gives the counters before and after."""
    before = twin.cache.stats()
    kept = both(twin, change)
    calls(twin)
    del kept
    return before, twin.cache.stats()


def adapted(device):
    net = Net(device)
    net.encoder = Adapter(net.encoder)
    return net


def constrained(device):
    net = Net(device)
    parametrize.register_parametrization(net.encoder, "weight", Symmetric())
    parametrizations.weight_norm(net.decoder)
    return net


def normed(device):
    net = Net(device)
    nn.utils.weight_norm(net.encoder)
    return net


def tied(device):
    net = Net(device)
    net.decoder.weight = net.encoder.weight
    return net


def new_state(module):
    return {name: random_like(value) for name, value in module.state_dict().items()}


def other_adapter(module):
    module.encoder.lora_A = nn.Parameter(random_like(module.encoder.lora_A))
    module.encoder.lora_B = nn.Parameter(random_like(module.encoder.lora_B))


def other_data(module):
    """Gives the old tensors too, so that nothing is freed."""
    old = [parameter.data for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.data = random_like(parameter)
    return old


def other_data_freed(module):
    other_data(module)


def other_data_by_set(module):
    module.encoder.weight.set_(random_like(module.encoder.weight))


def swapped_tensors(module):
    """The Parameter object stays; what is inside moves."""
    weight = module.encoder.weight
    torch.utils.swap_tensors(weight, nn.Parameter(random_like(weight)))


def flattened(module):
    """Every parameter becomes a view of one vector."""
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 1.5, module.parameters())


def halves_exchanged(module):
    """Two parameters trade their memory."""
    a, b = module.encoder.weight, module.decoder.weight
    a.data, b.data = b.data, a.data


MOVES = {
    "another adapter": (adapted, other_adapter),
    "state assigned": (Net, lambda m: m.load_state_dict(new_state(m), assign=True)),
    "data, the old kept": (Net, other_data),
    "data, the old freed": (Net, other_data_freed),
    "data by set_": (Net, other_data_by_set),
    "tensors swapped": (Net, swapped_tensors),
    "one flat vector": (Net, flattened),
    "memory exchanged": (Net, halves_exchanged),
    "to double and back": (Net, lambda m: m.double().float()),
    "a buffer": (Net, lambda m: setattr(m, "shift", random_like(m.shift))),
    "a plain tensor": (Net, lambda m: setattr(m, "gain", random_like(m.gain))),
    "tied": (Net, lambda m: setattr(m.decoder, "weight", m.encoder.weight)),
    "untied": (tied, lambda m: setattr(m.decoder, "weight", nn.Parameter(m.decoder.weight * 2))),
    "the original of a parametrization": (
        constrained,
        lambda m: setattr(
            m.encoder.parametrizations.weight,
            "original",
            nn.Parameter(random_like(m.encoder.weight)),
        ),
    ),
    "a parametrized weight assigned": (
        constrained,
        lambda m: setattr(m.encoder, "weight", Symmetric()(random_like(m.encoder.weight))),
    ),
    "the size of a weight norm": (
        normed,
        lambda m: setattr(m.encoder, "weight_g", nn.Parameter(random_like(m.encoder.weight_g))),
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_moved_memory_is_captured_again(name, device):
    """Under the same keys, once each, and then replayed."""
    make, change = MOVES[name]
    twin = served(make, device)
    calls(twin)
    before, after = changed(twin, change, device)
    assert before.captures == 2
    assert after.recaptures == 2
    assert (after.captures, after.eager) == (4, 0)


def add_adapter(module):
    module.encoder = Adapter(module.encoder)


def merge_adapter(module):
    """Into the weight, and take the wrapper away, as `merge_and_unload` does."""
    adapter = module.encoder
    adapter.base.weight.add_(adapter.lora_B @ adapter.lora_A)
    module.encoder = adapter.base


def quantised(module):
    module.encoder = Int8(module.encoder)
    module.decoder = Int8(module.decoder)


def drop_bias(module):
    module.decoder.bias = None


def delete_layer(module):
    del module.body[0]


OTHER_MODULES = {
    "an adapter added": (Net, add_adapter),
    "an adapter merged": (adapted, merge_adapter),
    "quantised": (Net, quantised),
    "a layer replaced": (Net, lambda m: setattr(m, "decoder", copy.deepcopy(m.encoder))),
    "a layer shared": (Net, lambda m: setattr(m, "decoder", m.encoder)),
    "a layer deleted": (Net, delete_layer),
    "a layer appended": (Net, lambda m: m.body.append(nn.ReLU())),
    "a layer inserted": (Net, lambda m: m.body.insert(0, nn.ReLU())),
    "a layer by identity": (Net, lambda m: setattr(m, "body", nn.Identity())),
    "a bias removed": (Net, drop_bias),
    "a parametrization added": (
        Net,
        lambda m: parametrize.register_parametrization(m.encoder, "weight", Symmetric()),
    ),
    "a parametrization on top": (
        constrained,
        lambda m: parametrize.register_parametrization(m.encoder, "weight", Turned()),
    ),
    "a parametrization removed, its result left": (
        constrained,
        lambda m: parametrize.remove_parametrizations(m.encoder, "weight"),
    ),
    "a parametrization removed, the original left": (
        constrained,
        lambda m: parametrize.remove_parametrizations(
            m.encoder, "weight", leave_parametrized=False
        ),
    ),
    "weight norm added": (Net, lambda m: parametrizations.weight_norm(m.encoder)),
    "weight norm removed": (
        constrained,
        lambda m: parametrize.remove_parametrizations(m.decoder, "weight"),
    ),
    "the old weight norm added": (Net, lambda m: nn.utils.weight_norm(m.encoder)),
    "the old weight norm removed": (
        normed,
        lambda m: nn.utils.remove_weight_norm(m.encoder),
    ),
}


class Turned(nn.Module):
    def forward(self, weight):
        return weight.mT * 2


@pytest.mark.parametrize("name", OTHER_MODULES)
def test_other_submodules_get_graphs_of_their_own(name, device):
    """Also where the module's attributes all look as before; what was served stays served."""
    make, change = OTHER_MODULES[name]
    twin = served(make, device)
    calls(twin)
    before, after = changed(twin, change, device)
    assert before.captures == 2
    assert (after.captures, after.eager) == (4, 0)
    change_weights_in_place(twin)
    calls(twin)
    assert twin.cache.stats().captures == 4


def change_weights_in_place(twin):
    both(twin, lambda module: [p.mul_(1.25) for p in module.parameters()])


def step(kind, module):
    """One step of an optimizer, with gradients set by hand."""
    optimizer = kind(module.parameters())
    with torch.enable_grad():
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    optimizer.zero_grad()


def ema(module):
    for parameter in module.parameters():
        parameter.lerp_(torch.randn_like(parameter), 0.3)


def merge_in_place(module):
    adapter = module.encoder
    adapter.base.weight.add_(adapter.lora_B @ adapter.lora_A)
    adapter.lora_B.zero_()


IN_PLACE = {
    "SGD": (Net, functools.partial(step, functools.partial(torch.optim.SGD, lr=0.1))),
    "Adam": (Net, functools.partial(step, functools.partial(torch.optim.Adam, lr=0.1))),
    "state loaded": (Net, lambda m: m.load_state_dict(new_state(m))),
    "copy_": (Net, lambda m: m.encoder.weight.copy_(random_like(m.encoder.weight))),
    "mul_": (Net, lambda m: m.encoder.weight.mul_(2)),
    "mul_ of data": (Net, lambda m: m.encoder.weight.data.mul_(2)),
    "one element": (Net, lambda m: m.encoder.weight.__setitem__((0, 1), 3.0)),
    "EMA": (Net, ema),
    "all at once": (Net, lambda m: torch._foreach_mul_(list(m.parameters()), 0.5)),
    "init": (Net, lambda m: nn.init.normal_(m.decoder.weight)),
    "reset_parameters": (Net, lambda m: m.encoder.reset_parameters()),
    "a buffer": (Net, lambda m: m.shift.copy_(random_like(m.shift))),
    "a plain tensor": (Net, lambda m: m.gain.mul_(-1)),
    "an adapter": (adapted, lambda m: m.encoder.lora_B.mul_(-2)),
    "an adapter merged": (adapted, merge_in_place),
    "a tied weight": (tied, lambda m: m.decoder.weight.mul_(2)),
    "the original of a parametrization": (
        constrained,
        lambda m: m.encoder.parametrizations.weight.original.mul_(2),
    ),
    "the size of a weight norm": (normed, lambda m: m.encoder.weight_g.mul_(2)),
    "frozen": (Net, lambda m: m.requires_grad_(False)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_replayed(name, device):
    """No further capture, and the new values in every result."""
    make, change = IN_PLACE[name]
    twin = served(make, device)
    calls(twin)
    before, after = changed(twin, change, device)
    assert before.captures == after.captures == 2
    assert (after.recaptures, after.eager) == (0, 0)
    assert after.replays == before.replays + 5


def set_training(module, value):
    module.body[1].training = value


def set_enabled(module, value):
    module.encoder.enabled = not value


def set_squared(module, value):
    module.squared = value


MODES = {
    "a flag": (Net, set_squared),
    "an adapter's flag": (adapted, set_enabled),
    "the training flag of one layer": (Net, set_training),
    "train and eval": (Net, lambda m, value: m.train(value)),
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_that_comes_back_finds_its_graphs(name, device):
    """A, B, A, B: two captures each, the rest replays."""
    make, change = MODES[name]
    twin = served(make, device)
    captures = []
    for value in (False, True, False, True):
        both(twin, change, value)
        calls(twin)
        captures.append(twin.cache.stats().captures)
    stats = twin.cache.stats()
    assert captures == [2, 4, 4, 4]
    assert (stats.recaptures, stats.eager) == (0, 0)


@pytest.mark.parametrize("name", ["a flag", "train and eval"])
def test_graphs_of_a_mode_that_rests_see_what_was_written_meanwhile(name, device):
    """In place they are replayed; after a move each mode captures anew."""
    make, change = MODES[name]
    twin = served(make, device)
    for value in (False, True, False, True):
        both(twin, change, value)
        calls(twin)
        change_weights_in_place(twin)
    assert twin.cache.stats().captures == 4
    both(twin, other_data_freed)
    for value in (False, True):
        both(twin, change, value)
        calls(twin)
    assert twin.cache.stats().recaptures == 4


def test_an_adapter_on_disk_comes_and_goes(device):
    """Added, switched off and on, exchanged, trained, merged and taken away."""
    twin = served(Net, device)
    life = [
        add_adapter,
        lambda m: setattr(m.encoder, "enabled", False),
        lambda m: setattr(m.encoder, "enabled", True),
        other_adapter,
        lambda m: m.encoder.lora_A.mul_(1.5),
        merge_adapter,
        add_adapter,
    ]
    for change in life:
        calls(twin)
        both(twin, change)
    calls(twin)
    assert twin.cache.stats().eager == 0


def test_weights_tied_untied_and_tied_again(device):
    """What is written to one then shows in the other, or does not."""
    twin = served(Net, device)
    own = nn.Parameter(random_like(twin.eager.decoder.weight))
    for is_tied in (True, False, True, False):
        for module in (twin.cache.module, twin.eager):
            shared = module.encoder.weight
            module.decoder.weight = shared if is_tied else nn.Parameter(own.clone())
        calls(twin)
        both(twin, lambda module: module.encoder.weight.mul_(-1.5))
        calls(twin)
    assert twin.cache.stats().eager == 0


@pytest.mark.parametrize("swap", [False, True], ids=["data", "swapped"])
def test_each_dtype_on_the_way_there_and_back(swap, device):
    """Also where `.to()` swaps the tensors inside the Parameters."""
    twin = served(Net, device)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for dtype in (torch.float64, torch.float16, torch.float32, torch.bfloat16, torch.float32):
            calls(twin)
            both(twin, lambda module, dtype=dtype: module.to(dtype))
        calls(twin)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    stats = twin.cache.stats()
    assert stats.eager == 0
    assert stats.recaptures == 4


def test_a_frozen_module_is_served_in_grad_mode(device):
    """And not before, nor once it is thawed again."""
    twin = served(Net, device)
    calls(twin)
    with torch.enable_grad():
        for frozen, eager in ((False, 1), (True, 1), (False, 2), (True, 2)):
            both(twin, lambda module, frozen=frozen: module.requires_grad_(not frozen))
            x = torch.randn(3, 4, device=device)
            assert_same(twin.cache(x), twin.eager(x))
            assert twin.cache.stats().fallbacks == {"grad": eager}
    assert twin.cache.stats().captures == 2


def test_one_part_that_is_thawed_asks_for_gradients(device):
    twin = served(Net, device)
    both(twin, lambda module: module.requires_grad_(False))
    calls(twin)
    both(twin, lambda module: module.decoder.bias.requires_grad_(True))
    x = torch.randn(3, 4, device=device)
    with torch.enable_grad():
        y = twin.cache(x)
        y.sum().backward()
    assert twin.cache.module.decoder.bias.grad is not None
    calls(twin)
    assert twin.cache.stats().fallbacks == {"grad": 1}


def test_parameters_passed_for_one_call(device):
    """`functional_call` puts others in for the call, and takes them out after it."""
    twin = served(Net, device)
    calls(twin)
    for n in (3, 8, 3):
        x = torch.randn(n, 4, device=device)
        state = new_state(twin.eager)
        ours = torch.func.functional_call(twin.cache, state, (x,))
        assert_same(ours, torch.func.functional_call(twin.eager, state, (x,)))
        twin(x)


def test_a_parametrized_weight_that_is_kept_for_a_block(device):
    """`parametrize.cached()` computes it once, and forgets it after the block."""
    twin = served(constrained, device)
    calls(twin)
    for _ in range(2):
        with parametrize.cached():
            calls(twin)
        change_weights_in_place(twin)
        calls(twin)


def test_changes_through_the_cache_reach_the_module(device):
    """The cache passes for its module: the same changes made to the cache itself."""
    twin = served(Net, device)
    changes = [
        lambda m: m.double(),
        lambda m: m.float(),
        lambda m: m.load_state_dict(new_state(m), assign=True),
        lambda m: setattr(m, "squared", True),
        lambda m: setattr(m, "decoder", nn.Identity()),
        lambda m: setattr(m, "gain", m.gain * 2),
        lambda m: m.train(),
    ]
    for change in changes:
        calls(twin)
        for module in (twin.cache, twin.eager):
            torch.manual_seed(7)
            change(module)
    calls(twin)
    assert twin.cache.stats().eager == 0


def test_a_change_in_the_middle_of_a_warmed_and_sealed_cache(device):
    """Nothing may be captured any more: moved weights run eagerly, written ones are replayed."""
    twin = served(Net, device)
    x = torch.randn(1, 4, device=device)
    twin.cache.warmup(sample=x, progress=False)
    twin.cache.seal()
    calls(twin, (3, 8))
    change_weights_in_place(twin)
    calls(twin, (3, 8))
    assert (twin.cache.stats().replays, twin.cache.stats().eager) == (4, 0)
    both(twin, other_data_freed)
    calls(twin, (3, 8))
    assert twin.cache.stats().fallbacks == {"not-admitted": 2}
