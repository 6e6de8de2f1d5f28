"""Weights of another day: told apart, replaced in trials only, and what they bring out."""

import pytest
import torch
from torch import nn

from graphcache import GraphCache
from graphcache.otherweights import other_weights, standing_in
from graphcache.storages import storage_id


def parameter(values):
    return nn.Parameter(torch.tensor(values))


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.0, 1.0, 1.0], 0.0, -2.0, [[0.0]]])
def test_what_tells_nothing_gets_a_substitute(values):
    """One value throughout, and scalars that are not positive. The parameter stays as it is."""
    gate = parameter(values)
    before = gate.detach().clone()
    found = other_weights([gate])
    other = standing_in(found[storage_id(gate)], gate)
    assert other.shape == gate.shape
    assert (other > 0).all()
    assert other.numel() == 1 or other.unique().numel() > 1
    assert torch.equal(gate, before)


@pytest.mark.parametrize("values", [[1.0, 2.0], 3.0, []])
def test_what_tells_enough_is_left_alone(values):
    assert other_weights([parameter(values)]) == {}


def test_integers_are_left_alone():
    """Quantised weights, which may be indices."""
    assert other_weights([nn.Parameter(torch.zeros(3, dtype=torch.int32), False)]) == {}


def test_parameters_of_one_storage_share_one_substitute():
    """As those of a flattened RNN or of FSDP; the other part keeps its values."""
    flat = torch.arange(6.0)
    flat[:3] = 0
    quiet, loud = nn.Parameter(flat[:3]), nn.Parameter(flat[3:])
    found = other_weights([quiet, loud])
    assert len(found) == 1
    (substitute,) = found.values()
    assert (standing_in(substitute, quiet) > 0).all()
    assert torch.equal(standing_in(substitute, loud), loud)


class Gated(nn.Module):
    """A batch coupling behind a gate that is closed at first."""

    def __init__(self, gate):
        super().__init__()
        self.gate = parameter(gate)

    def forward(self, x):
        return x + torch.relu(self.gate) * (x - x.mean(0))


class LowRank(nn.Module):
    """LoRA's B, zero at first, over attention between the rows."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 2)
        self.b = nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return x + self.b(torch.softmax(x @ x.T, -1) @ self.a(x))


@pytest.mark.parametrize(
    "module",
    [lambda: Gated(0.0), lambda: Gated(-1.0), lambda: Gated([0.0] * 4), LowRank],
    ids=["zero", "negative", "vector", "low-rank"],
)
def test_a_gate_that_opens_later_lets_nothing_wrong_through(module):
    """Opened in place, which no replay and no watch would notice."""
    torch.manual_seed(0)
    net = module()
    cache = GraphCache(net, buckets=[4, 8])
    with torch.no_grad():
        for n in (3, 5, 13):
            x = torch.randn(n, 4)
            torch.testing.assert_close(cache(x), net(x))
        for gate in net.parameters():
            gate.add_(0.7)
        for n in (3, 5, 13):
            x = torch.randn(n, 4)
            torch.testing.assert_close(cache(x), net(x))
    assert cache.stats().fallbacks.keys() == {"batch-coupled"}


def test_a_gate_over_nothing_coupled_changes_nothing():
    """ReZero over a layer of its own, and a fresh LayerNorm: padded and split as ever."""
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    nn.init.zeros_(net[0].weight)
    cache = GraphCache(net, buckets=[4, 8])
    with torch.no_grad():
        for n in (3, 5, 13):
            x = torch.randn(n, 4)
            torch.testing.assert_close(cache(x), net(x))
    assert cache.stats().eager == 0
    assert cache.stats().splits == 1


@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_tensor_may_be_the_other_way_round_another_day(flag):
    """A scalar argument is no part of the key, so what is learned must hold for either."""

    def centred(x, on):
        return torch.where(on, x - x.mean(0), x)

    cache = GraphCache(centred, buckets=[8])
    for on in (flag, not flag):
        x = torch.randn(3, 4)
        torch.testing.assert_close(cache(x, torch.tensor(on)), centred(x, torch.tensor(on)))


def test_a_scalar_of_zero_may_be_another_number_another_day():
    def blended(x, share):
        return x + share * x.mean(0)

    cache = GraphCache(blended, buckets=[8])
    for share in (0.0, 0.5, -1.0):
        x = torch.randn(3, 4)
        share = torch.tensor(share)
        torch.testing.assert_close(cache(x, share), blended(x, share))


def test_trials_leave_the_module_and_its_gates_alone():
    net = Gated(0.0)
    version = net.gate._version
    cache = GraphCache(net, buckets=[8])
    with torch.no_grad():
        cache.probe(torch.randn(3, 4))
    assert net.gate.item() == 0.0
    assert net.gate._version == version


class Normaliser(nn.Module):
    """Statistics in buffers that are loaded later; the padded part is a constant then."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x, mask):
        return ((x * mask[..., None] - self.mean) / self.var.sqrt()).sum(1)


def test_statistics_loaded_later_let_nothing_wrong_through():
    net, dims = Normaliser(), ({0: "batch", 1: "seq"},) * 2
    cache = GraphCache(net, {"batch": [4], "seq": [8]}, dynamic_shapes=dims)
    x, mask = torch.randn(2, 5, 4), torch.ones(2, 5, dtype=torch.bool)
    with torch.no_grad():
        torch.testing.assert_close(cache(x, mask), net(x, mask))
        net.load_state_dict({"mean": torch.ones(4), "var": torch.full((4,), 2.0)})
        torch.testing.assert_close(cache(x, mask), net(x, mask))


class Held(nn.Module):
    """A batch coupling behind what is held in another way than as a parameter."""

    def __init__(self, gate, buffer):
        super().__init__()
        if buffer:
            self.register_buffer("gate", gate)
        else:
            self.gate = gate

    def forward(self, x):
        gate = self.gate if self.gate.dim() == 0 else self.gate[-1]
        return torch.where(gate > 0, x - x.mean(0), x)


@pytest.mark.parametrize("buffer", [True, False], ids=["buffer", "attribute"])
@pytest.mark.parametrize("gate", [False, 0, 0.0, [1.0, 0.0], [True, False]], ids=str)
def test_gates_in_buffers_and_attributes_hide_nothing(gate, buffer):
    """Scalars, flags and vectors of which a part is closed."""
    net = Held(torch.tensor(gate), buffer)
    cache, x = GraphCache(net, buckets=[8]), torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(cache(x), net(x))
            net.gate.fill_(1)


@pytest.mark.parametrize(
    "flags",
    [(0, 1), ([0, 0], [1, 0]), ([0, 1], [1, 1]), ([False, True], [True, True]), ([0.0, 1.0], 1.0)],
    ids=str,
)
def test_flags_of_any_type_may_be_on_another_day(flags):
    """Numbers, and vectors without a dynamic dim, of which a part is off."""

    def centred(x, on):
        return x - on.flatten()[0] * x.mean(0)

    off, on = torch.tensor(flags[0]), torch.tensor(flags[1]).expand(torch.tensor(flags[0]).shape)
    cache, x = GraphCache(centred, buckets=[8]), torch.randn(3, 4)
    for flag in (off, on):
        torch.testing.assert_close(cache(x, flag), centred(x, flag))


def test_a_number_that_is_an_index_stays_in_its_table():
    """Where a 1 is out of range, what the module holds is tried without it: no refusal."""

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.stage = torch.tensor(0)
            self.table = nn.Embedding(1, 4)

        def forward(self, x):
            return x * self.table(self.stage)

    net = Stage()
    cache, x = GraphCache(net, buckets=[8]), torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(cache(x), net(x))
    assert cache.stats().eager == 0


@pytest.mark.parametrize(
    "gate",
    [
        torch.zeros(4, dtype=torch.long),
        torch.zeros(2, 4, dtype=torch.int8),
        torch.zeros(2, 4, dtype=torch.bool),
        torch.zeros(4, dtype=torch.complex64),
        torch.full((4,), float("nan")),
    ],
    ids=["integers", "matrix of integers", "matrix of flags", "complex", "nan"],
)
def test_gates_of_any_type_hide_nothing(gate):
    class Open(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("gate", gate.clone())

        def forward(self, x):
            share = torch.view_as_real(self.gate).flatten() if gate.is_complex() else self.gate
            return x + share.flatten()[0].nan_to_num() * x.mean(0)

    net = Open()
    cache, x = GraphCache(net, buckets=[8]), torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(cache(x), net(x))
            net.gate.fill_(1)


def test_flags_that_are_all_on_may_be_off_another_day():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("own", torch.ones(4, dtype=torch.bool))

        def forward(self, x):
            return torch.where(self.own, x, x.mean(0))

    net = Kept()
    cache, x = GraphCache(net, buckets=[8]), torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(cache(x), net(x))
            net.own.fill_(False)
